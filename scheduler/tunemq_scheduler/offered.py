"""`Offered`: the trials that could be placed now, looked up no further than somebody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

from tunemq_scheduler.trial_view import TrialView


class Offered(Sequence[TrialView]):
    """A sequence of which most people want the first; to be looked at before anything changes.

    Args:
        trials: gives them in their order.
    """

    def __init__(self, trials: Iterator[TrialView]) -> None:
        self._trials = trials
        self._seen: list[TrialView] = []

    def __bool__(self) -> bool:
        return self._look(1) > 0

    def __len__(self) -> int:
        return self._look(None)

    @overload
    def __getitem__(self, index: int) -> TrialView: ...

    @overload
    def __getitem__(self, index: slice) -> list[TrialView]: ...

    def __getitem__(self, index: int | slice) -> TrialView | list[TrialView]:
        self._look(index + 1 if isinstance(index, int) and index >= 0 else None)
        return self._seen[index]

    def __repr__(self) -> str:
        return repr(self[:])

    def _look(self, wanted: int | None) -> int:
        """Look up so many, or all; returns how many there are, as far as is known."""
        missing = None if wanted is None else max(0, wanted - len(self._seen))
        self._seen += islice(self._trials, missing)
        return len(self._seen)
