"""Creates trial schedulers by name, and reads ``TuneConfig(scheduler=...)``."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.schedulers.asha import AsyncHyperBandScheduler
from tunemq_scheduler.schedulers.fifo import FIFOScheduler
from tunemq_scheduler.schedulers.trial_scheduler import TrialScheduler
from tunemq_scheduler.search.objective import Metric, Mode, accepted
from tunemq_shared.base.errors import ConfigError

_SCHEDULERS: dict[str, type[TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "async_hyperband": AsyncHyperBandScheduler,
    "asynchyperband": AsyncHyperBandScheduler,
    "asha": AsyncHyperBandScheduler,
}


def create_scheduler(scheduler: str, **kwargs: Any) -> TrialScheduler:
    """Create a trial scheduler by its name.

    Args:
        scheduler (str): ``"fifo"``, or ``"asha"`` (also ``"async_hyperband"`` and
            ``"asynchyperband"``).
        **kwargs: arguments of the scheduler's class.

    Returns:
        The trial scheduler.

    Raises:
        ConfigError: no scheduler has this name, or an argument is invalid.
        TypeError: the class takes no such argument.

    Example:
        >>> from tunemq import create_scheduler
        >>> type(create_scheduler("asha", max_t=100, grace_period=4)).__name__
        'AsyncHyperBandScheduler'
    """
    if scheduler not in _SCHEDULERS:
        raise ConfigError(
            f"the trial scheduler {scheduler!r} is unknown; use one of {', '.join(_SCHEDULERS)}."
        )
    return _SCHEDULERS[scheduler](**kwargs)


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
