"""`ExperimentProcess`: an experiment's process, as its supervisor sees it.

Nothing here waits. A forkserver that does not answer for long is killed, and so are all its
experiments: they count as ended and restart from another forkserver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Final

from tunemq_scheduler.farm.common.scheduler_exit_codes import EXIT_AGAIN, EXIT_USE
from tunemq_scheduler.farm.ipc.fork_messages import (
    MAX_PACKET_BYTES,
    REAP,
    ExperimentExited,
    ExperimentForked,
    ExperimentForkFailed,
    ForkAnswer,
    decode,
)
from tunemq_scheduler.farm.ipc.forkserver_process import ForkserverProcess, tail
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.system.claimed_process import (
    MAX_PID,
    ProcessMismatch,
    has_hung_up,
    open_claimed,
)
from tunemq_shared.system.processes import is_readable, signal_group

#: The files for an experiment's output, in the given folder.
OUTPUT, ERRORS = "experiment.out", "experiment.err"
#: A forkserver that does not answer within this time is killed. A new one first imports, maybe from
#: a network disk.
_ANSWER_S: Final = 60.0


class ExperimentProcess:
    """A process that runs one experiment, in its own session.

    Args:
        server: its forkserver.
        folder: for its output.
        sock: its end of the connection; closed here.

    Raises:
        OSError: a folder, file or descriptor cannot be created.
    """

    def __init__(self, server: ForkserverProcess, folder: Path, sock: socket.socket) -> None:
        #: None until it is forked.
        self.pid: int | None = None
        self._pidfd: int | None = None
        self._server, self._errors = server, folder / ERRORS
        self._returncode: int | None = None
        self._is_over, self._why = False, ""
        self._answer_by = time.monotonic() + _ANSWER_S
        with sock, contextlib.ExitStack() as ends:
            folder.mkdir(parents=True, exist_ok=True)
            output = ends.enter_context(open(folder / OUTPUT, "ab"))
            errors = ends.enter_context(open(self._errors, "ab"))
            self._errors_begin = errors.tell()
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends.enter_context(theirs)
            self._channel.setblocking(False)
            try:
                server.start([end.fileno() for end in (theirs, sock, output, errors)])
            except (BrokenPipeError, ConnectionResetError):
                pass  # the server has just ended, and so has the channel
            except OSError as error:  # the socket's queue is full
                self._give_up(EXIT_AGAIN, f"its process cannot be started: {error.strerror}")
        server.uses += 1

    @property
    def watched(self) -> int:
        """A descriptor that is readable when `returncode` may have changed."""
        if self._pidfd is None or self._is_over:
            return self._channel.fileno()
        return self._pidfd

    def returncode(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs. Never waits.

        All processes of its session end with it, so nothing of an experiment outlives it.
        """
        if self._returncode is None and self._pidfd is None:
            self._listen()
        if self._returncode is None and self._pidfd is not None and self._has_ended(self._pidfd):
            self._listen()
        return self._returncode

    def kill(self) -> None:
        """Kill it, with its whole session."""
        if self._returncode is not None:
            return
        if self.pid is None or self._pidfd is None:
            self._give_up(-signal.SIGKILL, "")
        elif not self._is_over:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            signal_group(self.pid, signal.SIGKILL)

    def abort(self) -> None:
        """Make it print its threads' stacks and end, if its code allows that."""
        if self._pidfd is not None and not self._is_over:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGABRT)

    def close(self) -> None:
        """Release the resources of an ended process."""
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._server.release()

    def last_output(self) -> str:
        """Return why it was lost, or the end of its output on stderr."""
        if self._why:
            return self._why
        try:
            with open(self._errors, "rb") as file:
                return tail(file.fileno(), self._errors_begin)
        except OSError:
            return ""

    def _has_ended(self, pidfd: int) -> bool:
        if not self._is_over and is_readable(pidfd):
            self._is_over, self._answer_by = True, time.monotonic() + _ANSWER_S
            # Before it is reaped, its pid is unique. If the forkserver has died and another process
            # has reaped it, its session keeps the pid as long as any of its processes exists.
            if self.pid is not None:
                signal_group(self.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # it is gone, which `_listen` finds out
                self._channel.send(REAP)
        return self._is_over

    def _listen(self) -> None:
        try:
            packet = self._channel.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            if time.monotonic() > self._answer_by:
                self._server.kill(f"did not answer for {_ANSWER_S:g} s")
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            if (lost := self._server.why_lost()) is not None:
                self._returncode, self._why = lost
            return
        try:
            self._take(decode(packet))
        except (*UNDECODABLE, ProcessMismatch) as error:  # the interpreter may run other code
            self._server.kill(f"said what cannot be read or is not true ({error})")
            self._give_up(EXIT_USE, f"{self._server.python} is no interpreter with TuneMQ: {error}")

    def _take(self, answer: ForkAnswer) -> None:
        match answer:
            case ExperimentForked(pid) if self._pidfd is None:
                self._forked(pid)
            case ExperimentForkFailed(text) if self._pidfd is None:
                self._give_up(EXIT_AGAIN, f"its process cannot be started: {text}")
            case ExperimentExited(returncode) if self._is_over:
                self._returncode = returncode
            case _:
                raise ProcessMismatch(f"it said {answer}, which does not fit what it said before")

    def _forked(self, pid: int) -> None:
        """Watch this process if it is the forkserver's child; any other might be signalled."""
        try:
            self._pidfd = open_claimed(pid, parent=self._server.pid)
        except ProcessMismatch as problem:
            # The child of a dead forkserver has another parent, and ends.
            if not (0 < pid <= MAX_PID and has_hung_up(self._channel)):
                raise
            self._give_up(EXIT_AGAIN, f"its process cannot be watched: {problem}")
        except OSError as error:  # no descriptor is left, or it died with its forkserver
            self._give_up(EXIT_AGAIN, f"its process cannot be watched: {error.strerror}")
        else:
            self._server.has_forked, self.pid = True, pid

    def _give_up(self, returncode: int, why: str) -> None:
        """Count it as ended; the forkserver kills a process whose channel is closed."""
        self._channel.shutdown(socket.SHUT_RDWR)
        self._returncode, self._why = returncode, why
