"""Which reports of a forkserver its node believes: those that fit its commands and the kernel.

A forkserver preloads modules, which are user code and can write to its socket as well. So a report
is the claim of a stranger: it must be readable, about a host that the node asked for, and in order.
That a process is a host, and that it has ended, the node asks the kernel.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.system.claimed_process import ProcessMismatch, has_hung_up, open_claimed
from tunemq_shared.system.processes import children_of, is_readable
from tunemq_workers.processes.forkserver_messages import (
    MAX_PACKET_BYTES,
    ForkserverPong,
    ForkserverReady,
    ForkserverReport,
    ForkserverWarned,
    PreloadBegan,
    ProcessExited,
    ProcessForked,
    ProcessTreeGone,
    decode_report,
)

_HIGHEST_SIGNAL: Final = 64
_HIGHEST_EXIT_CODE: Final = 255


class InvalidReport(Exception):
    """A forkserver reported what cannot be; says what."""


@dataclass(slots=True)
class _ReportedProcess:
    """What is known of a host: ``pid`` is None until it is forked.

    ``pidfd`` is None, too, where the process ended before it was examined, no descriptor was left
    for it, or /proc hid it: a host is as private as its forkserver until it has left that.
    """

    pid: int | None = None
    pidfd: int | None = None
    has_exited: bool = False


class ReportedProcesses:
    """The hosts of one forkserver, as the node believes its reports.

    Args:
        control: the node's socket to the forkserver.
        forkserver: its pid, a child of this process that was not waited for.
        user: who its hosts have to run as; by default anybody.
    """

    def __init__(self, control: socket.socket, forkserver: int, user: int | None) -> None:
        #: It has reported something that is true as far as can be known.
        self.has_reported = False
        self.is_ready = False
        #: The module that it is importing.
        self.preloading: str | None = None
        self._control, self._forkserver, self._user = control, forkserver, user
        self._processes: dict[str, _ReportedProcess] = {}

    def ask(self, process: str) -> None:
        """The node asks for a host of this name, which was not used before."""
        self._processes[process] = _ReportedProcess()

    def names(self) -> list[str]:
        """The hosts of which something may be left."""
        return sorted(self._processes)

    def unended(self) -> list[str]:
        """The hosts that are not known to have ended."""
        return sorted(name for name, process in self._processes.items() if not process.has_exited)

    def process_of(self, process: str) -> tuple[int, int] | None:
        """The pidfd and the pid of a host that runs, as far as is known."""
        known = self._processes.get(process)
        if known is None or known.pid is None or (pidfd := self._pidfd_of(known)) is None:
            return None
        return pidfd, known.pid

    def receive(self) -> ForkserverReport | None:
        """Receive the next report; None at the end of the connection.

        Raises:
            BlockingIOError: there is none.
            ConnectionResetError: the forkserver ended with commands unread; what it had sent
                before is still to be received.
            BadReport: it cannot be true, or cannot be read.
        """
        # Without room for descriptors the kernel closes those that come along.
        packet, _, flags, _ = self._control.recvmsg(MAX_PACKET_BYTES)
        if not packet:
            return None
        if flags & socket.MSG_TRUNC:
            raise InvalidReport(f"it sent a packet of more than {MAX_PACKET_BYTES} bytes")
        try:
            report: ForkserverReport = decode_report(packet)
        except UNDECODABLE as error:
            raise InvalidReport(f"it sent a packet that is no report ({error})") from error
        self._note(report)
        self.has_reported = True
        return report

    def kill(self, process: str) -> None:
        """Kill a host that runs, as far as is known; what it has started is the forkserver's."""
        known = self._processes.get(process)
        if known is not None and (pidfd := self._pidfd_of(known)) is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def kill_all(self, within_s: float) -> None:
        """Kill all hosts, and wait so long for their end."""
        deadline = time.monotonic() + within_s
        for name in self._processes:
            self.kill(name)
        for process in self._processes.values():
            if process.pidfd is not None:
                is_readable(process.pidfd, deadline - time.monotonic())

    def forget(self) -> None:
        """Know of no host any more."""
        close_all(process.pidfd for process in self._processes.values())
        self._processes.clear()

    def _note(self, report: ForkserverReport) -> None:
        match report:
            case ProcessForked(name, pid):
                self._forked(self._known(name, report), pid)
            case ProcessExited(name):
                self._exited(self._known(name, report), report)
            case ProcessTreeGone(name):
                process = self._known(name, report)
                if not process.has_exited:
                    raise InvalidReport(f"it reported {report}, and that host has not ended")
                if (left := self._left_by(process)) is not None:
                    raise InvalidReport(
                        f"it reported {report}, and process {left} of that host runs"
                    )
                del self._processes[name]
            case PreloadBegan() | ForkserverReady() if self.is_ready:
                raise InvalidReport(f"it reported {report} after it was ready")
            case PreloadBegan(module):
                self.preloading = module
            case ForkserverReady():
                self.is_ready, self.preloading = True, None
            case ForkserverWarned() | ForkserverPong():
                pass

    def _known(self, name: str, report: ForkserverReport) -> _ReportedProcess:
        if (process := self._processes.get(name)) is None:
            raise InvalidReport(f"it reported {report}, and there is no such host")
        return process

    def _forked(self, process: _ReportedProcess, pid: int) -> None:
        if process.pid is not None or process.has_exited:
            raise InvalidReport(f"it reported process {pid} as a host that was there before")
        if any(other.pid == pid and not other.has_exited for other in self._processes.values()):
            raise InvalidReport(f"it reported process {pid} as two hosts")
        process.pid = pid
        try:
            self._examine(process)
        except ProcessMismatch as problem:
            # Of a forkserver that is dead the hosts are children of the node, which kills them.
            if not has_hung_up(self._control):
                raise InvalidReport(f"it reported process {pid} as a host: {problem}") from problem

    def _examine(self, process: _ReportedProcess) -> None:
        """Open a descriptor for a host that was forked, if it is what its forkserver said.

        Raises:
            NotThatProcess: it is not.
        """
        assert process.pid is not None
        # Without one its forkserver alone can kill it; if it has ended, its HostExited is on the
        # way.
        with suppress(OSError):
            process.pidfd = open_claimed(process.pid, parent=self._forkserver, user=self._user)

    def _pidfd_of(self, process: _ReportedProcess) -> int | None:
        if process.pidfd is None and process.pid is not None and not process.has_exited:
            with suppress(ProcessMismatch):  # it has ended, and another process has its number
                self._examine(process)
        return process.pidfd

    def _left_by(self, process: _ReportedProcess) -> int | None:
        """A process in the group or the session of a host that has ended, if any is left.

        What a host leaves becomes a child of its forkserver. One that left group and session is
        known by its mark, which only the forkserver looks for.
        """
        if process.pid is None:
            return None
        processes = {known.pid for known in self._processes.values() if not known.has_exited}
        for child in set(children_of(self._forkserver)) - processes:
            with suppress(ProcessLookupError):  # it has just ended
                if process.pid in {os.getpgid(child), os.getsid(child)}:
                    return child
        return None

    @staticmethod
    def _exited(process: _ReportedProcess, report: ProcessExited) -> None:
        if process.has_exited or report.pid != process.pid or not _is_an_end(report):
            raise InvalidReport(f"it reported {report}, which does not fit what it reported before")
        if process.pidfd is not None:
            if not is_readable(process.pidfd):
                raise InvalidReport(f"it reported {report}, and that process runs")
            os.close(process.pidfd)
            process.pidfd = None
        process.has_exited = True


def _is_an_end(report: ProcessExited) -> bool:
    """Whether a process can have ended like this, or was never there."""
    match report.pid, report.signal, report.exit_code:
        case None, None, None:
            return True
        case int(), int(number), None:
            return 0 < number <= _HIGHEST_SIGNAL
        case int(), None, int(code):
            return 0 <= code <= _HIGHEST_EXIT_CODE
        case _:
            return False


def close_all(descriptors: Iterable[int | None]) -> None:
    """Close those that are some."""
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)
