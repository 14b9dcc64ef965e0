"""Helpers for tests of transfers: a waiter, and a reactor that runs until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tunemq_workers.runtime.reactor import Reactor


class Waiting:
    """A waiter for a transfer, which records its callbacks."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.failed: list[tuple[str, bool]] = []
        self.troubles: list[str] = []

    def on_done(self, uploaded: object) -> None:
        """Record the upload; None for a download."""
        self.done.append(uploaded)

    def on_failed(self, reason: str, is_corrupt: bool) -> None:
        """Note why it failed."""
        self.failed.append((reason, is_corrupt))

    def on_trouble(self, reason: str) -> None:
        """Note why the transfer is stuck."""
        self.troubles.append(reason)

    @property
    def callbacks(self) -> tuple[Callable[..., None], ...]:
        """The callbacks for `Transfers.start`."""
        return self.on_done, self.on_failed, self.on_trouble

    @property
    def is_over(self) -> bool:
        """Whether the transfer has ended; fails if it ended twice."""
        assert len(self.done) + len(self.failed) <= 1
        return bool(self.done or self.failed)


def run_until(reactor: Reactor, condition: Callable[[], object], *, within: float = 60.0) -> None:
    """Run the reactor until ``condition()`` is true; fail the test after ``within`` seconds."""
    deadline = time.monotonic() + within

    def look() -> None:
        if condition():
            reactor.stop()
        elif time.monotonic() > deadline:
            reactor.stop()
            pytest.fail(f"it did not come true within {within:g} s")

    def tick() -> None:
        nonlocal timer
        timer = reactor.after(0.01, tick)

    timer = reactor.after(0.0, tick)
    reactor.run(look)
    timer.cancel()
