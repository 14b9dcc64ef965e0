"""`SearchAlgorithm`: all that the experiment's loop knows of search, whichever algorithm it is."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tunemq_scheduler.search.objective import Metric, Mode, check_objective
from tunemq_scheduler.search.space import read_space
from tunemq_shared.errors import ConfigError

#: ``num_samples`` of a search without end.
ENDLESS = -1


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration for a new trial.

    Attributes:
        config: complete, without any domain; it belongs to the receiver.
        tag: what distinguishes it, as text: ``3_lr=0.0100,width=32``.
        evaluated_params: the values that were searched over, by ``outer/inner`` name.
    """

    config: dict[str, Any]
    tag: str
    evaluated_params: dict[str, Any]


class NoSuggestion(enum.Enum):
    """Why there is no configuration."""

    WAIT = "WAIT"
    EXHAUSTED = "EXHAUSTED"


#: Ask again when a trial has ended or a result has come.
WAIT = NoSuggestion.WAIT
#: There will be none any more.
EXHAUSTED = NoSuggestion.EXHAUSTED


@dataclass(frozen=True, slots=True)
class SearchSetup:
    """What an experiment wants searched.

    Attributes:
        space: the search space; constants, domains, nested dicts and lists.
        num_samples: how often the grid is gone through, or how many trials; -1 is without end.
        metric: what is optimised, if the search is to know.
        mode: ``min`` or ``max``.
        seed: the experiment's seed.
    """

    space: dict[str, Any]
    num_samples: int = 1
    metric: Metric = None
    mode: Mode = None
    seed: int = 0

    def checked(self) -> SearchSetup:
        """The same with its space in one notation.

        Raises:
            SearchSpaceError: the space cannot be searched.
            ConfigError: another field is not usable.
        """
        count = self.num_samples
        if (
            isinstance(count, bool)
            or not isinstance(count, int)
            or (count < 1 and count != ENDLESS)
        ):
            raise ConfigError(
                f"num_samples is {count!r}; it must be a positive whole number, or -1 for no end."
            )
        check_objective("TuneConfig", self.metric, self.mode)
        return SearchSetup(read_space(self.space), count, self.metric, self.mode, self.seed)


class SearchAlgorithm(ABC):
    """Gives the experiment its configurations, one after the other.

    **Order.** `set_up` once; then `told_suggested` for each trial of earlier runs, with what became
    of them; then `next_config` for n = the number of trials so far. After WAIT the same n is asked
    again.

    **Ends.** `told_complete` is said once for each trial, also for those of earlier runs.
    """

    @abstractmethod
    def set_up(self, setup: SearchSetup) -> None:
        """Get ready for an experiment.

        Raises:
            UserError: what the experiment wants cannot be searched by this algorithm.
        """

    @property
    def wants_results(self) -> bool:
        """Whether `told_result` is of interest."""
        return False

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Metrics that every result has to have."""
        return ()

    @property
    @abstractmethod
    def total(self) -> int | None:
        """How many configurations there will be at most; None if there is no end."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether `next_config` has said EXHAUSTED."""

    @abstractmethod
    def next_config(self, n: int, trial_id: str) -> Suggestion | NoSuggestion:
        """The ``n``-th configuration (from 0), for a new trial; or WAIT, or EXHAUSTED."""

    def told_suggested(self, n: int, trial_id: str, config: dict[str, Any]) -> None:  # noqa: B027
        """An earlier run gave configuration ``n`` to this trial."""

    def told_result(self, trial_id: str, result: dict[str, Any]) -> None:  # noqa: B027
        """A trial reported; said only if `wants_results`."""

    def told_complete(  # noqa: B027
        self,
        trial_id: str,
        result: dict[str, Any] | None,
        error: bool = False,
        early_terminated: bool = False,
    ) -> None:
        """A trial ended.

        Args:
            trial_id: which.
            result: its last result, if it has one.
            error: whether it failed.
            early_terminated: whether a trial scheduler stopped it.
        """

    def get_state(self) -> dict[str, Any] | None:
        """The state as JSON values, which saves telling it the history; None if it offers none."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Take a state that `get_state` gave; called after `set_up`, before anything is told."""
        raise NotImplementedError(f"{type(self).__name__} has no state to set.")


def check_max_concurrent(who: str, value: int | None) -> int | None:
    """``value`` if it is a limit; 0 and None are none.

    Raises:
        ConfigError: it is not a whole number, or negative.
    """
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"{who} is {value!r}; it must be a positive whole number, or 0 for no limit."
        )
    return value
