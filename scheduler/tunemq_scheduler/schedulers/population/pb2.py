"""Population based bandits.

J. Parker-Holder, V. Nguyen, S. J. Roberts: Provably Efficient Online Hyperparameter Optimization
with Population-Based Bandits, NeurIPS 2020 (arXiv:2002.02518), section 4 and algorithm 1.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple

from tunemq_scheduler.schedulers.population.explore import CustomExplore, customised
from tunemq_scheduler.schedulers.population.pbt import PopulationBasedTraining
from tunemq_scheduler.schedulers.trial_scheduler import TrialLike
from tunemq_scheduler.search.objective import Metric, Mode, is_real
from tunemq_shared.base.errors import ConfigError

#: By name: the least and the greatest value, or a dict of these for a nested dict.
Bounds = Mapping[str, Any]

#: The newest intervals on which the model is fitted, and the newest that it expects.
_MOST_INTERVALS: Final = 150
_MOST_PENDING: Final = 50


class _Bound(NamedTuple):
    """Where a value stands in a configuration, and its bounds."""

    path: tuple[str, ...]
    low: float
    high: float


class _Interval(NamedTuple):
    """What a trial did between two perturbations.

    Attributes:
        time: its progress at the beginning.
        score: its score there; greater is better.
        values: its hyperparameters, in the order of the bounds.
        gain: how much the score grew in an interval; 0 while that is not known.
    """

    time: float
    score: float
    values: list[float]
    gain: float = 0.0


class PB2(PopulationBasedTraining):
    """`PopulationBasedTraining` whose new hyperparameters a Gaussian process bandit chooses.

    The worst trials take over states of the best as in PBT. The model predicts how much the score
    grows until the next perturbation, from the score, the hyperparameters and the progress; older
    observations count less. The new hyperparameters have the greatest upper confidence bound, given
    those that other trials are trying out. So small populations suffice, and continuous values need
    bounds only. Needs numpy: the extra ``pb2``.

    Differences from Ray Tune: those of `PopulationBasedTraining`. The model has noise, and its
    context is the state that the trial takes over; Ray Tune takes the one an interval before. It is
    fitted on the 150 newest intervals of the population. While there are none, new values are drawn
    from the bounds; Ray Tune copies those of the better trial. All values must be in the search
    space; Ray Tune draws those that are not.

    Args:
        time_attr: the result key that measures progress; its values grow.
        metric: the result key to compare. Default: ``TuneConfig``'s metric.
        mode: ``min`` or ``max``.
        perturbation_interval: the progress between two perturbations of a trial, in units of
            ``time_attr``; more than 0.
        hyperparam_bounds: by name, the least and the greatest value, such as ``[0.001, 0.1]``, or
            a dict of these for a nested dict. An integer stays one if both bounds are integers.
        quantile_fraction: the part of the population that is replaced, and from which others
            continue: 0 to 0.5.
        log_config: ignored; the journal has each decision. Accepted for Ray Tune's scripts.
        require_attrs: whether a result without ``time_attr`` or the metric is an error.
        synch: whether all trials wait for each other at each perturbation.
        custom_explore_fn: gets the new configuration, and returns it changed.

    Raises:
        ConfigError: an argument is invalid; the message names it, its value and the fix. When the
            search begins: numpy is not installed.

    Example:
        >>> from tunemq.schedulers import PB2
        >>> scheduler = PB2(
        ...     time_attr="training_iteration",
        ...     metric="score",
        ...     mode="max",
        ...     perturbation_interval=4,
        ...     hyperparam_bounds={"lr": [0.001, 0.1], "batch": [32, 128]},
        ... )
    """

    _MUTATED: ClassVar[str] = "hyperparam_bounds"

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        hyperparam_bounds: Bounds | None = None,
        quantile_fraction: float = 0.25,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
        custom_explore_fn: CustomExplore | None = None,
    ) -> None:
        self._bounds = [*_read_bounds(type(self).__name__, hyperparam_bounds)]
        super().__init__(
            time_attr=time_attr,
            metric=metric,
            mode=mode,
            perturbation_interval=perturbation_interval,
            hyperparam_mutations=hyperparam_bounds,
            quantile_fraction=quantile_fraction,
            log_config=log_config,
            require_attrs=require_attrs,
            synch=synch,
        )
        self._custom = custom_explore_fn
        self._ended: deque[_Interval] = deque(maxlen=_MOST_INTERVALS)
        #: The intervals that trials are in, by trial; the newest last.
        self._begun: dict[str, _Interval] = {}
        #: The model of the ended intervals; None if it is not fitted.
        self._bandit: Any = None

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Set the experiment's metric, mode and seed.

        Raises:
            ConfigError: as for `PopulationBasedTraining`, or numpy is not installed.
        """
        if find_spec("numpy") is None:
            raise ConfigError("PB2 needs numpy, which is not installed: pip install 'numpy>=2'")
        return super().set_search_properties(metric, mode, **spec)

    def on_trial_add(self, runner: Any, trial: TrialLike) -> None:
        """Add a trial to the population.

        Raises:
            ConfigError: there is no metric, or the configuration lacks a bounded number.
        """
        super().on_trial_add(runner, trial)
        self._values(trial.config)

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._begun.pop(name, None)

    def _compared(self, name: str, config: dict[str, Any]) -> None:
        """End a trial's interval, and begin its next."""
        member, values = self._members[name], self._values(config)
        before = self._begun.get(name)
        if before is not None and before.values == values and member.trained > before.time:
            gain = float(member.score or 0.0) - before.score
            gain *= self._interval / (member.trained - before.time)
            if math.isfinite(gain):
                self._ended.append(before._replace(gain=gain))
                self._bandit = None
        self._begin(name, member.trained, member.score, values)

    def _begin(self, name: str, time: float, score: float | None, values: list[float]) -> None:
        self._begun.pop(name, None)
        if score is not None and math.isfinite(score):
            self._begun[name] = _Interval(time, score, values)

    def _explored(self, name: str, donor: str, config: dict[str, Any]) -> dict[str, Any]:
        source = self._members[donor]
        self._begun.pop(name, None)
        chosen = self._chosen(source.trained, source.score)
        new = copy.deepcopy(config)
        for bound, share in zip(self._bounds, chosen, strict=True):
            *outer, last = bound.path
            place = new
            for key in outer:
                place = place[key]
            value = bound.low + share * (bound.high - bound.low)
            is_whole = all(isinstance(one, int) for one in (place[last], bound.low, bound.high))
            place[last] = round(value) if is_whole else min(max(value, bound.low), bound.high)
        new = customised(new, self._custom)
        self._begin(name, source.trained, source.score, self._values(new))
        return new

    def _chosen(self, time: float, score: float | None) -> list[float]:
        """Return the hyperparameters with which to continue, each from 0 (low) to 1 (high)."""
        seed = self._rng.getrandbits(32)
        if not self._ended or score is None or not math.isfinite(score):
            return [self._rng.random() for _ in self._bounds]
        from tunemq_scheduler.schedulers.population.gaussian_process import Bandit, Step

        def step(one: _Interval) -> Step:
            pairs = zip(one.values, self._bounds, strict=True)
            inputs = [(value - bound.low) / (bound.high - bound.low) for value, bound in pairs]
            return Step(one.time / self._interval, one.score, inputs, one.gain)

        if self._bandit is None:
            self._bandit = Bandit([step(one) for one in self._ended])
        pending = islice(reversed(self._begun.values()), _MOST_PENDING)
        chosen: list[float] = self._bandit.propose(
            time / self._interval, score, [step(one) for one in pending], seed
        )
        return chosen

    def _values(self, config: Mapping[str, Any]) -> list[float]:
        """Return the hyperparameters of a configuration, in the order of the bounds.

        Raises:
            ConfigError: it lacks one, or one is no finite number.
        """
        values = []
        for bound in self._bounds:
            value: Any = config
            for key in bound.path:
                value = value.get(key) if isinstance(value, Mapping) else None
            if not is_real(value) or not math.isfinite(value):
                raise ConfigError(
                    f"{type(self).__name__}({_where(bound.path)}) bounds a number, and the "
                    f"configuration has {value!r}; correct the name, or leave it out."
                )
            values.append(float(value))
        return values

    def debug_string(self) -> str:
        """Return one line about its state, for the terminal."""
        return f"Using population based bandits: {self._perturbations} perturbations."

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the population, what the model knows, and the state of the random numbers."""
        return {
            **super().get_state(),
            "ended": [[*one] for one in self._ended],
            "begun": {name: [*one] for name, one in self._begun.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        super().set_state(state)
        self._ended = deque((_Interval(*one) for one in state["ended"]), _MOST_INTERVALS)
        self._begun = {name: _Interval(*one) for name, one in state["begun"].items()}
        self._bandit = None


def _read_bounds(who: str, bounds: Any, path: tuple[str, ...] = ()) -> Iterator[_Bound]:
    """Yield the bounds of a nested dict.

    Raises:
        ConfigError: they are missing or invalid.
    """
    where = _where(path)
    if not bounds or not isinstance(bounds, Mapping):
        raise ConfigError(
            f"{who}({where}={bounds!r}) is invalid: give the bounds of each hyperparameter, such "
            'as {"lr": [0.001, 0.1]}.'
        )
    for name, pair in bounds.items():
        if isinstance(pair, Mapping):
            yield from _read_bounds(who, pair, (*path, name))
            continue
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not (is_pair and all(is_real(one) and math.isfinite(one) for one in pair)):
            raise ConfigError(
                f"{who}({where}[{name!r}]={pair!r}) is invalid: give the least and the greatest "
                "value, such as [0.001, 0.1]."
            )
        if not pair[0] < pair[1]:
            raise ConfigError(
                f"{who}({where}[{name!r}]={pair!r}): the first bound must be below the second."
            )
        yield _Bound((*path, name), *pair)


def _where(path: tuple[str, ...]) -> str:
    return "hyperparam_bounds" + "".join(f"[{name!r}]" for name in path)
