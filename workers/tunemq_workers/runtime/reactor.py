"""The node's selector loop: sockets, timers, and calls from other threads and signal handlers."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

#: Seconds of one round after which due and posted calls do not wait for its end: trials decide how
#: long their messages take.
_LONG_ROUND_S: Final = 0.5
#: The longest wait for a timer in seconds: the kernel takes no more than 24 days.
_LONGEST_WAIT_S: Final = 1e6

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE


class HasFileno(Protocol):
    """A socket or file."""

    def fileno(self) -> int:
        """Return its descriptor."""


@dataclass(slots=True, order=True)
class Timer:
    """A scheduled call, which `cancel` prevents."""

    at: float
    order: int
    call: Callable[[], object] | None = field(compare=False)

    def cancel(self) -> None:
        """Prevent the call; no effect if it happened already."""
        self.call = None


class Reactor:
    """Run callbacks, in one thread, for ready descriptors, due timers and posted calls."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._orders = itertools.count()
        self._posted: deque[Callable[[], object]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, READ, self._woken)
        self._is_running = False

    def watch(
        self, source: int | HasFileno, call: Callable[[int], None], events: int = READ
    ) -> None:
        """Call ``call(ready events)`` whenever ``source`` is ready; replaces an earlier call."""
        try:
            self._selector.modify(source, events, call)
        except KeyError:
            self._selector.register(source, events, call)

    def unwatch(self, source: int | HasFileno) -> None:
        """Stop watching ``source``, before closing it; ignored if it is not watched."""
        try:
            self._selector.unregister(source)
        except KeyError:
            return

    def after(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Call once, ``delay_s`` seconds from now; at once if it is NaN, which has no order."""
        delay_s = 0.0 if math.isnan(delay_s) else delay_s
        timer = Timer(time.monotonic() + delay_s, next(self._orders), call)
        heapq.heappush(self._timers, timer)
        return timer

    def post(self, call: Callable[[], object]) -> None:
        """Make the loop call a function; safe in any thread and in signal handlers."""
        self._posted.append(call)
        os.eventfd_write(self._wake, 1)

    def run(self, after_round: Callable[[], None]) -> None:
        """Run callbacks until `stop`; call ``after_round`` after each round of them."""
        self._is_running = True
        while self._is_running:
            ready = self._selector.select(self._until_due())
            is_long_at = time.monotonic() + _LONG_ROUND_S
            for key, events in ready:
                # An earlier callback may have stopped watching it.
                if self._selector.get_map().get(key.fd) is key:
                    key.data(events)
                if time.monotonic() > is_long_at:
                    self._end_round(after_round)
                    is_long_at = time.monotonic() + _LONG_ROUND_S
            self._end_round(after_round)

    def stop(self) -> None:
        """End `run` after this round."""
        self._is_running = False

    def _end_round(self, after_round: Callable[[], None]) -> None:
        self._call_posted()
        self._call_due()
        after_round()

    def _woken(self, _events: int) -> None:
        os.eventfd_read(self._wake)
        self._call_posted()

    def _call_posted(self) -> None:
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def _until_due(self) -> float | None:
        while self._timers and self._timers[0].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0].at - time.monotonic()), _LONGEST_WAIT_S)

    def _call_due(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].at <= now:
            call = heapq.heappop(self._timers).call
            if call is not None:
                call()


def cancel(timer: Timer | None) -> None:
    """Prevent the call of a timer, if there is one."""
    if timer is not None:
        timer.cancel()


def do_nothing(*_: object) -> None:
    """Stand in for a callback that is not set, or whose result is not needed."""
