"""`ServiceHealth`: reports a service's health to whatever may have to restart it.

Two readers exist: systemd, by its notify protocol (`tunemq_shared.health.systemd_notify`), and
containers, by a command that reads a file (``$TUNEMQ_HEALTH``, ``tunemq health``). Only the loop
that does the work reports, so that a hanging loop is detected. It reports two things separately:
that the loop runs, for which a restart is the remedy if it does not; and whether the service can do
its work now, which may depend on others. An outage of Redis, of a store or of the other side does
not make a service less alive: a restart would lose trials.

The file is one line, padded to a constant size and written in place, so that a full disk does not
prevent the report. Times are from the monotonic clock, which all processes of a machine share and
which is never set; the file also identifies the boot to which they belong.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.health import systemd_notify
from tunemq_shared.health.health_command import boot

#: The variable with the path of the file; unset for none.
VARIABLE: Final = "TUNEMQ_HEALTH"
#: Seconds between two reports of a loop, whatever else it does.
BEAT_S: Final = 1.0
#: Size of the file, in bytes.
SIZE: Final = 200
#: A service that is not ready yet, because it waits for others, asks the service manager again and
#: again for this much more time.
_EXTENSION: Final = f"EXTEND_TIMEOUT_USEC={60_000_000}"
#: How many reports to the watchdog fit into its timeout.
_TOLD_WITHIN: Final = 4
_PRIVATE: Final = 0o600
_WRITING: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class ServiceHealth:
    """Reports for one service, from the thread of its loop.

    Args:
        role: The service, in one word.
        path: Of the file; empty for none.
        notifier: Of the service manager, if there is one.
        watchdog_s: The service manager's watchdog timeout in seconds, if it has one.

    Raises:
        ConfigError: The file cannot be made.
    """

    def __init__(
        self,
        role: str,
        path: str = "",
        notifier: systemd_notify.SystemdNotifier | None = None,
        watchdog_s: float | None = None,
    ) -> None:
        #: The variables that `of_environment` removed: a process that this one execs may need them.
        self.variables: dict[str, str] = {}
        self._role, self._path = role, os.path.abspath(path) if path else ""
        self._notifier = notifier
        self._watchdog_s = watchdog_s
        self._watchdog_due = 0.0
        self._has_been_ready = self._is_stopping = False
        self._told = ""
        self._file = -1
        if self._path:
            self._boot = boot()
            try:
                self._make(self._line("starting", ""))
            except (OSError, ValueError) as problem:
                why = problem.strerror if isinstance(problem, OSError) else str(problem)
                raise ConfigError(
                    f"${VARIABLE} is {path}, which cannot be written: {why}. Name a file in a"
                    " folder that this user may write to."
                ) from problem

    @classmethod
    def of_environment(cls, role: str) -> ServiceHealth:
        """Make the reporter of the environment; removes its variables, so that children lack them.

        Raises:
            ConfigError: The file cannot be made.
        """
        taken = {
            name: os.environ.pop(name)
            for name in (VARIABLE, *systemd_notify.VARIABLES)
            if name in os.environ
        }
        address = taken.get(systemd_notify.SOCKET_VARIABLE, "")
        notifier = systemd_notify.SystemdNotifier(address) if address else None
        health = cls(role, taken.get(VARIABLE, ""), notifier, systemd_notify.watchdog_s(taken))
        health.variables = taken
        return health

    @property
    def is_wanted(self) -> bool:
        """Whether there is a file or a service manager that the loop must report to."""
        return bool(self._path) or self._notifier is not None

    def beat(self, *, is_ready: bool, status: str) -> None:
        """Report that the loop ran.

        Args:
            is_ready: Whether the service can do its work now.
            status: Its state, in words for a person.
        """
        is_ready = is_ready and not self._is_stopping
        state = "stopping" if self._is_stopping else "ready" if is_ready else "waiting"
        if self._path:
            self._write(self._line(state, status))
        if self._notifier is not None:
            self._notify(self._notifier, is_ready=is_ready, status=status)

    def stopping(self) -> None:
        """Report that the service was asked to end; safe in signal handlers."""
        if not self._is_stopping:
            self._is_stopping = True
            if self._path:
                self._write(self._line("stopping", ""))
            if self._notifier is not None:
                self._notifier.tell("STOPPING=1")

    def close(self) -> None:
        """Remove the file at the service's end, so that it cannot be mistaken for a live one."""
        if self._notifier is not None:
            self._notifier.close()
        if self._file >= 0:
            if not self._is_lost():
                with suppress(OSError):
                    os.unlink(self._path)
            os.close(self._file)
            self._file = -1
        self._path = ""

    def _notify(
        self, notifier: systemd_notify.SystemdNotifier, *, is_ready: bool, status: str
    ) -> None:
        lines = []
        if is_ready and not self._has_been_ready:
            lines.append("READY=1")
        if status != self._told:
            lines.append(f"STATUS={_one_line(status)}")
        now = time.monotonic()
        if lines or now >= self._watchdog_due:
            if self._watchdog_s is not None:
                lines.append("WATCHDOG=1")
            if not (is_ready or self._has_been_ready or self._is_stopping):
                lines.append(_EXTENSION)
        if lines and notifier.tell(*lines):
            self._told = status
            self._has_been_ready |= is_ready
            self._watchdog_due = now + (self._watchdog_s or 0.0) / _TOLD_WITHIN

    def _line(self, state: str, status: str) -> bytes:
        who, at = f"{self._role} {os.getpid()}", f"{time.monotonic():.3f} {self._boot}"
        text = f"{who} {at} {state} {_one_line(status)}"
        return text.encode("ascii", "replace")[: SIZE - 1].ljust(SIZE - 1) + b"\n"

    def _write(self, line: bytes) -> None:
        # A file that cannot be written becomes too old, which its readers notice.
        with suppress(OSError):
            if self._is_lost():
                self._make(line)
            else:
                os.pwrite(self._file, line, 0)

    def _is_lost(self) -> bool:
        """Whether another process removed or replaced the file."""
        try:
            ours, there = os.fstat(self._file), os.lstat(self._path)
        except OSError:
            return True
        return (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino)

    def _make(self, line: bytes) -> None:
        """Put a new file there, replacing a file or link of that name."""
        new = f"{self._path}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(new)
        file = os.open(new, _WRITING | os.O_CREAT | os.O_EXCL, _PRIVATE)
        try:
            os.write(file, line)
            os.rename(new, self._path)
        except OSError:
            os.close(file)
            with suppress(OSError):
                os.unlink(new)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file = file


def _one_line(text: str) -> str:
    return " ".join(text.split())
