"""`ExperimentForkservers`: starts and watches the processes of experiments.

There is one forkserver for each interpreter and environment. A program gets its environment when it
starts: setting a variable later does not change its meaning for the interpreter, the dynamic loader
or a library that is already loaded.

Nothing here waits. A forkserver that does not answer for long is killed, and so are all its
experiments: they count as ended and restart from another forkserver.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tunemq_scheduler.farm.common.scheduler_exit_codes import (
    EXIT_AGAIN,
    EXIT_MUST_WAIT,
    EXIT_USE,
    how_it_ended,
)
from tunemq_scheduler.farm.ipc.fork_messages import (
    MAX_PACKET_BYTES,
    REAP,
    START,
    ExperimentExited,
    ExperimentForked,
    ExperimentForkFailed,
    ForkAnswer,
    decode,
)
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.system.claimed_process import (
    MAX_PID,
    ProcessMismatch,
    has_hung_up,
    open_claimed,
)
from tunemq_shared.system.nonblocking_exec import executed_in_child
from tunemq_shared.system.plain_files import open_to_read, open_to_write
from tunemq_shared.system.processes import is_readable, signal_group

#: For files in a search's folder, where its code may have put something else, such as a FIFO.
_APPENDS: Final = os.O_WRONLY | os.O_APPEND
#: How long an unused forkserver is kept; an experiment whose process died returns sooner.
_UNUSED_S: Final = 60.0

#: Environment variables of the supervisor that experiments must not get.
FARM_KEYS: Final = ("TUNEMQ_REDIS",)
#: The most bytes to report of the end of a process's stderr.
_TOLD_BYTES: Final = 4000
#: faulthandler prints the crash location after this text, the innermost call first.
_CRASHED: Final = "Current thread"
_TOLD_LINES: Final = 20
_MODULE: Final = "tunemq_scheduler.farm.process.experiment_forkserver"
#: A process whose socket is closed, or that is killed, ends within milliseconds.
_GONE_WITHIN_S: Final = 1.0

#: The files for an experiment's output, in the given folder.
OUTPUT, ERRORS = "experiment.out", "experiment.err"
#: A forkserver that does not answer within this time is killed. A new one first imports, maybe from
#: a network disk.
_ANSWER_S: Final = 60.0


class ExperimentForkservers:
    """Starts experiments' processes.

    A thread that lives as long as the supervisor must use it; see `ForkserverProcess`.

    Args:
        store: the farm's store, whose client the forkservers load.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._servers: list[ForkserverProcess] = []

    def prepare(self) -> None:
        """Start the usual forkserver, so that the first experiment does not wait for it.

        Raises:
            ConfigError: it cannot be started; says why.
        """
        self._server(sys.executable, {})

    def start(
        self,
        folder: Path,
        sock: socket.socket,
        *,
        python: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> ExperimentProcess:
        """Start an experiment's process.

        Args:
            folder: for its output.
            sock: its end of the connection; closed here.
            python: the interpreter; empty for this one.
            variables: for its environment.

        Raises:
            ConfigError: it cannot be started; says why.
        """
        with sock:
            server = self._server(python or sys.executable, variables)
            try:
                return ExperimentProcess(server, folder, sock)
            except OSError as error:
                raise ConfigError(
                    f"the experiment's process cannot be started: {error}."
                ) from error

    def close_unused(self) -> None:
        """End forkservers that are not needed, and forget ended ones; called once a second."""
        now = time.monotonic()
        for server in [one for one in self._servers if not one.uses]:
            is_usual = server.python == sys.executable and not server.variables
            if server.has_ended:
                self._servers.remove(server)
                server.close()
            elif not is_usual and now >= server.unused_since + _UNUSED_S:
                server.kill("is not needed")

    def close(self) -> None:
        """End all forkservers, and with them their experiments."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _server(self, python: str, variables: Mapping[str, str]) -> ForkserverProcess:
        for server in self._servers:
            if server.python == python and server.variables == variables and server.is_alive:
                return server
        try:
            server = ForkserverProcess(python, variables, self._store)
        except (OSError, ValueError) as error:  # a variable with "=" in its name, or a NUL
            raise ConfigError(
                f"the experiment's process cannot be started with {python}: {error}."
            ) from error
        self._servers.append(server)
        return server


class ForkserverProcess:
    """One forkserver; it accepts requests at once but completes its imports first.

    A thread that lives as long as the supervisor must create it: the kernel kills it when that
    thread ends, and its experiments with it.

    Args:
        python: its interpreter.
        variables: for its environment.
        store: the farm's store.

    Raises:
        OSError, ValueError: it cannot be started.
    """

    def __init__(self, python: str, variables: Mapping[str, str], store: str) -> None:
        self.python, self.variables = python, dict(variables)
        #: How many experiments it has, and since when it has had none.
        self.uses, self.unused_since = 0, time.monotonic()
        self.has_forked = False
        self._why = ""
        self._gone_by: float | None = None
        inherited = {name: text for name, text in os.environ.items() if name not in FARM_KEYS}
        # By name, because no internal module may depend on the public names.
        version = importlib.import_module("tunemq").__version__
        with contextlib.ExitStack() as unless_started:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            unless_started.callback(self._control.close)
            self._said = os.memfd_create("tunemq-forkserver")
            unless_started.callback(os.close, self._said)
            with theirs:
                line = [str(theirs.fileno()), str(os.getpid()), version, store]
                self._process = subprocess.Popen(
                    executed_in_child(python, "-P", "-m", _MODULE, *line),
                    stdin=subprocess.DEVNULL,
                    stdout=self._said,
                    stderr=self._said,
                    env={**inherited, **variables},
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
            unless_started.pop_all()
        self._control.setblocking(False)

    @property
    def pid(self) -> int:
        """The pid of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can fork experiments."""
        return not self._why and self._process.poll() is None

    def start(self, descriptors: Sequence[int]) -> None:
        """Fork an experiment; see `tunemq_scheduler.farm.ipc.fork_messages`.

        Raises:
            OSError: it is gone, or its socket's queue is full.
        """
        socket.send_fds(self._control, [START], descriptors)

    def release(self) -> None:
        """Record that one of its experiments has ended."""
        self.uses, self.unused_since = self.uses - 1, time.monotonic()

    def kill(self, why: str) -> None:
        """Kill it, and so all its experiments."""
        self._why = self._why or why
        self._process.kill()

    def why_lost(self) -> tuple[int, str] | None:
        """Return the exit code and the reason for an experiment that gets no more answers.

        None while the process is not gone, which takes a moment.
        """
        returncode = self._process.poll()
        if returncode is None:
            now = time.monotonic()
            self._gone_by = self._gone_by or now + _GONE_WITHIN_S
            if now > self._gone_by:
                self.kill("closed its sockets")
            return None
        how = self._why or how_it_ended(returncode)
        if self.has_forked:
            return EXIT_AGAIN, f"the process that it was forked from {how}"
        said = tail(self._said) or "it said nothing"
        if returncode >= 0:
            code = EXIT_MUST_WAIT if returncode == EXIT_MUST_WAIT else EXIT_USE
            return code, (
                f"the interpreter {self.python} cannot run experiments: {said}\nInstall the"
                " scheduler's TuneMQ in it, or name another one."
            )
        return returncode, f"the interpreter {self.python} {how} before it ran anything: {said}"

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Kill it, and release its resources."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_WITHIN_S)
        self._control.close()
        os.close(self._said)


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
            output, errors = (
                ends.enter_context(open(open_to_write(str(path), _APPENDS), "ab"))
                for path in (folder / OUTPUT, self._errors)
            )
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
            with open_to_read(self._errors) as file:
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


def tail(descriptor: int, begin: int = 0) -> str:
    """Return the end of a file's text after ``begin``; after a crash, the crash location."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, _TOLD_BYTES, max(begin, size - _TOLD_BYTES))
    lines = data.decode(errors="replace").splitlines()
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASHED)]
    begins = crashes[-1] if crashes else max(0, len(lines) - _TOLD_LINES)
    lines = lines[begins : begins + _TOLD_LINES]
    return "\n".join(lines).strip()
