"""`RecentPoints`: a rung of trials that are compared by several metrics."""

from __future__ import annotations

from typing import Any, Final

#: Trials with which a new one is compared at most. It bounds the time that a decision takes.
MOST_COMPARED: Final = 128

#: The values of a trial's metrics; smaller is better.
FinitePoint = tuple[float, ...]


class RecentPoints:
    """The values of the newest trials that reached a milestone, in the order of their arrival.

    Args:
        milestone: the progress at which trials are compared, in units of ``time_attr``.
    """

    __slots__ = ("_points", "milestone")

    def __init__(self, milestone: float) -> None:
        self.milestone = milestone
        self._points: dict[str, FinitePoint] = {}

    @property
    def count(self) -> int:
        """The number of trials that are compared."""
        return len(self._points)

    @property
    def points(self) -> list[FinitePoint]:
        """The values of all trials that are compared, the newest last."""
        return list(self._points.values())

    def record(self, trial: str, point: FinitePoint) -> None:
        """Record a trial's values; the oldest trial is dropped when there are too many."""
        self.forget(trial)
        self._points[trial] = point
        if len(self._points) > MOST_COMPARED:
            del self._points[next(iter(self._points))]

    def forget(self, trial: str) -> None:
        """Remove the trial's values, if it has any."""
        self._points.pop(trial, None)

    def get_state(self) -> list[Any]:
        """Return the state as JSON values."""
        return [self.milestone, [[trial, *point] for trial, point in self._points.items()]]

    def set_state(self, state: list[Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._points = {trial: tuple(point) for trial, *point in state[1]}
