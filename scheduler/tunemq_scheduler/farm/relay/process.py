"""Starting an experiment's process, and telling what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tunemq_shared.errors import ConfigError

#: Variables of the supervisor's environment that are the farm's own, and no experiment's.
FARM_KEYS: Final = ("TUNEMQ_REDIS",)
#: What an experiment prints, below the folder that is given.
OUTPUT, ERRORS = "experiment.out", "experiment.err"
#: So much of the end of what it wrote to stderr is told.
_TOLD_BYTES: Final = 4000
_TOLD_LINES: Final = 20
_MODULE: Final = "tunemq_scheduler.farm.experiment_process"


class ExperimentProcess:
    """A process that runs one experiment, in a session of its own.

    Must be started by a thread that lives as long as the supervisor does: the kernel kills it when
    that ends.

    Args:
        folder: for what it prints.
        sock: its end of the connection; closed here.
        python: the interpreter; empty for this one.
        variables: for its environment.
        cwd: where it begins.

    Raises:
        ConfigError: it cannot be started; says why.
    """

    def __init__(
        self,
        folder: Path,
        sock: socket.socket,
        *,
        python: str = "",
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        self._errors = folder / ERRORS
        inherited = {name: text for name, text in os.environ.items() if name not in FARM_KEYS}
        program = python or sys.executable
        line = ["--fd", str(sock.fileno()), "--supervisor", str(os.getpid())]
        try:
            with sock, contextlib.ExitStack() as files:
                folder.mkdir(parents=True, exist_ok=True)
                output = files.enter_context(open(folder / OUTPUT, "ab"))
                errors = files.enter_context(open(self._errors, "ab"))
                self._errors_begin = errors.tell()
                self._process = subprocess.Popen(
                    [program, "-P", "-m", _MODULE, *line],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env={**inherited, **(variables or {})},
                    cwd=cwd,
                    start_new_session=True,
                    pass_fds=[sock.fileno()],
                )
            #: Readable once it has ended.
            self.pidfd = self._watched(self._process)
        except (OSError, ValueError) as error:  # a variable with "=" in its name, a NUL
            raise ConfigError(
                f"the experiment's process cannot be started with {program}: {error}."
            ) from error
        self.pid = self._process.pid

    @staticmethod
    def _watched(process: subprocess.Popen[bytes]) -> int:
        try:
            return os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise

    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. Never waits.

        With it ends all of its session: nothing of an experiment outlives its process.
        """
        if self._process.returncode is None:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PIDFD, self.pidfd, how) is None:
                return None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # before it is reaped: the number is its own
        return self._process.poll()

    def kill(self) -> None:
        """Kill it, with all of its session."""
        if self.returncode() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it; it has ended."""
        os.close(self.pidfd)

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        try:
            with open(self._errors, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._errors_begin, size - _TOLD_BYTES))
                data = file.read(_TOLD_BYTES)
        except OSError:
            return ""
        lines = data.decode(errors="replace").splitlines()[-_TOLD_LINES:]
        return "\n".join(lines).strip()


def named_signal(number: int) -> str:
    """A signal as people know it: ``SIGSEGV (Segmentation fault)``."""
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return f"signal {number}"
