"""Algorithms that several searches of a script use begin anew in each."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import tunemq as tune
from tunemq.schedulers import ASHAScheduler, FIFOScheduler
from tunemq.search import ConcurrencyLimiter
from tunemq.search.basic_variant import BasicVariantGenerator
from tunemq.search.optuna import OptunaSearch
from tunemq.stopper import CombinedStopper
from tunemq_scheduler.stopping.plateau import ExperimentPlateauStopper
from tunemq_shared.base.errors import ConfigError

pytestmark = pytest.mark.integration


def train(config: dict[str, Any]) -> None:
    for step in range(1, 9):
        tune.report({"score": config["scale"] * (1 + config["x"] * step)})


def tuner_of(folder: object, scale: float, *, stop: Any = None, **tune_config: Any) -> tune.Tuner:
    return tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"x": tune.uniform(0, 1), "scale": scale},
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=6,
            seed=1,
            max_concurrent_trials=1,
            **tune_config,
        ),
        run_config=tune.RunConfig(storage_path=str(folder), verbose=0, stop=stop),
    )


def steps_of(grid: tune.ResultGrid) -> list[int]:
    return [len(one.history) for one in grid]


def asha() -> ASHAScheduler:
    return ASHAScheduler(max_t=8, grace_period=2, reduction_factor=2)


def test_scheduler_of_an_earlier_search_judges_only_by_the_results_of_this_one(tmp_path):
    alone = steps_of(tuner_of(tmp_path, 1, scheduler=asha()).fit())
    assert set(alone) > {2}
    shared = asha()

    first = tuner_of(tmp_path, 10, scheduler=shared)
    assert steps_of(first.fit()) == alone
    assert "trials stopped" in shared.debug_string(), "the user's own object has its first search"
    assert steps_of(tuner_of(tmp_path, 1, scheduler=shared).fit()) == alone
    assert steps_of(first.fit()) == alone


def test_scheduler_of_the_same_process_restores_a_search_as_a_new_one_does(tmp_path):
    shared = asha()
    before = tuner_of(tmp_path, 1, scheduler=shared).fit()
    more = tune.TuneConfig(
        metric="score", mode="max", num_samples=7, max_concurrent_trials=1, scheduler=shared
    )
    restored = tune.Tuner.restore(before.experiment_path, train, tune_config=more)
    assert steps_of(restored.fit())[:6] == steps_of(before)
    assert "2: 6 trials" in shared.debug_string()


@pytest.mark.parametrize("algorithm", [BasicVariantGenerator, OptunaSearch])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_stopper_and_search_algorithm_of_an_earlier_search_begin_anew(
    tmp_path, algorithm, is_wrapped
):
    stopper = ExperimentPlateauStopper("score", std=0.5, top=2, mode="max")
    searcher = algorithm()

    def fit():
        if is_wrapped:  # in new wrappers each time
            stop, search_alg = CombinedStopper(stopper), ConcurrencyLimiter(searcher, 1)
        else:
            stop, search_alg = [stopper], searcher
        return tuner_of(tmp_path, 1, stop=stop, search_alg=search_alg).fit()

    first, second = fit(), fit()
    assert steps_of(first) == steps_of(second)
    assert [one.config for one in first] == [one.config for one in second]


class Locked(FIFOScheduler):
    """A trial scheduler that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_used_scheduler_that_cannot_be_copied_is_refused(tmp_path):
    scheduler = Locked()
    assert tuner_of(tmp_path, 1, scheduler=scheduler).fit().num_terminated == 6
    with pytest.raises(ConfigError, match="this Locked has the state of an earlier search"):
        tuner_of(tmp_path, 1, scheduler=scheduler).fit()
