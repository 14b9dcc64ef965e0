"""`ForkserverProcess`: a process that forks experiments, as the supervisor sees it."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tunemq_scheduler.farm.common.scheduler_exit_codes import (
    EXIT_AGAIN,
    EXIT_OTHER_VERSION,
    EXIT_USE,
    how_it_ended,
)
from tunemq_scheduler.farm.ipc.fork_messages import START

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
                    [python, "-P", "-m", _MODULE, *line],
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
            code = EXIT_OTHER_VERSION if returncode == EXIT_OTHER_VERSION else EXIT_USE
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


def tail(descriptor: int, begin: int = 0) -> str:
    """Return the end of a file's text after ``begin``; after a crash, the crash location."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, _TOLD_BYTES, max(begin, size - _TOLD_BYTES))
    lines = data.decode(errors="replace").splitlines()
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASHED)]
    begins = crashes[-1] if crashes else max(0, len(lines) - _TOLD_LINES)
    lines = lines[begins : begins + _TOLD_LINES]
    return "\n".join(lines).strip()
