"""Creates trial schedulers by name, and reads ``TuneConfig(scheduler=...)``."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from tunemq_scheduler.schedulers.fifo import FIFOScheduler
from tunemq_scheduler.schedulers.halving.asha import AsyncHyperBandScheduler
from tunemq_scheduler.schedulers.halving.hyperband import HyperBandForBOHB, HyperBandScheduler
from tunemq_scheduler.schedulers.halving.multi_objective_asha import MultiObjectiveASHA
from tunemq_scheduler.schedulers.halving.pasha import PASHA
from tunemq_scheduler.schedulers.median_stopping import MedianStoppingRule
from tunemq_scheduler.schedulers.population.pb2 import PB2
from tunemq_scheduler.schedulers.population.pbt import PopulationBasedTraining
from tunemq_scheduler.schedulers.population.pbt_replay import PopulationBasedTrainingReplay
from tunemq_scheduler.schedulers.resource_changing import ResourceChangingScheduler
from tunemq_scheduler.schedulers.trial_scheduler import TrialScheduler
from tunemq_scheduler.search.objective import Metric, Mode, accepted
from tunemq_shared.base.errors import ConfigError

_SCHEDULERS: dict[str, type[TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "async_hyperband": AsyncHyperBandScheduler,
    "asynchyperband": AsyncHyperBandScheduler,
    "asha": AsyncHyperBandScheduler,
    "pasha": PASHA,
    "moasha": MultiObjectiveASHA,
    "hyperband": HyperBandScheduler,
    "hb_bohb": HyperBandForBOHB,
    "median_stopping_rule": MedianStoppingRule,
    "medianstopping": MedianStoppingRule,
    "pbt": PopulationBasedTraining,
    "resource_changing": ResourceChangingScheduler,
    "pbt_replay": PopulationBasedTrainingReplay,
    "pb2": PB2,
}


def create_scheduler(scheduler: str, **kwargs: Any) -> TrialScheduler:
    """Create a trial scheduler by its name.

    Args:
        scheduler (str): ``"fifo"``, ``"asha"`` (also ``"async_hyperband"`` and
            ``"asynchyperband"``), ``"pasha"``, ``"moasha"``, ``"hyperband"``, ``"hb_bohb"``,
            ``"median_stopping_rule"`` (also ``"medianstopping"``), ``"pbt"``, ``"pbt_replay"``,
            ``"pb2"``, or ``"resource_changing"``.
        **kwargs: arguments of the scheduler's class.

    Returns:
        The trial scheduler.

    Raises:
        ConfigError: no scheduler has this name, the class takes no such argument, or an argument is
            invalid.

    Example:
        >>> from tunemq import create_scheduler
        >>> type(create_scheduler("asha", max_t=100, grace_period=4)).__name__
        'AsyncHyperBandScheduler'
    """
    if scheduler not in _SCHEDULERS:
        raise ConfigError(
            f"the trial scheduler {scheduler!r} is unknown; use one of {', '.join(_SCHEDULERS)}."
        )
    kind = _SCHEDULERS[scheduler]
    known = [name for name in inspect.signature(kind).parameters if name != "self"]
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = (
                f"did you mean {close[0]}?" if close else f"it takes {', '.join(known) or 'none'}."
            )
            raise ConfigError(f"{kind.__name__} takes no argument {name!r}; {meant}")
    return kind(**kwargs)


def make_scheduler(scheduler: Any, metric: Metric, mode: Mode, seed: int) -> TrialScheduler:
    """Return an experiment's trial scheduler, set up with its metric, mode and seed.

    Args:
        scheduler: a name, a `TrialScheduler`, or None for first in, first out.
        metric: as in ``TuneConfig``.
        mode: as in ``TuneConfig``.
        seed: the experiment's seed.

    Raises:
        ConfigError: ``scheduler`` is none of these, or does not accept the metric and mode.
    """
    if isinstance(scheduler, str):
        scheduler = create_scheduler(scheduler)
    if scheduler is None:
        scheduler = FIFOScheduler()
    if isinstance(scheduler, type) and issubclass(scheduler, TrialScheduler):
        raise ConfigError(
            f"scheduler is the class {scheduler.__name__}; make one: {scheduler.__name__}()."
        )
    if not isinstance(scheduler, TrialScheduler):
        raise ConfigError(
            f"scheduler is {scheduler!r}; it must be a TrialScheduler or one of the names "
            f"{', '.join(_SCHEDULERS)}."
        )
    hand_over = scheduler.set_search_properties
    if not hand_over(metric, mode, **accepted(hand_over, {"seed": seed})):
        raise ConfigError(
            f"{type(scheduler).__name__} does not accept metric {metric!r} and mode {mode!r}; "
            "set the metric and mode in TuneConfig or in the scheduler, not in both."
        )
    return scheduler
