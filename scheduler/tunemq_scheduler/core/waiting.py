"""`WaitingTrials`: those that wait for a slot, and those that wait until somebody resumes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tunemq_scheduler.core.trial import PAUSED, PENDING, Trial


class WaitingTrials:
    """PENDING and PAUSED trials; each kind in the order in which they began to wait."""

    def __init__(self) -> None:
        self._pending: dict[str, Trial] = {}
        self._paused: dict[str, Trial] = {}

    def __iter__(self) -> Iterator[Trial]:
        """All: the PENDING, then the PAUSED."""
        yield from self._pending.values()
        yield from self._paused.values()

    def follow(self, trial: Trial) -> None:
        """A trial's status changed."""
        self._pending.pop(trial.trial_id, None)
        self._paused.pop(trial.trial_id, None)
        if trial.status == PENDING:
            self._pending[trial.trial_id] = trial
        elif trial.status == PAUSED:
            self._paused[trial.trial_id] = trial

    def dumped(self) -> tuple[list[str], list[str]]:
        """The ids of the PENDING and of the PAUSED, each in their order."""
        return list(self._pending), list(self._paused)

    def take_back(self, pending: list[Trial], paused: list[Trial]) -> None:
        """Be as it was when it was `dumped`."""
        self._pending = {trial.trial_id: trial for trial in pending}
        self._paused = {trial.trial_id: trial for trial in paused}

    def has_pending(self, elapsed: float) -> bool:
        """Whether one waits for nothing but a slot."""
        return any(trial.not_before <= elapsed for trial in self._pending.values())

    def placeable(self, elapsed: float, has_place: Callable[[Trial], bool]) -> Iterator[Trial]:
        """Those that could be placed now."""
        return (trial for trial in self if trial.not_before <= elapsed and has_place(trial))

    def next_try(self, elapsed: float) -> float | None:
        """When the next that waits to be tried again may go on, in elapsed seconds."""
        due = [trial.not_before for trial in self if trial.not_before > elapsed]
        return min(due, default=None)
