"""`check_trial_scheduler`: whether a trial scheduler keeps what TuneMQ relies on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from tunemq.testing.curves.simulate import simulate
from tunemq.testing.curves.simulation import SimulatedDecision
from tunemq_scheduler.schedulers import ResourceChangingScheduler, TrialScheduler
from tunemq_scheduler.schedulers.trial_scheduler import RunnerLike, TrialLike
from tunemq_scheduler.search import uniform
from tunemq_scheduler.search.algorithm_states import state_of
from tunemq_scheduler.search.objective import Metric, Mode, accepted

#: After how many results the scheduler is replaced with one that has its state.
_RESTARTS = (1, 7, 40)


def check_trial_scheduler(
    make: Callable[[], TrialScheduler],
    *,
    param_space: dict[str, Any] | None = None,
    metric: str = "loss",
    mode: Literal["min", "max"] = "min",
    more_metrics: Sequence[str] = (),
    steps: int = 30,
    trials: int = 16,
    workers: int = 4,
    seeds: Iterable[int] = range(5),
) -> None:
    """Run a trial scheduler in simulated searches, and check its decisions.

    * Each search ends, and the scheduler lets no trial wait for ever.
    * With the same results it decides the same: it depends on nothing else.
    * Asked about each result it decides the same as when it is asked only at its horizons.
    * One that gets its state (``get_state``) in the middle of a search decides the same from there.

    Args:
        make (callable): returns a new scheduler.
        param_space (dict): the search space. Default: one number ``x`` from 0 to 1.
        metric (str): the metric of ``TuneConfig``; trials report random numbers.
        mode (str): as in ``TuneConfig``.
        more_metrics (list of str): what trials report, too, for a scheduler of several metrics.
        steps (int): the steps of each trial.
        trials (int): the number of trials.
        workers (int): how many of them run at once.
        seeds (iterable of int): a search is run for each.

    Raises:
        AssertionError: something of this does not hold; the message says what, and where.
        SearchFailed: the scheduler raised, answered something invalid, or lets trials wait.

    Example:
        >>> from tunemq.schedulers import TrialScheduler
        >>> from tunemq.testing import check_trial_scheduler
        >>> class StopTheWorse(TrialScheduler):
        ...     def on_trial_result(self, runner, trial, result):
        ...         return self.STOP if result["loss"] > 0.9 else self.CONTINUE
        >>> check_trial_scheduler(StopTheWorse)
    """

    def curves(config: dict[str, Any], step: int) -> dict[str, Any]:
        draw = random.Random(f"{config} {step}")
        metrics: dict[str, Any] = {name: draw.random() for name in (metric, *more_metrics)}
        return {**metrics, "time_this_iter_s": draw.uniform(0.5, 2), "done": step == steps}

    def decisions(scheduler: TrialScheduler, seed: int) -> list[SimulatedDecision]:
        search = simulate(
            scheduler,
            None,
            curves,
            param_space={"x": uniform(0, 1)} if param_space is None else param_space,
            metric=metric,
            mode=mode,
            num_samples=trials,
            workers=workers,
            seed=seed,
        )
        # Equal configurations end their steps at the same moment, in any order.
        return sorted(one._replace(reason="") for one in search.decisions)

    for seed in seeds:
        expected = decisions(make(), seed)
        _compare(expected, decisions(make(), seed), f"with the same results (seed {seed})")
        asked = _Asked(make(), _no_change)
        _compare(expected, decisions(asked, seed), f"if asked about each result (seed {seed})")
        for after in _RESTARTS:
            restarted = _Restarted(make, after)
            told = f"with its state of result {after} (seed {seed})"
            _compare(expected, decisions(restarted, seed), told)


def _no_change(*_: Any) -> None:
    return None


def _compare(expected: list[SimulatedDecision], found: list[SimulatedDecision], when: str) -> None:
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            raise AssertionError(
                f"the scheduler decides differently {when}: its decision {number} was {one}, and "
                f"now is {other}."
            )
    if len(expected) != len(found):
        raise AssertionError(
            f"the scheduler decides differently {when}: it made {len(expected)} decisions, and "
            f"now makes {len(found)}."
        )


class _Asked(ResourceChangingScheduler):
    """Asks a scheduler about each result, unless it observes those before its horizon."""

    def on_trial_result(self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]) -> Any:
        """Ask it whatever its horizon is."""
        if type(self._base).observe is TrialScheduler.observe:
            self._horizons[trial.trial_id] = None
        return super().on_trial_result(runner, trial, result)


class _Restarted(ResourceChangingScheduler):
    """Passes everything on to a scheduler, and replaces it once with one that has its state."""

    def __init__(self, make: Callable[[], TrialScheduler], after: int) -> None:
        super().__init__(make(), _no_change)
        self._make, self._left = make, after

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Keep the properties for the second scheduler."""
        self._properties, self._spec = (metric, mode), spec
        return super().set_search_properties(metric, mode, **spec)

    def on_trial_result(self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]) -> Any:
        """Replace the scheduler before the result."""
        self._left -= 1
        state = state_of(self._base) if self._left == 0 else None
        if state is not None:  # without a state TuneMQ repeats the calls instead
            self._base = self._make()
            tell = self._base.set_search_properties
            tell(*self._properties, **accepted(tell, self._spec))
            self._base.set_state(json.loads(json.dumps(state)))
            self._horizons = {}
        return super().on_trial_result(runner, trial, result)
