"""Measures what one result costs each trial scheduler, with 100 and with 100,000 trials.

    python -m benchmarks.simulator.scheduler_cost

All trials have reported at their first horizon; then further ones do, and the median time of
`on_trial_result` and `horizon` of one of them is shown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

from tunemq import uniform
from tunemq.schedulers import (
    PASHA,
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    MultiObjectiveASHA,
    PopulationBasedTraining,
    TrialScheduler,
)
from tunemq_shared.protocol.result_conditions import first_that_holds

SIZES: Final = (100, 100_000)
MEASURED: Final = 1_001
_MUTATIONS: Final = {"lr": uniform(0.0, 1.0)}
_STEP: Final = "training_iteration"


def _pbt(*, synch: bool) -> TrialScheduler:
    return PopulationBasedTraining(
        _STEP, perturbation_interval=3, hyperparam_mutations=_MUTATIONS, synch=synch
    )


SCHEDULERS: Final[dict[str, Callable[[], TrialScheduler]]] = {
    "FIFOScheduler": FIFOScheduler,
    "ASHAScheduler": lambda: ASHAScheduler(max_t=81, reduction_factor=3),
    "ASHAScheduler, promotion": lambda: ASHAScheduler(
        max_t=81, reduction_factor=3, type="promotion"
    ),
    "PASHA": lambda: PASHA(max_t=81),
    "MultiObjectiveASHA": lambda: MultiObjectiveASHA(["loss", "cost"], ["min", "min"], max_t=81),
    "HyperBandScheduler": lambda: HyperBandScheduler(max_t=81),
    "HyperBandForBOHB": lambda: HyperBandForBOHB(max_t=81),
    "MedianStoppingRule": lambda: MedianStoppingRule(_STEP, grace_period=1),
    "PopulationBasedTraining": lambda: _pbt(synch=False),
    "PopulationBasedTraining, synch": lambda: _pbt(synch=True),
}


class Runner:
    """What schedulers see of a search: all trials are alive, and none waits."""

    def __init__(self) -> None:
        self.trials: dict[str, Any] = {}

    def get_trials(self) -> list[Any]:
        """Return all trials."""
        return list(self.trials.values())

    def get_trial(self, trial_id: str) -> Any:
        """Return a trial."""
        return self.trials.get(trial_id)

    def has_waiting(self) -> bool:
        """Return that no trial waits."""
        return False

    def expects_trials(self) -> bool:
        """Return that more may come."""
        return True


class Search:
    """A search in which one trial after the other reports once, at its first horizon.

    Args:
        make: returns its trial scheduler.
    """

    def __init__(self, make: Callable[[], TrialScheduler]) -> None:
        self._scheduler, self._runner, self._rng = make(), Runner(), random.Random(0)
        if not isinstance(self._scheduler, MultiObjectiveASHA):
            self._scheduler.set_search_properties("loss", "min", seed=0)

    def report(self) -> float:
        """Let a new trial report; return the seconds that its trial scheduler takes."""
        scheduler, runner, rng = self._scheduler, self._runner, self._rng
        number = len(runner.trials)
        name = f"trial_{number:06d}"
        trial = SimpleNamespace(
            trial_id=name, number=number, config={"lr": 0.5}, status="RUNNING", last_result={}
        )
        runner.trials[name] = trial
        scheduler.on_trial_add(runner, trial)
        result = {_STEP: 1, "loss": rng.random(), "cost": rng.random(), "config": trial.config}
        horizon = scheduler.horizon(trial) or ()
        while horizon and first_that_holds(horizon, result) is None:
            result[_STEP] += 1
        trial.last_result = result
        begin = time.perf_counter()
        scheduler.on_trial_result(runner, trial, result)
        scheduler.horizon(trial)
        return time.perf_counter() - begin


def costs_us(make: Callable[[], TrialScheduler]) -> list[float]:
    """Return the median microseconds of one result after those of other trials, by `SIZES`.

    The searches take turns, so that whatever else the machine does slows all of them.
    """
    searches = [Search(make) for _ in SIZES]
    for search, size in zip(searches, SIZES, strict=True):
        for _ in range(size):
            search.report()
    taken = [[search.report() for search in searches] for _ in range(MEASURED)]
    return [median(times) * 1e6 for times in zip(*taken, strict=True)]


def main() -> None:
    """Print a table."""
    print("| trial scheduler | 100 trials, us | 100,000 trials, us | ratio |\n|---|--:|--:|--:|")
    for name, make in SCHEDULERS.items():
        few, many = costs_us(make)
        print(f"| `{name}` | {few:.1f} | {many:.1f} | {many / few:.2f} |", flush=True)


if __name__ == "__main__":
    main()
