"""`LeaseHolder`: identifies the scheduler process of a farm or an experiment."""

from __future__ import annotations

import datetime as dt
import os
import signal
import socket
import time
from typing import Annotated, Final, Self

import msgspec

from tunemq_shared.system.claimed_process import is_hidden
from tunemq_shared.system.processes import is_readable, stat_of

#: A killed process ends within milliseconds, unless the disk delays it.
_GONE_WITHIN_S: Final = 5.0


class LeaseHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A unique name of a scheduler process.

    Attributes:
        token: random, one for each process.
        host: the machine's name, for messages.
        place: the kernel's boot and the pid namespace in which the pid is valid.
        pid, born: the process and its start in the kernel's ticks, because pids are reused.
        since: the Unix time at which it became the holder, for messages.
    """

    token: str
    host: str
    place: str
    pid: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    born: int
    since: Annotated[float, msgspec.Meta(ge=0, le=2**37)]

    @classmethod
    def this_process(cls) -> Self:
        """Describe this process."""
        pid = os.getpid()
        return cls(
            token=os.urandom(8).hex(),
            host=socket.gethostname(),
            place=_place(),
            pid=pid,
            born=_born(pid) or 0,
            since=time.time(),
        )

    @property
    def is_here(self) -> bool:
        """Whether its pid is valid here: it runs, or ran, on this machine."""
        return bool(self.place) and self.place == _place()

    @property
    def is_gone(self) -> bool:
        """Whether it has certainly ended; False if this machine cannot know."""
        return self.is_here and _born(self.pid) != self.born and not self.is_hidden

    @property
    def is_hidden(self) -> bool:
        """Whether /proc hides the process with its pid, which may be another one by now."""
        return self.is_here and is_hidden(self.pid)

    def kill(self) -> bool:
        """Kill it if it runs on this machine; return whether it is gone then."""
        if not self.is_here:
            return False
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if _born(self.pid) == self.born:  # otherwise the pid belongs to another process
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return is_readable(process, _GONE_WITHIN_S)
        except ProcessLookupError:
            return True
        finally:
            os.close(process)
        return True

    def __str__(self) -> str:
        since = dt.datetime.fromtimestamp(self.since).astimezone()
        return f"process {self.pid} on {self.host}, since {since.isoformat(' ', 'seconds')}"


def _place() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> int | None:
    """Return when a process began; None if there is none, or only a zombie."""
    stat = stat_of(pid)
    return None if not stat or stat[0] in {b"Z", b"X"} else int(stat[19])
