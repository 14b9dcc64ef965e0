"""The median stopping rule, beside a reference written from the paper."""

from __future__ import annotations

import json
import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.schedulers import MedianStoppingRule, create_scheduler
from tunemq_scheduler.schedulers.running_means import RunningMeans
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import Condition


def rule(mode: str = "max", **options: Any) -> MedianStoppingRule:
    scheduler = MedianStoppingRule(
        **{
            "time_attr": "training_iteration",
            "grace_period": 1,
            "min_samples_required": 2,
            **options,
        }
    )
    scheduler.set_search_properties("score", mode)
    return scheduler


class Runner:
    def __init__(self, *statuses: str) -> None:
        self.trials = [SimpleNamespace(status=status) for status in statuses]

    def get_trials(self) -> list[Any]:
        return self.trials


def trial(number: int) -> Any:
    return SimpleNamespace(trial_id=f"t{number}", number=number, status="RUNNING", last_result={})


def report(
    scheduler: MedianStoppingRule, number: int, time: float, score: Any, *statuses: str
) -> str:
    result = {"training_iteration": time, "score": score}
    return scheduler.on_trial_result(Runner(*statuses), trial(number), result)  # type: ignore[arg-type, return-value]


def test_trial_whose_best_is_worse_than_the_median_of_averages_stops() -> None:
    scheduler = rule()
    for number, score in enumerate((1.0, 3.0, 5.0)):
        assert report(scheduler, number, 1, score) == "CONTINUE", "too few to compare with"
        assert report(scheduler, number, 2, score) == "CONTINUE"
    assert report(scheduler, 3, 1, 2.9) == "STOP"
    verdict = report(scheduler, 4, 1, 2.0)
    assert (verdict, verdict.reason) == (  # type: ignore[attr-defined]
        "STOP",
        (
            "best score 2 is worse than 2.95, the median of 4 trials' averages up to "
            "training_iteration 1"
        ),
    )
    assert report(scheduler, 5, 1, 3.0) == "CONTINUE"


def test_best_value_of_a_trial_counts_also_one_within_the_grace_period() -> None:
    scheduler = rule(grace_period=3)
    for number in range(3):
        report(scheduler, number, 3, 3.0)
    scheduler.observe(Runner(), trial(3), {"training_iteration": 1, "score": 10.0})  # type: ignore[arg-type]
    assert report(scheduler, 3, 3, 0.0) == "CONTINUE"
    assert report(scheduler, 4, 3, 0.0) == "STOP"


def test_horizon_is_the_end_of_the_grace_period_and_then_each_result() -> None:
    scheduler = rule(grace_period=3)
    assert scheduler.horizon(trial(0)) == (Condition("training_iteration", 3),)


def test_soft_stop_pauses_and_lets_the_trial_run_to_its_end() -> None:
    scheduler = rule(hard_stop=False)
    for number in range(3):
        report(scheduler, number, 1, 3.0)
    assert report(scheduler, 3, 1, 0.0) == "PAUSE"
    assert scheduler.horizon(trial(3)) == ()
    assert report(scheduler, 3, 2, 0.0) == "CONTINUE"


def test_trial_that_cannot_be_compared_gives_way_to_a_waiting_one() -> None:
    scheduler = rule(min_time_slice=2)
    assert report(scheduler, 0, 1, 0.0, "RUNNING") == "CONTINUE"
    assert report(scheduler, 0, 2, 0.0, "RUNNING", "PENDING") == "PAUSE"
    assert report(scheduler, 0, 4, 0.0, "PAUSED") == "CONTINUE", "it ran for no longer than 2"
    verdict = report(scheduler, 0, 5, 0.0, "PAUSED")
    assert (verdict, verdict.reason) == (  # type: ignore[attr-defined]
        "PAUSE",
        "it gives way: 0 of at least 2 other trials have reached training_iteration 5",
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_counts_for_nothing(value: float) -> None:
    scheduler = rule()
    for number, score in enumerate((1.0, 3.0, value, 5.0)):
        report(scheduler, number, 1, score)
    assert report(scheduler, 4, 1, value) == "STOP"
    assert report(scheduler, 5, 1, 3.0) == "CONTINUE", "the median of 1, 3 and 5"


def test_result_without_the_metric_or_the_time_is_passed_over() -> None:
    scheduler = rule()
    for number in range(3):
        report(scheduler, number, 1, 3.0)
    for result in ({"training_iteration": 1}, {"score": 0.0}):
        assert scheduler.on_trial_result(Runner(), trial(3), result) == "CONTINUE"  # type: ignore[arg-type]


def test_restarted_trial_is_compared_with_none_of_its_former_results() -> None:
    scheduler = rule()
    for number, score in enumerate((1.0, 1.0, 9.0, 9.0, 9.0)):
        report(scheduler, number, 1, score)
    for number in (2, 3, 4):
        scheduler.on_trial_restart(Runner(), trial(number))  # type: ignore[arg-type]
    assert report(scheduler, 5, 1, 1.0) == "CONTINUE"


class Reference:
    """The rule as the paper states it, for trials in any order: all results, and a scan of them."""

    def __init__(self, least: int, grace: float) -> None:
        self.results: dict[str, list[tuple[float, float]]] = {}
        self.least, self.grace = least, grace

    def stops(self, name: str, time: float, value: float) -> bool:
        self.results.setdefault(name, []).append((time, value))
        if time < self.grace:
            return False
        averages = []
        for other, curve in self.results.items():
            if other == name or curve[-1][0] < time:
                continue
            values = [one for at, one in curve if self.grace <= at <= time]
            if values and all(map(math.isfinite, values)):
                averages.append(statistics.fmean(values))
        if len(averages) < self.least:
            return False
        best = max((one for _, one in self.results[name] if math.isfinite(one)), default=-math.inf)
        return best < statistics.median(averages) and not math.isclose(
            best, statistics.median(averages), rel_tol=1e-12
        )


@given(st.integers(0, 10**9))
def test_decisions_are_those_of_the_paper(seed: int) -> None:
    rng = random.Random(seed)
    grace, least = rng.choice([0, 1, 3]), rng.choice([1, 2, 3])
    is_regular, has_nan = rng.random() < 0.5, rng.random() < 0.2
    scheduler = rule(grace_period=grace, min_samples_required=least)
    reference = Reference(least, grace)
    times = dict.fromkeys(range(rng.randint(2, 8)), 0.0)
    while times:
        number = rng.choice(list(times))
        times[number] += 1 if is_regular else rng.choice([0.25, 0.5, 1.0, 1.75])
        value = math.nan if has_nan and rng.random() < 0.1 else float(rng.randint(0, 8))
        result = {"training_iteration": times[number], "score": value}
        expected = reference.stops(f"t{number}", times[number], value)
        if times[number] < grace:
            scheduler.observe(Runner(), trial(number), result)  # type: ignore[arg-type]
            assert not expected
        else:
            verdict = scheduler.on_trial_result(Runner(), trial(number), result)  # type: ignore[arg-type]
            assert (verdict == "STOP") == expected
        if rng.random() < 0.1:
            state = json.loads(json.dumps(scheduler.get_state()))
            scheduler = rule(grace_period=grace, min_samples_required=least)
            scheduler.set_state(state)
        if expected or times[number] > 9:
            del times[number]


def test_median_of_trials_that_report_at_the_same_times_asks_no_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    means = RunningMeans()
    for number in range(1000):
        for time in (1, 2, 3):
            means.add(f"t{number}", time, number)
    asked: list[float] = []
    curve = type(means._curves["t0"])
    mean_at = curve.mean_at
    monkeypatch.setattr(
        curve, "mean_at", lambda self, time: asked.append(time) or mean_at(self, time)
    )
    assert means.median_of_others("t0", 2) == (999, 500.0)
    assert asked == [2], "only the trial itself"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"grace_period": -1}, r"grace_period=-1"),
        ({"grace_period": math.nan}, r"grace_period=nan"),
        ({"min_time_slice": "1"}, r"min_time_slice='1'"),
        ({"min_samples_required": 0}, r"min_samples_required"),
        ({"mode": "best"}, r"mode"),
    ],
)
def test_impossible_argument_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        create_scheduler("median_stopping_rule", **options)
