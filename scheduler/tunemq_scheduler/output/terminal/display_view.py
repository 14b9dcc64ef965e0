"""What a display is told about the search, turn after turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_failures import FailureGroup
    from tunemq_scheduler.results.trial_view import TrialView


class SearchView(Protocol):
    """A search as displays see it; read only when they draw, so it may compute when asked."""

    @property
    def name(self) -> str:
        """The experiment's name."""

    @property
    def path(self) -> str:
        """The experiment's folder."""

    @property
    def store(self) -> str:
        """Where its checkpoints are; empty where that is its folder."""

    @property
    def elapsed_s(self) -> float:
        """Seconds in which a scheduler ran this search."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How many trials are in each state, finished ones included."""

    @property
    def live(self) -> Iterable[TrialView]:
        """The trials that are not over."""

    @property
    def num_trials(self) -> int | None:
        """How many trials there will be; None if nobody knows."""

    @property
    def resources_used(self) -> Mapping[str, float]:
        """What trials hold now, by resource."""

    @property
    def resources_total(self) -> Mapping[str, float]:
        """What the nodes offer, by resource."""

    @property
    def metric(self) -> str | None:
        """What is optimised."""

    @property
    def mode(self) -> str | None:
        """``min`` or ``max``."""

    @property
    def best(self) -> tuple[str, float, Mapping[str, Any]] | None:
        """The best trial so far: its id, its value and its configuration."""

    @property
    def outcome(self) -> str:
        """How the search ended, to be read behind its name: ``is over``, ``was interrupted``."""

    @property
    def notes(self) -> Sequence[str]:
        """What holds now and people should know, such as that Redis is away."""

    @property
    def failures(self) -> Sequence[FailureGroup]:
        """What went wrong so far, by cause."""
