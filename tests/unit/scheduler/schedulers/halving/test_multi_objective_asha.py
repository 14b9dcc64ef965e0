"""ASHA for several metrics, beside non-dominated sorting written from the paper."""

from __future__ import annotations

import json
import math
import random
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    MOPriority,
    MultiObjectiveASHA,
    NonDominatedPriority,
    create_scheduler,
)
from tunemq_scheduler.schedulers.halving import recent_points
from tunemq_shared.base.errors import ConfigError, SearchFailed
from tunemq_shared.protocol.result_conditions import Condition

RUNNER: Any = None
NAMES = ["a", "b", "c"]


def trial(number: int) -> Any:
    return SimpleNamespace(trial_id=f"t{number}", number=number, last_result={})


def moasha(**options: Any) -> MultiObjectiveASHA:
    scheduler = MultiObjectiveASHA(**{"metrics": ["a", "b"], "mode": "min", **options})
    scheduler.set_search_properties(None, None, seed=0)
    return scheduler


def added(scheduler: MultiObjectiveASHA, *numbers: int) -> list[Any]:
    trials = [trial(number) for number in numbers]
    for one in trials:
        scheduler.on_trial_add(RUNNER, one)
    return trials


def report(scheduler: MultiObjectiveASHA, one: Any, step: float, *values: float) -> Any:
    result = {"training_iteration": step, **dict(zip(NAMES, values, strict=False))}
    return scheduler.on_trial_result(RUNNER, one, result)


class Paper:
    """Non-dominated sorting with an epsilon-net in each front; smaller is better."""

    def __init__(self, points: list[tuple[float, ...]], dim: int) -> None:
        self.points, self.dim = points, dim
        self.order: list[int] = []
        rest = list(range(len(points)))
        while rest:
            front = [one for one in rest if not any(self._dominates(other, one) for other in rest)]
            self.order += self._net(front)
            rest = [one for one in rest if one not in front]

    def _dominates(self, one: int, other: int) -> bool:
        pairs = list(zip(self.points[one], self.points[other], strict=True))
        return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    def _net(self, front: list[int]) -> list[int]:
        best = min(self.points[one][self.dim] for one in front)
        net = [next(one for one in front if self.points[one][self.dim] == best)]
        while len(net) < len(front):
            rest = [one for one in front if one not in net]
            gaps = [min(math.dist(self.points[one], self.points[x]) for x in net) for one in rest]
            net.append(rest[gaps.index(max(gaps))])
        return net


POINTS = st.integers(1, 3).flatmap(
    lambda size: st.lists(
        st.tuples(*[st.one_of(st.integers(0, 4), st.floats(-9, 9))] * size), max_size=25
    )
)


@given(POINTS, st.integers(0, 2))
def test_priorities_are_the_places_of_non_dominated_sorting(
    points: list[tuple[float, ...]], dim: int
) -> None:
    dim %= len(points[0]) if points else 1
    places = list(NonDominatedPriority(dim)(points))
    assert [places.index(place) for place in range(len(points))] == Paper(points, dim).order


STORY = st.lists(
    st.tuples(
        st.integers(0, 14),
        *[st.one_of(st.integers(0, 5), st.floats(0, 5), st.just(math.nan))] * 3,
    ),
    max_size=120,
)


@given(STORY, st.sampled_from([2, 3, 4]), st.integers(2, 3), st.integers(2, 130), st.data())
def test_decisions_are_those_of_the_plain_rule(
    story: list[tuple[float, ...]], factor: int, size: int, most: int, data: st.DataObject
) -> None:
    modes = data.draw(st.lists(st.sampled_from(["min", "max"]), min_size=size, max_size=size))
    options: dict[str, Any] = {
        "metrics": NAMES[:size],
        "mode": modes,
        "max_t": 20,
        "reduction_factor": factor,
    }
    scheduler, trials = moasha(**options), {}
    milestones = [factor**power for power in range(5) if factor**power <= 20]
    rungs: dict[int, list[tuple[float, ...]]] = {one: [] for one in milestones}
    steps: dict[float, int] = dict.fromkeys(range(15), 0)
    with mock.patch.object(recent_points, "MOST_COMPARED", most):
        for number, *values in story:
            if number not in steps:
                continue
            if number not in trials:
                (trials[number],) = added(scheduler, int(number))
            steps[number] += 1
            step = steps[number]
            told = report(scheduler, trials[number], step, *values[:size])
            stops = step >= 20
            if step in rungs and not stops:
                signed = zip(modes, values, strict=False)
                point = tuple(value if mode == "min" else -value for mode, value in signed)
                if all(math.isfinite(value) for value in point):
                    rungs[step] = [*rungs[step], point][-most:]
                    count = len(rungs[step])
                    place = Paper(rungs[step], 0).order.index(count - 1)
                    stops = place >= math.ceil(count / factor)
                else:
                    stops = bool(rungs[step])
            assert (told == "STOP") == stops
            if stops:
                del steps[number]
            if step == 3:
                state = json.loads(json.dumps(scheduler.get_state()))
                scheduler = moasha(**options)
                scheduler.set_state(state)
                assert scheduler.get_state() == state


def test_trial_that_no_other_dominates_continues_far_from_the_others() -> None:
    scheduler = moasha(reduction_factor=2)
    trials = added(scheduler, *range(6))
    assert report(scheduler, trials[0], 1, 1.0, 9.0) == "CONTINUE"
    assert report(scheduler, trials[1], 1, 9.0, 1.0) == "STOP", "second in its front"
    assert report(scheduler, trials[2], 1, 8.0, 0.5) == "CONTINUE"
    verdict = report(scheduler, trials[3], 1, 9.0, 9.0)
    assert verdict == "STOP"
    assert verdict.reason == (
        "a 9, b 9 is not among the best 1/2 of 4 trials at rung 1 (3 are better)"
    )
    verdict = report(scheduler, trials[4], 1, math.inf, 0.0)
    assert verdict.reason == (
        "a inf, b 0 is not among the best 1/2 of 5 trials at rung 1 (a value is not finite)"
    )
    assert scheduler.debug_string().splitlines()[1] == (
        "Rungs 1: 4 trials | 2: 0 trials | 4: 0 trials | 8: 0 trials | 16: 0 trials "
        "| 32: 0 trials | 64: 0 trials"
    )


def test_horizon_is_the_next_rung_and_a_result_lacking_a_metric_asks_for_the_next() -> None:
    scheduler = moasha(grace_period=2, max_t=7)
    (one,) = added(scheduler, 0)
    assert scheduler.horizon(one) == (Condition("training_iteration", 2),)
    assert scheduler.on_trial_result(RUNNER, one, {"training_iteration": 2, "a": 1}) == "CONTINUE"
    assert scheduler.horizon(one) is None
    assert report(scheduler, one, 3, 1, 1) == "CONTINUE"
    assert scheduler.horizon(one) == (Condition("training_iteration", 6),)
    assert report(scheduler, one, 7, 1, 1) == "STOP"
    assert scheduler.horizon(one) == ()
    assert not isinstance(scheduler, ASHAScheduler)


def test_users_priority_gets_values_of_which_smaller_is_better() -> None:
    class SumOfBoth(MOPriority):
        def __call__(self, points: Any) -> list[float]:
            return [sum(point) for point in points]

    scheduler = moasha(mode=["min", "max"], reduction_factor=2, multiobjective_priority=SumOfBoth())
    first, second, third = added(scheduler, 0, 1, 2)
    assert report(scheduler, first, 1, 5.0, 1.0) == "CONTINUE"
    assert report(scheduler, second, 1, 5.0, 0.0) == "STOP"
    assert report(scheduler, third, 1, 5.0, 3.0) == "CONTINUE"


def test_priority_that_returns_too_few_fails_the_search_with_its_name() -> None:
    class Few(MOPriority):
        def __call__(self, points: Any) -> list[float]:
            return [0.0]

    scheduler = moasha(multiobjective_priority=Few())
    first, second = added(scheduler, 0, 1)
    report(scheduler, first, 1, 1, 1)
    with pytest.raises(SearchFailed, match="Few returned 1 priorities for 2 points"):
        report(scheduler, second, 1, 1, 1)


def test_restarted_trial_is_forgotten() -> None:
    scheduler, undisturbed = moasha(), moasha()
    first, second = added(scheduler, 0, 1)
    report(scheduler, first, 1, 0, 0)
    report(scheduler, second, 1, 5, 5)
    scheduler.on_trial_error(RUNNER, first)
    scheduler.on_trial_restart(RUNNER, first)
    (other,) = added(undisturbed, 1)
    report(undisturbed, other, 1, 5, 5)
    assert scheduler.get_state()["brackets"] == undisturbed.get_state()["brackets"]
    with pytest.raises(ConfigError, match="rungs"):
        moasha(max_t=9).set_state(scheduler.get_state())


def test_all_metrics_are_required_and_the_experiments_metric_may_be_another() -> None:
    scheduler = moasha(mode=["min", "max"])
    assert scheduler.metric == ("a", "b")
    assert scheduler.set_search_properties("weighted", "max")
    assert scheduler.set_search_properties("b", "max")
    assert scheduler.metric == ("a", "b")
    with pytest.raises(ConfigError, match=r"TuneConfig\(metric='b', mode='min'\).*is 'max'"):
        scheduler.set_search_properties("b", "min")


@pytest.mark.parametrize("size", [2, 5])
def test_decision_in_a_long_search_costs_as_much_as_in_one_with_few_trials(size: int) -> None:
    rng = random.Random(1)

    def costs(scheduler: MultiObjectiveASHA, numbers: range) -> list[float]:
        found = []
        for one in added(scheduler, *numbers):
            values = {name: rng.random() for name in "abcde"[:size]}
            begin = time.perf_counter()
            scheduler.on_trial_result(RUNNER, one, {"training_iteration": 1, **values})
            found.append(time.perf_counter() - begin)
        return found

    scheduler = moasha(metrics=list("abcde"[:size]))
    few = min(costs(scheduler, range(180))[150:])
    many = min(costs(scheduler, range(180, 500))[-50:])
    assert many < 3 * few, (few, many)
    assert many < 0.05  # 1 to 3 ms on an idle machine


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": []}, r"metrics=\[\]\): pass a list"),
        ({"metrics": "loss"}, "metrics='loss'"),
        ({"metrics": ["a", 3]}, r"metrics=\['a', 3\].*name of a reported value"),
        ({"metrics": ["a", "a"]}, "name each metric once"),
        ({"mode": None}, r"mode=None\): pass 'min' or 'max'"),
        ({"mode": ["min"]}, r"1 modes for 2 metrics"),
        ({"mode": ["min", "best"]}, "best"),
        ({"max_t": 0}, r"MultiObjectiveASHA\(max_t=0\)"),
        ({"grace_period": 9, "max_t": 3}, "must not be above max_t"),
        ({"reduction_factor": 1}, "reduction_factor=1.*above 1"),
        ({"brackets": 0}, "brackets=0"),
        ({"multiobjective_priority": "sum"}, "multiobjective_priority='sum'"),
        ({"multiobjective_priority": NonDominatedPriority(2)}, "dim=2.*from 0 to 1"),
        ({"multiobjective_priorities": None}, "did you mean multiobjective_priority"),
    ],
)
def test_invalid_option_is_refused_with_its_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create_scheduler("moasha", **{"metrics": ["a", "b"], "mode": "min", **options})


def test_name_alone_asks_for_metrics() -> None:
    with pytest.raises(ConfigError, match="pass a list of result keys"):
        create_scheduler("moasha")
    with pytest.raises(ConfigError, match="dim=-1"):
        NonDominatedPriority(-1)
