"""Priorities and fair shares: which experiments come first, and which are preempted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.shared_farm import Job, SharedFarm, SharingExperiment, node
from tunemq_scheduler.core.shared_amounts import OfferUsage, SlotDemand
from tunemq_scheduler.farm.allocation.members import FairShareSettings, ShareAccount, share_out

ONE = {"cpu": 1.0, "gpu": 1.0}
FOUR = {"cpu": 4.0, "gpu": 4.0}
HOUR = 3600.0


def trials(
    length: float, request: dict[str, float] = ONE, count: int = 9999
) -> itertools.repeat[Job]:
    return itertools.repeat((request, length), count)


def a_farm(gpus: int = 4, nodes: int = 1, **settings: object) -> SharedFarm:
    farm = SharedFarm(5, FairShareSettings(**settings))  # type: ignore[arg-type]
    for place in range(nodes):
        farm.join(node(f"n{place}", gpus, 32.0))
    return farm


def has(farm: SharedFarm) -> dict[str, float]:
    return {name: one.gpus() for name, one in farm.experiments.items()}


# --- priorities -----------------------------------------------------------------------------------


def test_higher_priority_gets_all_its_requests_first() -> None:
    farm = a_farm()
    farm.submit(SharingExperiment("low", "ada", trials(HOUR)))
    farm.submit(SharingExperiment("high", "ada", trials(HOUR, count=3), priority=1))
    farm.run(30.0)
    assert has(farm) == {"low": 1, "high": 3}


def test_waiting_higher_priority_preempts_lower_ones_at_once() -> None:
    farm = a_farm(preempt_grace_s=33.0)
    farm.submit(SharingExperiment("low", "ada", trials(HOUR)))
    farm.run(400.0)
    farm.allocator.experiment_added("high", "bob", 1, 9)
    farm.allocator.usage("high", OfferUsage({}, {}, (SlotDemand(ONE, 2),)))
    [(name, offer)] = farm.allocator.offers()
    assert (name, offer.resources["gpu"], offer.preempt_grace_s) == ("low", 2.0, 33.0)


def test_trials_that_began_last_are_preempted() -> None:
    farm = a_farm()
    early = farm.submit(SharingExperiment("early", "ada", trials(HOUR, count=2)))
    farm.run(300.0)
    late = farm.submit(SharingExperiment("late", "ada", trials(HOUR, count=2)))
    farm.run(600.0)
    farm.submit(SharingExperiment("high", "bob", trials(HOUR, count=2), priority=1))
    farm.run(700.0)
    assert (early.preempted, late.preempted) == (0, 2)
    assert has(farm) == {"early": 2, "late": 0, "high": 2}


def test_no_trial_is_preempted_for_a_request_that_would_still_not_fit() -> None:
    farm = a_farm(nodes=2)
    farm.submit(SharingExperiment("low", "ada", trials(9 * HOUR, count=4)))
    farm.submit(SharingExperiment("high", "bob", trials(9 * HOUR, count=4), priority=1))
    farm.run(60.0)
    farm.submit(SharingExperiment("big", "bob", trials(HOUR, {"cpu": 1.0, "gpu": 8.0}), priority=2))
    farm.run(HOUR)
    assert has(farm) == {"low": 4, "high": 4, "big": 0}
    assert not farm.preempted


def test_without_preemption_a_higher_priority_gets_slots_as_trials_end() -> None:
    farm = a_farm(preempts=False)
    farm.submit(SharingExperiment("low", "ada", trials(600.0)))
    farm.run(60.0)
    farm.submit(SharingExperiment("high", "bob", trials(HOUR, count=2), priority=1))
    farm.run(500.0)
    assert has(farm) == {"low": 4, "high": 0}
    farm.run(700.0)
    assert has(farm) == {"low": 2, "high": 2}
    assert not farm.preempted


def test_preempted_experiment_gets_its_slots_back() -> None:
    farm = a_farm()
    farm.submit(SharingExperiment("low", "ada", trials(HOUR)))
    farm.run(60.0)
    farm.submit(SharingExperiment("high", "bob", trials(300.0, count=4), priority=1))
    farm.run(120.0)
    assert has(farm) == {"low": 0, "high": 4}
    farm.run(600.0)
    assert has(farm) == {"low": 4}


# --- shares ---------------------------------------------------------------------------------------


def test_resources_that_one_cannot_use_go_to_the_others_by_weight() -> None:
    accounts = [ShareAccount(1.0), ShareAccount(2.0), ShareAccount(1.0)]
    for account, held, demand in zip(accounts, (8.0, 0.0, 0.0), (99.0, 99.0, 1.0), strict=True):
        account.held, account.demand = held, demand
    share_out(accounts)
    assert [round(one.entitled, 3) for one in accounts] == [2.333, 4.667, 1.0]


def test_owners_that_come_at_once_share_by_weight() -> None:
    farm = a_farm(gpus=8, shares={"ada": 3.0})
    for owner in ("ada", "bob"):
        farm.submit(SharingExperiment(owner, owner, trials(HOUR)))
    farm.run(60.0)
    assert has(farm) == {"ada": 6, "bob": 2}


def test_without_gpus_the_dominant_resource_counts() -> None:
    farm = SharedFarm(5)
    farm.join(node("one", 0, 12.0, memory=12.0))
    farm.submit(SharingExperiment("cpus", "ada", trials(HOUR, {"cpu": 2.0, "memory": 0.5})))
    farm.submit(SharingExperiment("memory", "bob", trials(HOUR, {"cpu": 0.5, "memory": 2.0})))
    farm.run(60.0)
    running = {name: len(one.running) for name, one in farm.experiments.items()}
    assert running == {"cpus": 5, "memory": 4}  # 10/12 of the CPUs, 8/12 of the memory


def test_new_owner_gets_its_share_as_trials_end_without_preemption() -> None:
    farm = a_farm(gpus=8)
    farm.submit(SharingExperiment("a", "ada", trials(120.0)))
    farm.run(HOUR)
    farm.submit(SharingExperiment("b", "bob", trials(120.0)))
    farm.run(HOUR + 600.0)
    assert has(farm) == {"a": 4, "b": 4}
    assert not farm.preempted


def test_new_owner_gets_its_share_within_minutes_where_trials_are_long() -> None:
    farm = a_farm(gpus=8)
    farm.submit(SharingExperiment("a", "ada", trials(9 * HOUR)))
    farm.run(HOUR)
    farm.submit(SharingExperiment("b", "bob", trials(9 * HOUR)))
    farm.run(HOUR + 900.0)
    assert has(farm) == {"a": 4, "b": 4}
    farm.run(5 * HOUR)
    assert farm.preempted == {"ada": 4}  # and no more: slots do not move back and forth


def test_three_owners_of_four_gpus_take_turns_with_the_fourth() -> None:
    farm = a_farm()
    for owner in ("ada", "bob", "eve"):
        farm.submit(SharingExperiment(owner, owner, trials(9 * HOUR)))
    hours = dict.fromkeys(("ada", "bob", "eve"), 0.0)
    while farm.now < 12 * HOUR:
        farm.run(farm.now + 60.0, every=20.0)
        for owner in hours:
            hours[owner] += farm.held(owner) / 60.0
    assert max(hours.values()) < 1.05 * min(hours.values())
    assert 6 < sum(farm.preempted.values()) < 12 * 6


def test_trials_without_checkpoints_of_two_owners_end_although_they_share_a_slot() -> None:
    farm = a_farm(gpus=1)
    for owner in ("ada", "ben"):
        farm.submit(SharingExperiment(owner, owner, trials(HOUR, count=3), saves=False))
    farm.run(24 * HOUR)
    assert farm.experiments == {}


def farm_in_a_long_grace() -> tuple[SharedFarm, SharingExperiment]:
    """A farm of two owners, and the search of the one whose trial has much time to save."""
    farm = a_farm(gpus=1)
    both = [SharingExperiment(one, one, trials(200 * HOUR), saves=False) for one in ("ada", "ben")]
    for one in both:
        farm.submit(one)
    for _ in range(2000):
        farm.run(farm.now + 60.0)
        for one in both:
            if one.running and (one.grace.get("n0") or 0.0) >= 1000.0:
                return farm, one
    raise AssertionError


def test_higher_priority_does_not_wait_for_the_long_grace_of_trials_that_never_save() -> None:
    farm, _ = farm_in_a_long_grace()
    high = farm.submit(SharingExperiment("high", "eve", trials(HOUR, count=1), priority=1))
    farm.run(farm.now + 180.0)
    assert high.running


def test_drained_node_does_not_wait_for_the_long_grace_of_trials_that_never_save() -> None:
    farm, owner = farm_in_a_long_grace()
    farm.allocator.node_drained("n0", 60.0)
    farm.run(farm.now + 180.0)
    assert not owner.running


def test_experiments_of_an_owner_have_equal_shares_as_far_as_slots_divide() -> None:
    farm = a_farm()
    for name in ("first", "second", "third"):
        farm.submit(SharingExperiment(name, "ada", trials(300.0)))
    farm.run(1200.0)
    assert sorted(has(farm).values()) == [1, 1, 2]


def test_owners_second_experiment_gets_half_as_trials_of_the_first_end() -> None:
    farm = a_farm()
    farm.submit(SharingExperiment("first", "ada", trials(300.0)))
    farm.run(60.0)
    farm.submit(SharingExperiment("second", "ada", trials(300.0)))
    farm.run(1200.0)
    assert has(farm) == {"first": 2, "second": 2}
    assert not farm.preempted


def test_first_of_an_owners_experiments_with_equal_shares_comes_first() -> None:
    farm = a_farm(gpus=1)
    for name in ("first", "second", "third"):
        farm.submit(SharingExperiment(name, "ada", trials(300.0, count=1)))
        farm.run(farm.now + 5.0)
    assert has(farm) == {"first": 1, "second": 0, "third": 0}
    farm.run(400.0)
    assert has(farm) == {"second": 1, "third": 0}


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parity(61)
def test_large_request_is_not_passed_over_for_ever() -> None:
    farm = a_farm(nodes=2)
    farm.submit(SharingExperiment("small", "ada", trials(200.0)))
    farm.run(60.0)
    farm.submit(SharingExperiment("large", "ada", trials(HOUR, FOUR, count=1)))
    farm.run(2 * HOUR)
    assert "large" not in farm.experiments or has(farm)["large"] == 4
    assert not farm.preempted


def test_large_request_of_an_owner_below_its_share_gets_a_whole_node() -> None:
    farm = a_farm(nodes=2)
    farm.submit(SharingExperiment("small", "ada", trials(9 * HOUR)))
    farm.run(HOUR)
    farm.submit(SharingExperiment("large", "bob", trials(HOUR, FOUR)))
    farm.run(HOUR + 900.0)
    assert has(farm) == {"small": 4, "large": 4}


# --- experiments that end while slots of theirs are cleared for others ----------------------------


def farm_that_clears_a_node_for_large(nodes: int = 1) -> SharedFarm:
    """Trials of two searches have to end before one of a third, which needs a whole node."""
    farm = a_farm(nodes=nodes)
    for name in ("one", "two"):
        farm.submit(SharingExperiment(name, "ada", trials(9 * HOUR, count=2 * nodes)))
    farm.run(60.0)
    farm.submit(SharingExperiment("large", "bob", trials(HOUR, FOUR, count=1)))
    while not any(one.reserved_for for one in farm.allocator.explainer.snapshot()):
        farm.run(farm.now + 60.0)
        assert farm.now < 24 * HOUR
    return farm


def explain(farm: SharedFarm) -> list[str]:
    """Return all that people may ask about the farm at this moment."""
    explainer = farm.allocator.explainer
    explainer.snapshot(), explainer.accounts(), explainer.waiting()
    requests = (ONE, FOUR)
    return [
        line for name in farm.experiments for one in requests for line in explainer.why(name, one)
    ]


def test_search_that_gave_slots_to_another_may_end_before_the_others_have_left() -> None:
    farm = farm_that_clears_a_node_for_large()
    farm.remove("one")
    farm.run(farm.now + HOUR)
    assert has(farm) == {"two": 0, "large": 4}


def test_search_that_gave_slots_and_begins_again_gets_no_offer_of_before() -> None:
    farm = farm_that_clears_a_node_for_large()
    farm.remove("one")
    farm.submit(SharingExperiment("one", "ada", trials(9 * HOUR, count=2)))
    farm.remove("large")
    farm.run(farm.now + 60.0)
    farm.check()
    assert has(farm) == {"two": 2, "one": 2}


def test_why_is_answered_at_the_moment_a_node_is_gone_that_was_cleared_for_a_search() -> None:
    farm = farm_that_clears_a_node_for_large(nodes=2)
    assert any("is being cleared for it, once one, two" in line for line in explain(farm))
    for one in farm.allocator.explainer.snapshot():
        if one.reserved_for:
            farm.lose(one.node)
    assert not any("is being cleared" in line for line in explain(farm))


_NAMES = st.sampled_from("abcd")
_ACTIONS = st.one_of(
    st.tuples(
        st.just("begin"),
        _NAMES,
        st.sampled_from(["ada", "bob"]),
        st.integers(0, 2),
        st.sampled_from([ONE, {"cpu": 1.0, "gpu": 2.0}, FOUR]),
        st.sampled_from([600.0, 9 * HOUR]),
    ),
    st.tuples(st.just("end"), _NAMES),
    st.tuples(st.just("join")),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 300.0, 1800.0])),
)


@settings(max_examples=60, deadline=None)
@given(preempts=st.booleans(), actions=st.lists(_ACTIONS, max_size=30))
def test_searches_and_nodes_come_and_go_in_any_order(preempts: bool, actions: list[Any]) -> None:
    """A search that ends and begins again may have another priority, as `tunemq submit` sets it."""
    farm = a_farm(preempts=preempts, quotas={"bob": {"gpu": 5.0}})
    numbers = itertools.count(1)
    for kind, *about in actions:
        nodes = sorted(farm.nodes)
        if kind == "begin" and about[0] not in farm.experiments:
            name, owner, priority, request, length = about
            farm.submit(SharingExperiment(name, owner, trials(length, request, 5), priority))
        elif kind == "end" and about[0] in farm.experiments:
            farm.remove(about[0])
        elif kind == "join":
            farm.join(node(f"n{next(numbers)}", 4, 32.0))
        elif kind == "lose" and nodes:
            farm.lose(nodes[about[0] % len(nodes)])
        elif kind == "wait":
            farm.run(farm.now + about[0], every=60.0)
        explain(farm)
        farm.step()
        farm.check()
        explain(farm)
