"""Checks a forkserver's reports against the node's commands and the kernel.

A forkserver preloads modules, which are user code and can write to its socket as well. So the node
trusts no report: it must be readable, refer to a trial process that the node asked for, and come in
order. The node asks the kernel whether a process is a child of the forkserver, and whether it
ended.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.system.claimed_process import ProcessMismatch, has_hung_up, open_claimed
from tunemq_shared.system.processes import children_of, is_readable
from tunemq_shared.system.stopped_process import StoppedProcessDetector
from tunemq_workers.processes import forkserver_messages as messages
from tunemq_workers.processes.killed_trees import kill_child

_HIGHEST_SIGNAL: Final = 64
_HIGHEST_EXIT_CODE: Final = 255
#: After this many looks a forkserver hides that it does not fork a trial process, or that one has
#: ended or does not end.
_SILENT_LOOKS: Final = 12


class InvalidReport(Exception):
    """A forkserver sent an impossible report; says which."""


class _ReportedProcess(msgspec.Struct):
    """A trial process, as far as reports and the kernel show: ``pid`` is None until it is forked.

    ``pidfd`` is None, too, if the process ended before it was examined, no descriptor was left for
    it, or /proc hid it: a trial process is as private as its forkserver until it has left it.
    """

    pid: int | None = None
    pidfd: int | None = None
    has_exited: bool = False
    is_killed: bool = False
    silent_looks: int = 0
    stops: StoppedProcessDetector = msgspec.field(default_factory=StoppedProcessDetector)


class ReportedProcesses:
    """The trial processes of one forkserver, according to its checked reports.

    Args:
        control: the node's socket to the forkserver.
        forkserver: its pid, a child of this process that was not waited for.
        user: the uid that its trial processes must have; None for any.
    """

    def __init__(self, control: socket.socket, forkserver: int, user: int | None) -> None:
        #: Whether it sent at least one valid report.
        self.has_reported = False
        self.is_ready = False
        #: The module that it is importing.
        self.preloading: str | None = None
        self._control, self._forkserver, self._user = control, forkserver, user
        self._processes: dict[str, _ReportedProcess] = {}

    def ask(self, process: str) -> None:
        """Expect a trial process of this name, which was not used before."""
        self._processes[process] = _ReportedProcess()

    def names(self) -> list[str]:
        """Return the trial processes that may have left processes."""
        return sorted(self._processes)

    def unended(self) -> list[str]:
        """Return the trial processes that have not ended, as far as is known."""
        return sorted(name for name, process in self._processes.items() if not process.has_exited)

    def process_of(self, process: str) -> tuple[int, int] | None:
        """Return the pidfd and pid of a running trial process; None if they are not proven."""
        known = self._processes.get(process)
        if known is None or known.pid is None or (pidfd := self._pidfd_of(known)) is None:
            return None
        return pidfd, known.pid

    def receive(self) -> messages.ForkserverReport | None:
        """Receive the next report; None at the end of the connection.

        Raises:
            BlockingIOError: there is none.
            ConnectionResetError: the forkserver ended with commands unread; earlier reports can
                still be received.
            InvalidReport: it is impossible or unreadable.
        """
        packet, _, flags, _ = self._control.recvmsg(messages.MAX_PACKET_BYTES)
        if not packet:
            return None
        if flags & socket.MSG_TRUNC:
            raise InvalidReport(f"it sent a packet of more than {messages.MAX_PACKET_BYTES} bytes")
        if flags & socket.MSG_CTRUNC:
            raise InvalidReport("it sent descriptors")
        try:
            report: messages.ForkserverReport = messages.decode_report(packet)
        except UNDECODABLE as error:
            raise InvalidReport(f"it sent a packet that is no report ({error})") from error
        self._note(report)
        self.has_reported = True
        return report

    def kill(self, process: str) -> None:
        """Kill a running trial process; the forkserver kills the processes that it started."""
        if (known := self._processes.get(process)) is not None:
            known.is_killed = True
            self._kill(known)

    def _kill(self, process: _ReportedProcess) -> None:
        if (pidfd := self._pidfd_of(process)) is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def continue_stopped(self) -> bool:
        """Send SIGCONT to trial processes that were stopped; return whether there were any.

        A trial can stop those of others that run as the same user. Call it every `POLL_INTERVAL_S`
        seconds.
        """
        has_continued = False
        for process in self._processes.values():
            pid = process.pid
            if pid is None or process.has_exited or not process.stops.look(pid):
                continue
            if (pidfd := self._pidfd_of(process)) is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                    has_continued = True
        return has_continued

    def hidden(self) -> str:
        """Return what the forkserver should have reported of a trial process; empty if nothing.

        A preloaded module can keep it from forking and reporting. Call it every `POLL_INTERVAL_S`
        seconds.
        """
        for name, process in self._processes.items():
            if process.has_exited:
                due = "all that it left has ended"
            elif process.pid is None and self.is_ready:
                due = "it was forked"
            elif process.pidfd is not None and is_readable(process.pidfd):
                due = "it has ended"
            elif process.pid is not None and process.is_killed:
                due = "it was killed and does not end"
            else:
                process.silent_looks = 0
                continue
            process.silent_looks += 1
            if process.silent_looks >= _SILENT_LOOKS:
                return f"of trial process {name} that {due}"
        return ""

    def kill_all(self, within_s: float) -> None:
        """Kill all trial processes, and wait up to ``within_s`` seconds for their end."""
        deadline = time.monotonic() + within_s
        for name in self._processes:
            self.kill(name)
        for process in self._processes.values():
            if process.pidfd is not None:
                is_readable(process.pidfd, deadline - time.monotonic())

    def forget(self) -> None:
        """Forget all trial processes and close their descriptors."""
        close_all(process.pidfd for process in self._processes.values())
        self._processes.clear()

    def _note(self, report: messages.ForkserverReport) -> None:
        match report:
            case messages.ProcessForked(name, pid):
                self._forked(self._known(name, report), pid)
            case messages.ProcessExited(name):
                self._exited(self._known(name, report), report)
            case messages.ProcessTreeGone(name):
                process = self._known(name, report)
                if not process.has_exited:
                    raise InvalidReport(f"it reported {report}, and that process has not ended")
                if (left := next(self._left_by(process), None)) is not None:
                    raise InvalidReport(
                        f"it reported {report}, and process {left} of that trial runs"
                    )
                del self._processes[name]
            case messages.ProcessTreeStuck(name):
                self._stuck(self._known(name, report), report)
                del self._processes[name]
            case messages.PreloadBegan() | messages.ForkserverReady() if self.is_ready:
                raise InvalidReport(f"it reported {report} after it was ready")
            case messages.PreloadBegan(module):
                self.preloading = module
            case messages.ForkserverReady():
                self.is_ready, self.preloading = True, None
            case messages.ForkserverWarned() | messages.ForkserverPong():
                pass

    def _known(self, name: str, report: messages.ForkserverReport) -> _ReportedProcess:
        if (process := self._processes.get(name)) is None:
            raise InvalidReport(f"it reported {report}, and there is no such trial process")
        return process

    def _forked(self, process: _ReportedProcess, pid: int) -> None:
        if process.pid is not None or process.has_exited:
            raise InvalidReport(f"it reported process {pid} as one that was there before")
        if any(other.pid == pid and not other.has_exited for other in self._processes.values()):
            raise InvalidReport(f"it reported process {pid} as two trial processes")
        process.pid, process.silent_looks = pid, 0
        try:
            self._examine(process)
        except ProcessMismatch as problem:
            # After a forkserver's death, its trial processes are children of the node, which kills
            # them.
            if not has_hung_up(self._control):
                raise InvalidReport(f"it reported process {pid} as a trial: {problem}") from problem

    def _examine(self, process: _ReportedProcess) -> None:
        """Open a descriptor for a forked trial process, if the kernel confirms what was reported.

        Raises:
            ProcessMismatch: it does not.
        """
        assert process.pid is not None
        # Without a descriptor only the forkserver can kill it; if it ended, its ProcessExited
        # follows.
        with suppress(OSError):
            process.pidfd = open_claimed(process.pid, parent=self._forkserver, user=self._user)

    def _pidfd_of(self, process: _ReportedProcess) -> int | None:
        if process.pidfd is None and process.pid is not None and not process.has_exited:
            with suppress(ProcessMismatch):  # it ended, and another process has its pid
                self._examine(process)
        return process.pidfd

    def _stuck(self, process: _ReportedProcess, report: messages.ProcessTreeStuck) -> None:
        """Kill what does not end, so that a false report does no harm."""
        if process.pid is None or process.has_exited != report.has_exited:
            raise InvalidReport(f"it reported {report}, which does not fit what it reported before")
        self._kill(process)
        for left in self._left_by(process):
            kill_child(left, self._forkserver)
        close_all([process.pidfd])

    def _left_by(self, process: _ReportedProcess) -> Iterator[int]:
        """Iterate over the processes in the group or session of an ended trial process.

        Such a process becomes a child of the forkserver. One that left both group and session is
        known only by its environment variable, which the forkserver looks for.
        """
        if process.pid is None:
            return
        processes = {known.pid for known in self._processes.values() if not known.has_exited}
        for child in set(children_of(self._forkserver)) - processes:
            with suppress(ProcessLookupError):  # it has just ended
                if process.pid in {os.getpgid(child), os.getsid(child)}:
                    yield child

    @staticmethod
    def _exited(process: _ReportedProcess, report: messages.ProcessExited) -> None:
        if process.has_exited or report.pid != process.pid or not _is_an_end(report):
            raise InvalidReport(f"it reported {report}, which does not fit what it reported before")
        if process.pidfd is not None:
            if not is_readable(process.pidfd):
                raise InvalidReport(f"it reported {report}, and that process runs")
            os.close(process.pidfd)
            process.pidfd = None
        process.has_exited, process.silent_looks = True, 0


def _is_an_end(report: messages.ProcessExited) -> bool:
    """Return whether a process can end like this, or was never forked."""
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
    """Close all descriptors that are not None."""
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)
