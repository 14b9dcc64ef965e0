"""`SearchView`: the state of a search that displays read each turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_failures import FailureGroup
    from tunemq_scheduler.results.trial_view import TrialView


class SearchView(Protocol):
    """A search as displays see it; read only for drawing, so it may compute values on demand."""

    @property
    def name(self) -> str:
        """The experiment's name."""

    @property
    def path(self) -> str:
        """The experiment's folder."""

    @property
    def store(self) -> str:
        """The address of its checkpoint store; empty if that is its folder."""

    @property
    def elapsed_s(self) -> float:
        """Seconds for which a scheduler has run this search."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of trials in each state, including finished ones."""

    @property
    def live(self) -> Iterable[TrialView]:
        """The unfinished trials."""

    @property
    def num_trials(self) -> int | None:
        """The final number of trials; None if unknown."""

    @property
    def resources_used(self) -> Mapping[str, float]:
        """The resources that trials hold now."""

    @property
    def resources_total(self) -> Mapping[str, float]:
        """The resources that the nodes offer."""

    @property
    def metric(self) -> str | None:
        """The metric to optimise."""

    @property
    def mode(self) -> str | None:
        """``min`` or ``max``."""

    @property
    def best(self) -> tuple[str, float, Mapping[str, Any]] | None:
        """The best trial so far: its ID, value and configuration."""

    @property
    def outcome(self) -> str:
        """How the search ended, as a phrase that follows its name."""

    @property
    def notes(self) -> Sequence[str]:
        """Current conditions that the user should know, such as an unreachable Redis."""

    @property
    def failures(self) -> Sequence[FailureGroup]:
        """The failures so far, by cause."""
