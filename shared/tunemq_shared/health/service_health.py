"""`ServiceHealth`: what a service says of itself to whoever may have to start it anew.

Two ask: systemd, by its notify protocol (`tunemq_shared.health.systemd_notify`), and containers, by
a command that reads a file (``$TUNEMQ_HEALTH``, ``tunemq health``). Both are told by the loop that
does the work and by nothing else, so that one that hangs is found. They are told two things apart:
that the loop goes round, which mends itself by a start if it does not; and whether the service can
do its work now, for which others may be to blame. Nothing that is away (Redis, a store, the other
side) makes a service less alive: trials would be lost for it.

The file is one line, padded to a size that never changes and written in place: a full disk keeps
nobody from saying that he is alive. Times are those of the monotonic clock, which all processes of
a machine share and nobody sets; with them stands which start of the machine they are of.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.health import systemd_notify
from tunemq_shared.health.health_command import boot

#: Where the file is to be; nothing is written where it is not set.
VARIABLE: Final = "TUNEMQ_HEALTH"
#: How often a loop speaks, whatever else it does.
BEAT_S: Final = 1.0
#: How long the file is.
SIZE: Final = 200
#: So often within its time the watchdog is told.
_TOLD_WITHIN: Final = 4
_PRIVATE: Final = 0o600
_WRITING: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class ServiceHealth:
    """Speaks for one service, from the thread of its loop.

    Args:
        role: what the service is, a word.
        path: of the file; empty for none.
        notifier: of the service manager, if there is one.
        watchdog_s: within how many seconds that wants to hear of us, if it does.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(
        self,
        role: str,
        path: str = "",
        notifier: systemd_notify.SystemdNotifier | None = None,
        watchdog_s: float | None = None,
    ) -> None:
        #: What `of_environment` took away: whoever runs in this process's place may need it.
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
        """What the environment asks for; it is not handed on to children, who are not the service.

        Raises:
            ConfigError: the file cannot be made.
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
        """Whether anybody listens: where nobody does a loop need not go round for this."""
        return bool(self._path) or self._notifier is not None

    def beat(self, *, is_ready: bool, status: str) -> None:
        """The loop went round.

        Args:
            is_ready: whether the service can do its work now.
            status: how it is, in words for a person.
        """
        is_ready = is_ready and not self._is_stopping
        state = "stopping" if self._is_stopping else "ready" if is_ready else "waiting"
        if self._path:
            self._write(self._line(state, status))
        if self._notifier is not None:
            self._notify(self._notifier, is_ready=is_ready, status=status)

    def stopping(self) -> None:
        """It was told to end; for signal handlers, too."""
        if not self._is_stopping:
            self._is_stopping = True
            if self._path:
                self._write(self._line("stopping", ""))
            if self._notifier is not None:
                self._notifier.tell("STOPPING=1")

    def close(self) -> None:
        """It ends: nobody is to take the file for that of one that lives."""
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
        if self._watchdog_s is not None and now >= self._watchdog_due:
            lines.append("WATCHDOG=1")
        if lines and notifier.tell(*lines):
            self._told = status
            self._has_been_ready |= is_ready
            self._watchdog_due = now + (self._watchdog_s or 0.0) / _TOLD_WITHIN

    def _line(self, state: str, status: str) -> bytes:
        who, at = f"{self._role} {os.getpid()}", f"{time.monotonic():.3f} {self._boot}"
        text = f"{who} {at} {state} {_one_line(status)}"
        return text.encode("ascii", "replace")[: SIZE - 1].ljust(SIZE - 1) + b"\n"

    def _write(self, line: bytes) -> None:
        # Whoever keeps it from being written is seen by those who read it: here nobody can help.
        with suppress(OSError):
            if self._is_lost():
                self._make(line)
            else:
                os.pwrite(self._file, line, 0)

    def _is_lost(self) -> bool:
        """Whether somebody removed the file, or put another there."""
        try:
            ours, there = os.fstat(self._file), os.lstat(self._path)
        except OSError:
            return True
        return (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino)

    def _make(self, line: bytes) -> None:
        """Put a new file there; whatever had the name, a link of somebody's too, loses it."""
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
