"""Meters of cost: seconds for benchmarks, lines of Python for tests without a clock."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tests.support.waiting import without_collections


class Meter:
    """Add up differences of a clock, by name.

    Args:
        clock: any counter that only grows.

    Attributes:
        spent: total, in the clock's unit.
        times: number of measurements.
        worst: the largest measurement.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.spent: Counter[str] = Counter()
        self.times: Counter[str] = Counter()
        self.worst: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Attribute the cost of the block to this name."""
        begin = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - begin
            self.spent[name] += spent  # type: ignore[assignment]
            self.times[name] += 1
            self.worst[name] = max(self.worst.get(name, 0.0), spent)

    def start_anew(self) -> None:
        """Nothing was spent."""
        self.spent.clear()
        self.times.clear()
        self.worst.clear()


class Lines:
    """Counts lines of Python as they are executed: each round of a loop is one, at least."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        return self.count

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the function calls of this thread during the block."""

        def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
            self.count += event == "line"
            return trace

        before = sys.gettrace()
        with without_collections():
            sys.settrace(trace)
            try:
                yield
            finally:
                sys.settrace(before)
