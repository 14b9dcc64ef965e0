"""Looks again and again at what families hold in memory, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tunemq_workers.family_memory import family_bytes

#: Between two looks at one family, in seconds: at least and at most.
_PERIODS_S: Final = (0.02, 0.5)
#: A family is looked at again before it could have taken what is left of its limit, at so many
#: bytes a second, a quick process's pace.
_BYTES_PER_S: Final = 2 * 2**30
#: Looking may take so much of a processor for each family.
_BUSY: Final = 0.02


@dataclass(slots=True)
class _Family:
    host: str
    pid: int
    limit: int
    due: float


class MemoryWatch:
    """Says which family holds more than its limit, once for each.

    The kernel may make who asks about a process wait for it; hence the thread.

    Args:
        post: has the node's loop call something.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        #: Takes the host's name and what its family holds, in bytes; called by the loop.
        self.on_exceeded: Callable[[str, int], object] = _nobody_is_told
        self._post = post
        self._families: dict[str, _Family] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, host: str, pid: int, limit: int) -> None:
        """Look at the family of the host ``pid`` from now on."""
        with self._changed:
            self._families[host] = _Family(host, pid, limit, time.monotonic() + _PERIODS_S[0])
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)
            self._thread.start()

    def leave(self, host: str) -> None:
        """Look no more; again, or without having been told to look, is allowed."""
        with self._changed:
            self._families.pop(host, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._families:
                    self._changed.wait()
                family = min(self._families.values(), key=_due)
                pause_s = family.due - time.monotonic()
                if pause_s > 0:
                    self._changed.wait(pause_s)
                    continue
            self._look(family)

    def _look(self, family: _Family) -> None:
        began = time.monotonic()
        used = family_bytes(family.pid, family.limit)
        now = time.monotonic()
        if used > family.limit:
            with self._changed:
                if self._families.get(family.host) is family:
                    del self._families[family.host]
                    self._post(partial(self._say, family.host, used))
            return
        shortest, longest = _PERIODS_S
        could_last_s = (family.limit - used) / _BYTES_PER_S
        pause_s = max(shortest, min(could_last_s, longest), (now - began) / _BUSY)
        family.due = now + pause_s

    def _say(self, host: str, used: int) -> None:
        self.on_exceeded(host, used)


def _due(family: _Family) -> float:
    return family.due


def _nobody_is_told(_host: str, _used: int) -> None:
    """Until somebody listens; who watches nothing need not."""
