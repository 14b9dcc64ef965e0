"""What an experiment on a farm needs of whoever has the farm."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from tunemq_scheduler.experiment_view import ExperimentView
from tunemq_scheduler.farm.copied import WaitsForCopy
from tunemq_scheduler.farm.holder import Holder
from tunemq_scheduler.search_run import SearchRun


class FarmBackend(WaitsForCopy):
    """An executor of a farm: nodes go on without it, if they are left to themselves."""

    #: Whether nodes were left to themselves, for another scheduler.
    is_left: bool

    @property
    @abstractmethod
    def is_away(self) -> bool:
        """Whether nobody can be told anything, not even goodbye."""

    @abstractmethod
    def watch(self, search: SearchRun, view: ExperimentView) -> None:
        """This search is about to run on it."""

    @abstractmethod
    def leave(self) -> None:
        """Tell nobody: nodes go on, for whoever comes next."""


class Farm(Protocol):
    """A farm that is ours as long as `check` says so."""

    @property
    def me(self) -> Holder:
        """This process."""

    @property
    def term(self) -> int:
        """The scheduler's."""

    def check(self) -> None:
        """Return if we may act.

        Raises:
            SchedulerSuperseded: somebody took our place, or may have; says who.
        """

    def executor(self) -> FarmBackend:
        """A backend for one run."""

    def is_forgotten(self, events_key: str, *, is_copy: bool) -> bool:
        """Whether nodes know no more of what the run before, with this stream, had them host.

        Args:
            is_copy: nothing but a copy of the experiment's journal says how far that run came.
        """

    def close(self) -> None:
        """The run is over."""
