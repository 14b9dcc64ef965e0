"""Stoppers that end an experiment by what it spent, or what it reached."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunemq_scheduler.stopping.budget import (
    CostStopper,
    GPUHoursStopper,
    MaximumTrialsStopper,
    TargetStopper,
)
from tunemq_scheduler.stopping.stopper import CombinedStopper, NoopStopper, Stopper, make_stopping
from tunemq_shared.base.errors import ConfigError, SearchFailed
from tunemq_shared.protocol.result_conditions import Condition


def again(stopper: Stopper, make: Callable[[], Stopper]) -> Stopper:
    """A new stopper with the state of another, as after a restart."""
    restored = make()
    restored.set_state(json.loads(json.dumps(stopper.get_state())))
    assert restored.get_state() == stopper.get_state()
    return restored


def result(step: int, cost: Any) -> dict[str, Any]:
    return {"training_iteration": step, "cost": cost, "time_total_s": cost}


def test_maximum_of_trials_counts_each_trial_that_ended_once() -> None:
    stopper = MaximumTrialsStopper(2)
    assert not stopper("a", {"x": 1})
    assert stopper.horizon("a") == ()
    for _ in range(2):
        stopper.on_trial_complete("a", {})
    assert not stopper.stop_all()
    stopper.on_trial_complete("b", {"x": 1})
    assert again(stopper, lambda: MaximumTrialsStopper(2)).stop_all()
    stopper.on_trial_restart("a")
    assert not stopper.stop_all()


def test_growth_of_each_trials_cost_counts() -> None:
    stopper = CostStopper(10, "cost")
    assert not stopper("a", result(1, 4))
    assert not stopper("b", result(1, 3))
    assert not stopper("a", result(2, 6.5))
    assert not stopper.stop_all()
    assert not stopper("b", result(2, 3.5)), "it stops all trials together"
    assert stopper.stop_all()


def test_repeated_result_costs_nothing() -> None:
    stopper = CostStopper(10, "cost")
    for step, cost in ((1, 3), (2, 6), (1, 3), (2, 6), (2, 6)):
        stopper("a", result(step, cost))
    stopper.on_trial_complete("a", result(2, 6))
    assert not stopper.stop_all()
    assert stopper.get_state() == {"spent": 6.0, "last": {"a": [0, 2, 6.0]}}


def test_cost_that_begins_at_zero_again_counts_in_full() -> None:
    stopper = CostStopper(10, "cost")
    for step, cost in ((1, 3), (2, 6), (3, 1), (4, 3.5)):
        stopper("a", result(step, cost))
    assert stopper.get_state()["spent"] == 9.5  # type: ignore[index]


def test_last_result_of_a_trial_counts_and_a_restart_gives_nothing_back() -> None:
    stopper = CostStopper(10, "cost")
    stopper("a", result(1, 3))
    stopper.on_trial_complete("a", result(2, 6))
    stopper.on_trial_complete("b", {})
    stopper.on_trial_restart("a")
    assert not stopper.stop_all()
    stopper("a", result(1, 4))
    assert stopper.stop_all()


def test_cost_without_steps_and_with_nested_keys_counts() -> None:
    stopper = CostStopper(10, "bill/dollars")
    for dollars in (4, 4, 11):
        stopper("a", {"bill": {"dollars": dollars}})
    assert stopper.stop_all()


@pytest.mark.parametrize("cost", [None, math.nan, math.inf, -1, "free"])
def test_cost_that_is_never_a_number_fails_the_search_with_its_name(cost: Any) -> None:
    stopper = CostStopper(10, "cost")
    stopper("a", result(1, 3))
    stopper("a", result(2, cost))  # its next number makes up for it
    with pytest.raises(SearchFailed, match=r"CostStopper.*'cost': trial b reported"):
        stopper("b", result(1, cost))


def test_gpu_hours_are_the_trials_times_by_their_gpus() -> None:
    stopper = GPUHoursStopper(2, gpus_per_trial=0.5)
    stopper("a", result(1, 2 * 3600))
    stopper("b", result(1, 1.9 * 3600))
    assert not stopper.stop_all()
    stopper("b", result(2, 2 * 3600))
    assert again(stopper, lambda: GPUHoursStopper(2, 0.5)).stop_all()


STORY = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["report", "report", "report", "repeat", "reset", "restart", "end"]),
        st.integers(0, 20),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(STORY)
def test_spent_is_the_sum_of_what_each_trial_counted_up_to(
    story: list[tuple[int, str, int]],
) -> None:
    stopper: Stopper = CostStopper(10_000, "cost")
    told: dict[str, list[dict[str, Any]]] = {}
    #: What each trial counted up to, each time that it began at 0.
    counts: dict[str, list[int]] = {}
    for number, what, amount in story:
        name = f"t{number}"
        results, mine = told.setdefault(name, []), counts.setdefault(name, [0])
        if what == "repeat" and results:
            stopper(name, results[amount % len(results)])
        elif what == "end":
            stopper.on_trial_complete(name, results[-1] if results else {})
            stopper = again(stopper, lambda: CostStopper(10_000, "cost"))
        elif what == "restart":
            stopper.on_trial_restart(name)
            told[name] = []
            mine.append(0)
        else:
            if what == "reset" and mine[-1]:
                mine.append(amount % mine[-1])
            else:
                mine[-1] += amount
            results.append(result(len(results) + 1, mine[-1]))
            stopper(name, results[-1])
    assert stopper.get_state()["spent"] == sum(map(sum, counts.values()))  # type: ignore[index]


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_target_ends_the_experiment_when_a_trial_reaches_it(mode: str, sign: int) -> None:
    stopper = TargetStopper("score", sign * 5.0, mode)
    assert not stopper("a", {"score": sign * 4.9})
    assert not stopper("b", {"score": math.nan})
    assert not stopper("b", {})
    assert not stopper.stop_all()
    assert stopper("b", {"score": sign * 5})
    assert again(stopper, lambda: TargetStopper("score", sign * 5.0, mode)).stop_all()
    stopper.on_trial_restart("a")
    assert stopper.stop_all()
    stopper.on_trial_restart("b")
    assert not stopper.stop_all()
    stopper.on_trial_complete("c", {"score": sign * 6})
    assert stopper.stop_all(), "it ended by itself with this result"


def test_trial_runs_ahead_to_a_target_that_is_a_lower_bound() -> None:
    class Mine(TargetStopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return super().__call__(trial_id, result)

    assert TargetStopper("score", 5, "max").horizon("a") == (Condition("score", 5),)
    assert TargetStopper("score", 5, "min").horizon("a") is None
    assert Mine("score", 5, "max").horizon("a") is None


def test_combined_stopper_shows_all_its_stoppers_the_end_of_a_trial() -> None:
    parts = [MaximumTrialsStopper(2), CostStopper(5, "cost"), TargetStopper("score", 1, "max")]
    stopper = CombinedStopper(NoopStopper(), *parts)
    stopper.on_trial_complete("a", {"score": 2, **result(1, 9)})
    assert [one.stop_all() for one in parts] == [False, True, True]
    restored = again(
        stopper,
        lambda: CombinedStopper(
            NoopStopper(),
            MaximumTrialsStopper(2),
            CostStopper(5, "cost"),
            TargetStopper("score", 1, "max"),
        ),
    )
    assert restored.stop_all()
    conditions, found = make_stopping([*parts, {"epoch": 3}])
    assert conditions == (Condition("epoch", 3),)
    assert isinstance(found, CombinedStopper)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MaximumTrialsStopper(0), r"max_num_trials_finished=0\) is invalid"),
        (lambda: CostStopper(0, "cost"), r"CostStopper\(max_cost\) is 0"),
        (lambda: CostStopper(math.inf, "cost"), "max_cost=inf.*finite"),
        (lambda: CostStopper(3, ""), "cost_attr=''"),
        (lambda: GPUHoursStopper("2"), r"GPUHoursStopper\(max_gpu_hours\) is '2'"),
        (lambda: GPUHoursStopper(2, 0), r"gpus_per_trial\) is 0"),
        (lambda: TargetStopper(None, 1, "min"), "metric=None"),
        (lambda: TargetStopper("a", math.nan, "min"), "target=nan"),
        (lambda: TargetStopper("a", 1, "best"), "mode='best'"),
    ],
)
def test_invalid_budget_is_rejected_with_its_name(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_budget_counts_nothing_of_the_state_that_a_trial_took_over() -> None:
    stopper = CostStopper(100, cost_attr="cost")
    for lineage, step, cost in ((0, 1, 10.0), (0, 2, 20.0), (1, 2, 60.0), (1, 3, 65.0)):
        stopper("a", {"lineage": lineage, "training_iteration": step, "cost": cost})
    assert stopper.get_state() == {"spent": 25.0, "last": {"a": [1, 3, 65.0]}}
