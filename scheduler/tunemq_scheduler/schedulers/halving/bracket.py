"""`Bracket`: trials that HyperBand compares at one milestone after the other."""

from __future__ import annotations

import math
from typing import Any

#: A trial and the value by which it is compared; larger is better.
RankedTrial = tuple[str, float]


class Bracket:
    """The live trials of a bracket, and how far each has got.

    Args:
        halvings: how often the bracket will be halved; with none left its milestone is the last.
        size: the most trials, before the first halving.
        milestone: the progress at which all trials are compared next, in units of ``time_attr``.
        max_t: the greatest milestone.
        factor: one trial of this many continues.
    """

    __slots__ = (
        *("_added", "_trials", "behind", "factor", "halvings", "is_full", "max_t", "milestone"),
        "size",
    )

    def __init__(
        self, halvings: int, size: int, milestone: int, max_t: float, factor: float
    ) -> None:
        self.halvings, self.size, self.milestone = halvings, size, milestone
        self.max_t, self.factor = max_t, factor
        #: Whether it takes no further trials.
        self.is_full = False
        self._added = 0
        #: The number of trials that have not reached the milestone.
        self.behind = 0
        #: Progress and value of each trial, in the order in which they were added.
        self._trials: dict[str, tuple[float, float]] = {}

    @property
    def count(self) -> int:
        """The number of live trials."""
        return len(self._trials)

    @property
    def is_last(self) -> bool:
        """Whether no halving is left, so that trials end at the milestone."""
        return self.halvings == 0

    @property
    def next_milestone(self) -> int:
        """The milestone after the present one."""
        return int(min(self.milestone * self.factor, self.max_t))

    def add(self, trial: str) -> None:
        """Add a trial that has reported nothing."""
        self._trials[trial] = (0.0, -math.inf)
        self.behind += 1
        self._added += 1
        self.is_full = self.is_full or self._added >= self.size

    def record(self, trial: str, time: float, value: float) -> None:
        """Record a trial's progress and value."""
        self.behind += (time < self.milestone) - self.is_behind(trial)
        self._trials[trial] = (time, value)

    def is_behind(self, trial: str) -> bool:
        """Whether a trial has not reached the milestone."""
        return self._trials[trial][0] < self.milestone

    def remove(self, trial: str) -> None:
        """Remove a trial that has ended."""
        self.behind -= self.is_behind(trial)
        del self._trials[trial]

    def halve(self) -> tuple[list[RankedTrial], list[RankedTrial]]:
        """Go to the next milestone; return the trials that continue, and those that do not.

        The latter are still in the bracket. Of equal trials those that were added later are better.
        """
        self.milestone = self.next_milestone
        self.halvings -= 1
        self.size = math.ceil(self.size / self.factor)
        self.is_full = True
        ranked = sorted(
            ((trial, value) for trial, (_, value) in self._trials.items()), key=lambda one: one[1]
        )
        self.behind = sum(time < self.milestone for time, _ in self._trials.values())
        return ranked[-self.size :], ranked[: -self.size]

    def get_state(self) -> list[Any]:
        """Return the state as JSON values."""
        trials = [[trial, *progress] for trial, progress in self._trials.items()]
        return [self.halvings, self.size, self.milestone, self._added, self.is_full, trials]

    def set_state(self, state: list[Any]) -> None:
        """Restore the state that `get_state` returned."""
        self.halvings, self.size, self.milestone, self._added, self.is_full, trials = state
        self._trials = {trial: (time, value) for trial, time, value in trials}
        self.behind = sum(time < self.milestone for time, _ in self._trials.values())
