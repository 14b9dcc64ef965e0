"""ASHA: rungs, cutoffs, horizons, and the cost of a decision."""

from __future__ import annotations

import json
import math
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.schedulers import ASHAScheduler, AsyncHyperBandScheduler, create_scheduler
from tunemq_scheduler.schedulers.halving.rung import Rung
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import Condition

RUNNER: Any = None


def trial(number: int) -> Any:
    return SimpleNamespace(trial_id=f"t{number}", number=number, last_result={})


def asha(seed: int = 0, **options: Any) -> ASHAScheduler:
    scheduler = ASHAScheduler(**{"metric": "score", "mode": "max", **options})
    scheduler.set_search_properties(None, None, seed=seed)
    return scheduler


def added(scheduler: ASHAScheduler, *numbers: int) -> list[Any]:
    trials = [trial(number) for number in numbers]
    for one in trials:
        scheduler.on_trial_add(RUNNER, one)
    return trials


def report(scheduler: ASHAScheduler, one: Any, time_: float, score: Any) -> str:
    return scheduler.on_trial_result(RUNNER, one, {"training_iteration": time_, "score": score})


class Oracle:
    """The plain ASHA rule, with numpy, for trials that report every step."""

    def __init__(self, grace: float, factor: float, last: float) -> None:
        self.rungs: list[tuple[float, dict[int, float]]] = []
        milestone = grace
        while milestone <= last:
            self.rungs.append((milestone, {}))
            milestone *= factor
        self.factor, self.last = factor, last

    def stops(self, number: int, step: int, value: float) -> bool:
        if step >= self.last:
            return True
        for milestone, recorded in reversed(self.rungs):
            if step >= milestone and number not in recorded:
                known = [v for v in recorded.values() if not math.isnan(v)]
                cutoff = np.percentile(known, (1 - 1 / self.factor) * 100) if known else -math.inf
                recorded[number] = value
                return not value >= cutoff if known else False
            if number in recorded:
                return False
        return False


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60),
    st.one_of(st.floats(1.01, 20), st.sampled_from([2, 3, 4, 5])),
)
def test_asha_cutoff_equals_numpys_percentile_to_the_last_bit(
    values: list[float], factor: float
) -> None:
    rung = Rung(1, 1 / factor)
    for number, value in enumerate(values):
        rung.record(f"t{number}", value)
    rung.record("diverged", None)
    expected = np.nanpercentile([*values, math.nan], (1 - 1 / factor) * 100)
    assert rung.cutoff() == float(expected)


@given(
    st.sampled_from([2, 3, 4]),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.integers(0, 6), st.just(math.nan))), max_size=120
    ),
)
def test_asha_decisions_equal_those_of_the_plain_rule(
    factor: int, grace: int, story: list[tuple[int, float]]
) -> None:
    scheduler = asha(grace_period=grace, reduction_factor=factor, max_t=20)
    oracle = Oracle(grace, factor, 20)
    trials = added(scheduler, *range(10))
    steps = dict.fromkeys(range(10), 0)
    for number, value in story:
        if number not in steps:
            continue
        steps[number] += 1
        answer = report(scheduler, trials[number], steps[number], value)
        assert (answer == "STOP") == oracle.stops(number, steps[number], value)
        if answer == "STOP":
            del steps[number]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=100), st.integers(1, 3))
def test_asha_asked_only_at_horizons_decides_the_same(
    story: list[tuple[int, int]], brackets: int
) -> None:
    every, only = (
        asha(grace_period=2, reduction_factor=2, max_t=9, brackets=brackets) for _ in range(2)
    )
    every_trials, only_trials = added(every, *range(6)), added(only, *range(6))
    steps = dict.fromkeys(range(6), 0)
    for number, value in story:
        if number not in steps:
            continue
        steps[number] += 1
        result = {"training_iteration": steps[number], "score": value}
        horizon = only.horizon(only_trials[number])
        due = horizon is None or any(condition.holds(result) for condition in horizon)
        told = every.on_trial_result(RUNNER, every_trials[number], result)
        if due:
            assert only.on_trial_result(RUNNER, only_trials[number], result) == told
        else:
            assert told == "CONTINUE"
        if told == "STOP":
            del steps[number]
    assert every.get_state() == only.get_state()


def test_asha_rungs_grow_by_the_reduction_factor_up_to_max_t() -> None:
    scheduler = asha(grace_period=1, reduction_factor=3, max_t=81)
    milestones = [rung[0] for rung in scheduler.get_state()["brackets"][0]]
    assert milestones == [1, 3, 9, 27, 81]


def test_asha_rungs_up_to_a_power_of_ten_include_the_last() -> None:
    scheduler = asha(reduction_factor=10, max_t=1000)
    assert len(scheduler.get_state()["brackets"][0]) == 4


def test_asha_horizon_is_the_next_rung_and_then_max_t() -> None:
    scheduler = asha(grace_period=2, reduction_factor=4, max_t=10)
    (one,) = added(scheduler, 0)
    assert scheduler.horizon(one) == (Condition("training_iteration", 2),)
    report(scheduler, one, 2, 1)
    assert scheduler.horizon(one) == (Condition("training_iteration", 8),)
    report(scheduler, one, 8, 1)
    assert scheduler.horizon(one) == (Condition("training_iteration", 10),)
    answer = report(scheduler, one, 10, 1)
    assert answer == "STOP"
    assert answer.reason == "training_iteration 10 has reached max_t 10"  # type: ignore[attr-defined]
    assert scheduler.horizon(one) == ()


def test_asha_without_stopping_at_max_t_lets_trials_run_to_their_end() -> None:
    scheduler = asha(max_t=4, stop_last_trials=False)
    (one,) = added(scheduler, 0)
    assert report(scheduler, one, 4, 1) == "CONTINUE"
    assert scheduler.horizon(one) == ()


def test_asha_stops_a_bad_trial_with_the_reason() -> None:
    scheduler = asha(mode="min", grace_period=9, reduction_factor=3, max_t=90)
    for other, score in zip(added(scheduler, *range(12)), range(12), strict=True):
        report(scheduler, other, 9, score / 10)
    (late,) = added(scheduler, 12)
    verdict = report(scheduler, late, 9, 0.81)
    assert verdict == "STOP"
    assert verdict.reason == (  # type: ignore[attr-defined]
        "score 0.81 is not among the best 1/3 of 12 trials at rung 9 (cutoff 0.366667)"
    )


def test_asha_continues_trials_with_equal_values() -> None:
    scheduler = asha()
    trials = added(scheduler, *range(5))
    assert [report(scheduler, one, 1, 0.5) for one in trials] == ["CONTINUE"] * 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_asha_ranks_a_non_finite_value_worst_and_leaves_the_cutoff(bad: float, mode: str) -> None:
    scheduler = asha(mode=mode)
    first, second, third = added(scheduler, 0, 1, 2)
    assert report(scheduler, first, 1, 5) == "CONTINUE"
    assert report(scheduler, second, 1, bad) == "STOP"
    assert report(scheduler, third, 1, 5) == "CONTINUE"


def test_asha_counts_a_result_past_several_rungs_at_the_highest() -> None:
    scheduler = asha(reduction_factor=2, max_t=16)
    (one,) = added(scheduler, 0)
    report(scheduler, one, 5, 1)
    counts = [len(values) for _, values in scheduler.get_state()["brackets"][0]]
    assert counts == [0, 0, 1, 0, 0]
    assert scheduler.horizon(one) == (Condition("training_iteration", 8),)


def test_asha_skips_a_result_without_the_metric_and_asks_for_the_next() -> None:
    scheduler = asha()
    (one,) = added(scheduler, 0)
    assert scheduler.on_trial_result(RUNNER, one, {"training_iteration": 1}) == "CONTINUE"
    assert scheduler.horizon(one) is None
    assert report(scheduler, one, 2, 1) == "CONTINUE"
    assert scheduler.horizon(one) == (Condition("training_iteration", 4),)


def test_asha_accepts_a_nested_time_attribute() -> None:
    scheduler = asha(time_attr="info/epochs", grace_period=0.5, max_t=2, metric="info/score")
    (one,) = added(scheduler, 0)
    assert scheduler.horizon(one) == (Condition("info/epochs", 0.5),)
    answer = scheduler.on_trial_result(RUNNER, one, {"info": {"epochs": 2.0, "score": 1}})
    assert answer == "STOP"


def test_asha_counts_the_last_result_of_a_trial_that_ends_without_a_decision() -> None:
    scheduler = asha()
    first, second = added(scheduler, 0, 1)
    scheduler.on_trial_complete(RUNNER, first, {"training_iteration": 1, "score": 9})
    assert report(scheduler, second, 1, 3) == "STOP"


def test_asha_keeps_nothing_of_ended_trials() -> None:
    scheduler = asha()
    first, second, third, fourth = added(scheduler, 0, 1, 2, 3)
    scheduler.on_trial_complete(RUNNER, first, {"training_iteration": 1, "score": 9})
    scheduler.on_trial_error(RUNNER, second)
    scheduler.on_trial_remove(RUNNER, third)
    assert report(scheduler, fourth, 1, 0) == "STOP"
    assert scheduler.get_state()["places"] == {}
    scheduler.on_trial_complete(RUNNER, fourth, {})  # a repeated call does no harm


def test_asha_draws_brackets_from_seed_and_trial_number_alone() -> None:
    def drawn(seed: int, numbers: list[int]) -> dict[str, Any]:
        scheduler = asha(seed, brackets=3, max_t=81, reduction_factor=3)
        added(scheduler, *numbers)
        return {name: place[0] for name, place in scheduler.get_state()["places"].items()}

    numbers = list(range(300))
    assert drawn(1, numbers) == drawn(1, numbers[::-1])
    assert drawn(1, numbers) != drawn(2, numbers)
    counts = [list(drawn(1, numbers).values()).count(bracket) for bracket in range(3)]
    assert counts[0] > counts[1] > counts[2] > 0


def test_asha_state_is_json_and_restores_the_scheduler() -> None:
    scheduler = asha(brackets=2, max_t=16)
    for one in added(scheduler, *range(20)):
        report(scheduler, one, 1, random.Random(one.number).random())
    state = json.loads(json.dumps(scheduler.get_state()))
    other = asha(brackets=2, max_t=16)
    other.set_state(state)
    assert other.get_state() == scheduler.get_state()
    assert other.debug_string() == scheduler.debug_string()
    with pytest.raises(ConfigError, match="rungs"):
        asha(max_t=99).set_state(state)


def test_asha_replay_of_the_history_gives_the_same_state() -> None:
    scheduler, again = asha(), asha()
    story = [(one, random.Random(one.number).random()) for one in added(scheduler, *range(30))]
    added(again, *range(30))
    for one, score in story:
        assert report(scheduler, one, 1, score) == report(again, one, 1, score)
    assert scheduler.get_state() == again.get_state()


@pytest.mark.parametrize("bug", [100.0, math.nan])
def test_asha_forgets_what_a_trial_reported_before_it_restarted(bug: float) -> None:
    scheduler, undisturbed = asha(max_t=16), asha(max_t=16)
    first, second = added(scheduler, 0, 1)
    report(scheduler, first, 1, bug)
    report(scheduler, first, 4, bug)
    report(scheduler, second, 1, 3)
    scheduler.on_trial_error(RUNNER, first)
    (others,) = added(undisturbed, 1)
    report(undisturbed, others, 1, 3)
    again = asha(max_t=16)
    again.set_state(json.loads(json.dumps(scheduler.get_state())))

    for one in (scheduler, again):
        one.on_trial_restart(RUNNER, trial(0))
        assert one.get_state()["brackets"] == undisturbed.get_state()["brackets"]
        (restarted,) = added(one, 0)
        assert report(one, restarted, 1, 3) == "CONTINUE"


def test_asha_debug_text_shows_rungs_with_cutoffs() -> None:
    scheduler = asha(mode="min", max_t=4)
    (one,) = added(scheduler, 0)
    report(scheduler, one, 1, 0.25)
    assert scheduler.debug_string() == (
        "Using ASHA: 0 trials stopped.\nRungs 1: 1 trials, cutoff 0.25 | 4: 0 trials"
    )


def test_asha_subclass_with_its_decision_method_is_asked_about_every_result() -> None:
    class Mine(AsyncHyperBandScheduler):
        def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
            return super().on_trial_result(runner, trial, result)

    mine = Mine(metric="score", mode="max")
    mine.set_search_properties(None, None)
    mine.on_trial_add(RUNNER, trial(0))
    assert mine.horizon(trial(0)) is None


def test_asha_is_made_by_rays_names() -> None:
    for name in ("asha", "async_hyperband"):
        assert isinstance(create_scheduler(name, max_t=5), ASHAScheduler)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_t": 0}, "max_t=0"),
        ({"grace_period": "1"}, "grace_period='1'"),
        ({"grace_period": 9, "max_t": 3}, "must not be above max_t"),
        ({"reduction_factor": 1}, "reduction_factor=1.*above 1"),
        ({"brackets": 0}, "brackets=0"),
        ({"mode": "best"}, "mode='best'"),
        ({"metric": ["a", "b"], "mode": ["min", "max"]}, "one metric"),
    ],
)
def test_asha_with_an_invalid_option_names_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asha(**options)


def test_asha_without_a_metric_rejects_a_trial() -> None:
    with pytest.raises(ConfigError, match="metric is missing"):
        ASHAScheduler().on_trial_add(RUNNER, trial(0))


def test_asha_decision_among_thousands_of_trials_costs_microseconds() -> None:
    scheduler = asha(max_t=4)
    values = random.Random(1)
    for one in added(scheduler, *range(5000)):
        report(scheduler, one, 1, values.random())
    costs = []
    for one in added(scheduler, *range(5000, 5500)):
        begin = time.perf_counter()
        report(scheduler, one, 1, values.random())
        costs.append(time.perf_counter() - begin)
    assert sorted(costs)[250] < 200e-6  # about 3e-6 on an idle machine; a scan takes over 300e-6


def test_asha_counts_a_resumed_trial_once_at_a_rung():
    scheduler = ASHAScheduler(max_t=100, grace_period=1, reduction_factor=4)
    scheduler.set_search_properties("loss", "min", seed=0)
    again = SimpleNamespace(
        trial_id="t0", number=0, last_result={"training_iteration": 5, "loss": 1.0}
    )
    scheduler.on_trial_add(None, again)
    assert scheduler.horizon(again) == (Condition("training_iteration", 16),)
    assert scheduler.on_trial_result(None, again, {"training_iteration": 6, "loss": 9}) == (
        scheduler.CONTINUE
    )
    assert [rung[1:] for rung in scheduler.get_state()["brackets"][0]] == [[{}]] * 4
