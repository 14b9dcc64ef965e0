"""The farm's offers to experiments, one rule at a time."""

from __future__ import annotations

import itertools

import pytest

from tests.simulation.allocator_books import check_books
from tests.simulation.shared_farm import Job, SharedFarm, SharingExperiment, node
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_shared.protocol.messages import NodeOffered

ONE = {"cpu": 1.0, "gpu": 1.0}


def an_allocator(*nodes: tuple[str, int], **settings: object) -> FairShareAllocator:
    allocator = FairShareAllocator(FairShareSettings(**settings))  # type: ignore[arg-type]
    allocator.advance(1.0)
    for name, gpus in nodes:
        allocator.node_joined(node(name, gpus))
    return allocator


def wants(
    count: int, request: dict[str, float] | None = None, preferred: str = "", *excluded: str
) -> OfferUsage:
    return OfferUsage({}, {}, (SlotDemand(request or ONE, count, preferred, excluded),))


def trials(
    count: int, length: float, request: dict[str, float] | None = None
) -> itertools.repeat[Job]:
    return itertools.repeat((request or ONE, length), count)


def gpus_of(offers: list[tuple[str, NodeOffered]], name: str) -> float:
    return sum(offer.resources.get("gpu", 0.0) for one, offer in offers if one == name)


# --- offers ---------------------------------------------------------------------------------------


def test_experiment_is_offered_requested_resources_on_requested_nodes() -> None:
    allocator = an_allocator(("one", 2), ("two", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(2, preferred="two"))
    [(name, offer)] = allocator.offers()
    assert (name, offer.instance_id, offer.n) == ("e", "two", 1)
    assert offer.resources == {"cpu": 2.0, "gpu": 2.0}
    assert offer.devices == {"two-0": 1.0, "two-1": 1.0}
    assert offer.preempt_grace_s is None
    assert allocator.offers() == []


def test_node_excluded_by_all_requests_is_not_offered() -> None:
    allocator = an_allocator(("one", 4), ("two", 1))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(3, None, "one", "one"))
    assert [offer.instance_id for _, offer in allocator.offers()] == ["two"]
    allocator.experiment_added("f", "bob")
    allocator.usage("f", wants(1, None, "", "two"))
    [(name, offer)] = allocator.offers()
    assert (name, offer.instance_id) == ("f", "one")


def test_slot_on_a_node_that_the_request_excludes_is_not_preempted() -> None:
    allocator = an_allocator(("one", 1), ("two", 1))
    for name, priority in (("low", 0), ("high", 1)):
        allocator.experiment_added(name, "ada", priority=priority)
    allocator.usage("low", wants(2))
    allocator.offers()
    held = {"one": _held("one-0"), "two": _held("two-0")}
    allocator.usage("low", OfferUsage({"one": 1, "two": 1}, held, ()))
    allocator.offers()
    allocator.usage("high", wants(2, None, "", "one"))
    assert [(name, one.instance_id) for name, one in allocator.offers()] == [("low", "two")]


def test_slot_on_a_newly_excluded_node_is_taken_back_and_replaced() -> None:
    allocator = an_allocator(("one", 1), ("two", 1))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1, None, "one"))
    allocator.offers()
    allocator.usage("e", OfferUsage({"one": 1}, {}, (SlotDemand(ONE, 1, "", ("one",)),)))
    offers = {offer.instance_id: offer.resources for _, offer in allocator.offers()}
    assert offers["one"].get("gpu", 0.0) == 0.0
    assert offers["two"]["gpu"] == 1.0


@pytest.mark.parametrize("then", ["lost", "offers"])
def test_search_that_ends_while_a_node_is_emptied_for_it_leaves_nothing_there(then: str) -> None:
    allocator = an_allocator(("one", 1))
    for name in ("runs", "suspect"):
        allocator.experiment_added(name, "ada")
    allocator.usage("runs", wants(1))
    allocator.offers()
    allocator.usage("runs", OfferUsage({"one": 1}, {"one": _held("one-0")}))
    allocator.usage("suspect", OfferUsage(wants=(SlotDemand(ONE, 1, is_alone=True),)))
    assert [name for name, _ in allocator.offers()] == ["runs"], "it is to leave the node"
    allocator.experiment_gone("suspect")
    check_books(allocator)
    if then == "lost":
        allocator.node_lost("one", is_dead=False)
    else:
        assert [name for name, _ in allocator.offers()] == ["runs"], "it may stay there"


def test_trial_that_never_reports_has_a_node_alone_for_half_an_hour_at_most() -> None:
    allocator = an_allocator(("one", 2))
    for name, owner in (("suspect", "ada"), ("other", "bob")):
        allocator.experiment_added(name, owner)
    allocator.usage("suspect", OfferUsage(wants=(SlotDemand(ONE, 1, is_alone=True),)))
    [(name, offer)] = allocator.offers()
    assert (name, offer.resources["gpu"]) == ("suspect", 2.0)
    held = {"one": _held("one-0")}
    for n in (1, 2):  # the rest of the node is withdrawn when its trial runs
        allocator.usage("suspect", OfferUsage({"one": n}, held, alone=("one",)))
        allocator.usage("other", wants(1))
        assert "other" not in dict(allocator.offers())
    assert "the node one runs a trial of suspect alone" in allocator.explainer.why("other", ONE)

    allocator.advance(1801.0)
    [(name, offer)] = allocator.offers()
    assert (name, offer.resources["gpu"]) == ("other", 1.0), "and the trial stays"
    allocator.usage("other", OfferUsage())
    allocator.usage("suspect", OfferUsage({"one": 2}, held, alone=("one",)))
    allocator.usage("other", wants(1))
    allocator.advance(3600.0)
    assert allocator.offers() != [], "its owner has a break"
    check_books(allocator)


def test_owner_of_several_searches_has_no_more_than_its_share_of_nodes_alone() -> None:
    allocator = an_allocator(("one", 1), ("two", 1))
    for name, owner in (("first", "ada"), ("second", "ada"), ("other", "bob")):
        allocator.experiment_added(name, owner)
        if owner == "ada":
            allocator.usage(name, OfferUsage(wants=(SlotDemand(ONE, 1, is_alone=True),)))
    allocator.usage("other", wants(1))
    assert sorted(name for name, _ in allocator.offers()) == ["first", "other"]


def test_node_excluded_by_one_trial_may_be_used_by_another() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", OfferUsage({}, {}, (SlotDemand(ONE, 1, "", ("one",)), SlotDemand(ONE, 1))))
    [(_, offer)] = allocator.offers()
    assert offer.instance_id == "one"


def test_waiting_reason_names_excluded_nodes_with_room() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1, None, "", "one"))
    assert allocator.offers() == []
    assert "only nodes that exclude it" in allocator.explainer.why("e", ONE)[0]


def test_offers_of_a_node_are_numbered_and_state_all_that_may_be_held() -> None:
    allocator = an_allocator(("one", 4))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    allocator.offers()
    allocator.usage("e", OfferUsage({"one": 1}, {"one": _held("one-0")}, (SlotDemand(ONE, 1),)))
    [(_, offer)] = allocator.offers()
    assert offer.n == 2
    assert offer.resources == {"cpu": 2.0, "gpu": 2.0}


def test_fractions_of_a_gpu_are_on_one_device() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(5, {"cpu": 1.0, "gpu": 0.4}))
    [(_, offer)] = allocator.offers()
    assert offer.devices == {"one-0": 0.8, "one-1": 0.8}


def test_resources_neither_held_nor_wanted_are_no_longer_offered() -> None:
    allocator = an_allocator(("one", 4))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(3))
    allocator.offers()
    allocator.usage("e", OfferUsage({"one": 1}, {"one": _held("one-0")}, ()))
    [(_, offer)] = allocator.offers()
    assert offer.devices == {"one-0": 1.0}


def test_released_resources_are_offered_to_another_after_confirmation() -> None:
    allocator = an_allocator(("one", 1))
    allocator.experiment_added("e", "ada")
    allocator.experiment_added("f", "ada", order=1)
    allocator.usage("e", wants(1))
    allocator.usage("f", wants(1))
    assert gpus_of(allocator.offers(), "e") == 1
    allocator.usage("e", OfferUsage({"one": 1}, {}, ()))
    [(name, offer)] = allocator.offers()
    assert (name, offer.n, offer.resources) == ("e", 2, {})
    allocator.usage("e", OfferUsage({"one": 1}, {}, (SlotDemand(ONE, 1),)))  # sent too early
    assert allocator.offers() == []
    allocator.usage("e", OfferUsage({"one": 2}, {}, ()))
    assert gpus_of(allocator.offers(), "f") == 1


def test_slot_for_a_larger_trial_that_a_smaller_one_took_is_split() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1, {"cpu": 2.0, "gpu": 2.0}))
    allocator.offers()
    allocator.usage("e", OfferUsage({"one": 1}, {"one": _held("one-1")}, ()))
    [(_, offer)] = allocator.offers()
    assert (offer.resources, offer.devices) == (ONE, {"one-1": 1.0})


def test_unused_resources_go_to_a_waiting_experiment() -> None:
    farm = SharedFarm(1)
    farm.join(node("one", 1))
    allocator = farm.allocator
    allocator.experiment_added("thinks", "ada")
    allocator.usage("thinks", wants(1))
    allocator.offers()
    farm.submit(SharingExperiment("waits", "ada", trials(1, 500.0)))
    allocator.usage("thinks", OfferUsage({"one": 1}, {}, (SlotDemand(ONE, 1),)))
    farm.run(20.0)
    assert not farm.experiments["waits"].running
    farm.run(60.0)
    allocator.usage("thinks", OfferUsage({"one": 2}, {}, (SlotDemand(ONE, 1),)))
    farm.run(80.0)
    assert farm.experiments["waits"].running


# --- nodes and experiments that join and leave ----------------------------------------------------


def test_lost_node_is_not_offered_and_its_offers_are_repeated_when_it_returns() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    allocator.offers()
    allocator.node_lost("one")
    allocator.usage("e", OfferUsage({}, {}, (SlotDemand(ONE, 1),)))
    assert allocator.offers() == []
    allocator.node_returned("one")
    [(_, offer)] = allocator.offers()
    assert (offer.n, offer.devices) == (2, {"one-0": 1.0})


def test_dead_node_is_forgotten() -> None:
    allocator = an_allocator(("one", 1))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    allocator.offers()
    allocator.node_lost("one", is_dead=True)
    assert allocator.explainer.snapshot() == []
    allocator.node_joined(node("two", 1))
    allocator.usage("e", wants(1))
    assert gpus_of(allocator.offers(), "e") == 1


@pytest.mark.parametrize("grace_s", [None, 5.0])
def test_drained_nodes_offers_shrink_to_nothing(grace_s: float | None) -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    allocator.offers()
    allocator.usage("e", OfferUsage({"one": 1}, {"one": _held("one-0")}, (SlotDemand(ONE, 9),)))
    allocator.node_drained("one", grace_s)
    [(_, offer)] = allocator.offers()
    assert (offer.resources, offer.preempt_grace_s) == ({}, grace_s)
    allocator.usage("e", OfferUsage({"one": offer.n}, {}, (SlotDemand(ONE, 9),)))
    assert allocator.offers() == []
    allocator.node_resumed("one")
    assert gpus_of(allocator.offers(), "e") == 2


def test_paused_experiment_has_nothing_until_it_is_resumed() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(2))
    allocator.offers()
    allocator.experiment_paused("e", 30.0)
    [(_, offer)] = allocator.offers()
    assert (offer.resources, offer.preempt_grace_s) == ({}, 30.0)
    allocator.usage("e", OfferUsage({"one": 2}, {}, (SlotDemand(ONE, 2),)))
    assert allocator.offers() == []
    allocator.experiment_resumed("e")
    assert gpus_of(allocator.offers(), "e") == 2


def test_resources_of_a_removed_experiment_are_free() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.experiment_added("f", "ada", order=1)
    allocator.usage("e", wants(2))
    allocator.usage("f", wants(2))
    allocator.offers()
    allocator.experiment_gone("e")
    assert gpus_of(allocator.offers(), "f") == 2


def test_restarted_experiment_is_told_its_offers_again() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    [(_, before)] = allocator.offers()
    allocator.experiment_restarted("e")
    [(_, after)] = allocator.offers()
    assert (after.n, after.resources) == (before.n + 1, before.resources)


def test_restarted_allocator_offers_nothing_before_all_experiments_report() -> None:
    allocator = an_allocator(("one", 2))
    for order, name in enumerate(("old", "gone", "new")):
        allocator.experiment_added(name, "ada", order=order)
    allocator.expect("old")
    allocator.expect("gone", "submit gone again")
    allocator.usage("new", wants(2))
    assert allocator.offers() == []
    first, *hints = allocator.explainer.why("new", ONE)
    assert "has restarted" in first
    assert hints == ["submit gone again"]
    allocator.usage("old", OfferUsage({"one": 7}, {"one": _held("one-1")}, ()))
    [(name, offer)] = allocator.offers()  # exactly what it holds
    assert (name, offer.n, offer.devices) == ("old", 8, {"one-1": 1.0})
    allocator.experiment_gone("gone")
    assert allocator.offers() == []  # it may hold more, by an offer that is unknown here
    allocator.usage("old", OfferUsage({"one": 8}, {"one": _held("one-1")}, ()))
    [(name, offer)] = allocator.offers()
    assert (name, offer.devices) == ("new", {"one-0": 1.0})


def test_offers_of_a_node_that_returns_after_a_restart_are_newer_than_those_before() -> None:
    allocator = an_allocator()
    allocator.experiment_added("e", "ada")
    allocator.expect("e")
    allocator.usage("e", wants(1))  # the node is away, and the experiment does not mention it
    allocator.offers()
    allocator.node_joined(node("one", 2))
    allocator.usage("e", OfferUsage({"one": 7}, {}, (SlotDemand(ONE, 1),)))
    [(_, offer)] = allocator.offers()
    assert offer.n == 8, "it ignores offers older than the one that it knows"
    allocator.usage("e", OfferUsage({"one": 8}, {}, (SlotDemand(ONE, 1),)))
    [(_, offer)] = allocator.offers()
    assert (offer.n, offer.resources["gpu"]) == (9, 1.0)


def test_trial_that_excludes_all_offered_nodes_is_offered_another() -> None:
    allocator = an_allocator(("one", 2), ("two", 4))
    allocator.experiment_added("e", "ada")
    both = (SlotDemand(ONE, 1, "", ("one",)), SlotDemand(ONE, 1))
    allocator.usage("e", OfferUsage({}, {}, both))
    assert [offer.instance_id for _, offer in allocator.offers()] == ["one"]
    allocator.usage("e", OfferUsage({"one": 1}, {}, both))
    allocator.advance(60.0)
    assert "two" in [offer.instance_id for _, offer in allocator.offers()]


def test_waiting_reason_of_a_trial_with_an_offered_slot_names_the_experiment() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    assert "offered next" in allocator.explainer.why("e", ONE)[0]
    allocator.offers()
    allocator.usage("e", OfferUsage({"one": 1}, {}, (SlotDemand(ONE, 1),)))
    assert "to e, which has started no trial in it" in allocator.explainer.why("e", ONE)[0]


def test_node_that_joins_after_the_experiments_reported_is_not_given_twice() -> None:
    allocator = an_allocator()
    allocator.experiment_added("old", "ada")
    allocator.experiment_added("new", "ada", order=1)
    allocator.expect("old")
    allocator.usage("old", OfferUsage({"one": 3}, {"one": _held("one-0")}, ()))
    allocator.usage("new", wants(2))
    allocator.node_joined(node("one", 2))
    [(name, offer)] = allocator.offers()
    assert (name, offer.n) == ("old", 4)
    allocator.usage("old", OfferUsage({"one": 4}, {"one": _held("one-0")}, ()))
    assert gpus_of(allocator.offers(), "new") == 1


def test_experiment_taken_over_has_its_nodes_in_the_order_of_its_report() -> None:
    """The order of a set differs between processes, and preemption depends on the order."""
    names = [f"n{place}" for place in range(8)]
    allocator = an_allocator(*((name, 1) for name in names))
    allocator.experiment_added("e", "ada")
    allocator.expect("e")
    held = {name: _held(f"{name}-0") for name in names}
    allocator.usage("e", OfferUsage(dict.fromkeys(names, 1), held, ()))
    assert [offer.instance_id for _, offer in allocator.offers()] == names


def test_requests_wait_in_the_order_of_their_arrival() -> None:
    allocator = an_allocator(("one", 1))
    allocator.experiment_added("e", "ada")
    requests = [{"cpu": float(cpus), "gpu": 1.0} for cpus in range(1, 9)]
    allocator.usage("e", OfferUsage({}, {}, tuple(SlotDemand(request, 1) for request in requests)))
    assert [dict(request) for request in allocator._members.waiting] == requests


# --- quotas ---------------------------------------------------------------------------------------


def test_owner_never_holds_more_than_its_quota() -> None:
    allocator = an_allocator(("one", 8), quotas={"ada": {"gpu": 3.0}})
    for name in ("e", "f"):
        allocator.experiment_added(name, "ada", order=ord(name))
        allocator.usage(name, wants(5))
    offers = allocator.offers()
    assert gpus_of(offers, "e") + gpus_of(offers, "f") == 3
    assert "the quota of ada is gpu=3, of which 3 is used" in allocator.explainer.why("f", ONE)


def test_higher_priority_of_an_owner_at_its_quota_preempts_the_owners_lower_one() -> None:
    farm = SharedFarm(1, FairShareSettings(quotas={"ada": {"gpu": 2.0}}))
    farm.join(node("one", 4))
    farm.submit(SharingExperiment("low", "ada", trials(9, 9000.0)))
    farm.submit(SharingExperiment("other", "bob", trials(2, 9000.0)))
    farm.run(30.0)
    farm.submit(SharingExperiment("high", "ada", trials(1, 9000.0), priority=1))
    farm.run(100.0)
    assert [farm.experiments[one].gpus() for one in ("low", "other", "high")] == [1, 2, 1]


# --- explanations ---------------------------------------------------------------------------------


def test_waiting_reason_names_the_resource_and_the_available_amount() -> None:
    allocator = an_allocator(("one", 2), ("two", 1))
    allocator.experiment_added("e", "ada")
    allocator.experiment_added("f", "bob", priority=3)
    allocator.usage("e", wants(9))
    allocator.offers()
    assert "gpu=4; the most on any node is 2" in allocator.explainer.why("e", {"gpu": 4.0})[0]
    assert any("gpu=1" in reason for reason in allocator.explainer.why("e", ONE))
    allocator.usage("f", wants(1, {"cpu": 1.0, "gpu": 2.0}))
    allocator.offers()
    said = allocator.explainer.why("e", ONE)
    assert any("is reserved for f, once e has freed it" in reason for reason in said)
    assert any(
        "being cleared for it" in one
        for one in allocator.explainer.why("f", {"cpu": 1.0, "gpu": 2.0})
    )
    assert "has no experiment 'g'" in allocator.explainer.why("g", ONE)[0]


def test_waiting_reason_names_drained_nodes() -> None:
    allocator = an_allocator(("one", 2), ("two", 2), ("small", 0))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    for name in ("one", "two"):
        allocator.node_drained(name)
    drained = "2 of 3 nodes are drained (one, two); tunemq nodes resume NAME lets one run trials"
    assert drained in " ".join(allocator.explainer.why("e", ONE))
    for name in ("one", "two"):
        allocator.node_resumed(name)
    assert "drained" not in " ".join(allocator.explainer.why("e", ONE))


def test_snapshot_names_the_holder_of_each_resource() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    allocator.offers()
    [row] = allocator.explainer.snapshot()
    assert (row.node, row.state, row.reserved_for) == ("one", "ready", ())
    assert row.total.devices == {"one-0": 1.0, "one-1": 1.0}
    assert row.free.devices == {"one-1": 1.0}
    assert row.held == {"e": _held("one-0")}


def _held(*devices: str) -> ResourceAmounts:
    number = float(len(devices))
    return ResourceAmounts({"cpu": number, "gpu": number}, dict.fromkeys(devices, 1.0))


# --- waiting requests -----------------------------------------------------------------------------


def test_waiting_requests_are_counted_by_resources_even_without_nodes() -> None:
    allocator = an_allocator()
    for name, request in {
        "cpus": {"cpu": 1.0, "memory": 1e9},
        "part": {"cpu": 1.0, "gpu": 0.5, "licence": 1.0},
        "bytes": {"gpu_memory": 8e9},
        "model": {"accelerator_type:A100": 1.0},
    }.items():
        allocator.experiment_added(name, "ada")
        allocator.usage(name, wants(3, request))
    allocator.experiment_added("endless", "ada")
    allocator.usage("endless", wants(1_000_000))
    assert allocator.explainer.waiting() == {
        "cpus": {"cpu": 3, "gpu": 0},
        "part": {"cpu": 0, "gpu": 3, "licence": 3},
        "bytes": {"cpu": 0, "gpu": 3},
        "model": {"cpu": 0, "gpu": 3, "accelerator_type:A100": 3},
        "endless": {"cpu": 0, "gpu": 10_000},
    }


def test_offered_requests_and_paused_experiments_do_not_wait() -> None:
    allocator = an_allocator(("one", 2))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(5))
    allocator.offers()
    assert allocator.explainer.waiting() == {"e": {"cpu": 0, "gpu": 3}}
    allocator.experiment_paused("e")
    assert allocator.explainer.waiting() == {"e": {"cpu": 0, "gpu": 0}}
    allocator.experiment_gone("e")
    assert allocator.explainer.waiting() == {}


def test_request_held_up_only_by_a_quota_does_not_wait() -> None:
    allocator = an_allocator(("one", 2), quotas={"ada": {"gpu": 4.0}})
    for name, owner, priority in (("low", "ada", 0), ("high", "ada", 1), ("other", "bob", -1)):
        allocator.experiment_added(name, owner, priority=priority)
    allocator.usage("high", wants(3))
    assert gpus_of(allocator.offers(), "high") == 2
    more = (SlotDemand({"gpu": 0.5}, 9), SlotDemand({"gpu": 8.0}, 9), SlotDemand({"cpu": 1.0}, 9))
    allocator.usage("low", OfferUsage({}, {}, more))
    allocator.usage("other", wants(200))
    assert allocator.explainer.waiting() == {
        "high": {"cpu": 0, "gpu": 1},
        "low": {"cpu": 9, "gpu": 2},  # of the one remaining GPU
        "other": {"cpu": 0, "gpu": 200},
    }


@pytest.mark.parametrize(
    ("quota", "request_", "count"),
    [
        ({"gpu": 4.0}, {"gpu": 1.0}, 4),
        ({"gpu": 0.3}, {"gpu": 0.1}, 3),
        ({"gpu": 4.0}, {"gpu_memory": 8e9}, 4),
        ({"gpu": 0.5}, {"gpu_memory": 8e9}, 1),
        ({"gpu": 0.0}, {"gpu_memory": 8e9}, 0),
        ({"gpu": 4.0, "memory": 2e9}, {"gpu": 1.0, "memory": 1e9}, 2),
        ({"licence": 3.0}, {"gpu": 1.0, "licence": 1.0}, 3),
        ({"cpu": 1.0}, {"gpu": 1.0}, 200),
    ],
)
def test_quota_applies_even_without_nodes(
    quota: dict[str, float], request_: dict[str, float], count: int
) -> None:
    allocator = an_allocator(quotas={"ada": quota})
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(200, request_))
    assert allocator.explainer.waiting()["e"]["gpu"] == count


def test_resources_given_back_by_an_owner_may_be_requested_again() -> None:
    allocator = an_allocator(("one", 4), quotas={"ada": {"gpu": 4.0}})
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(9))
    allocator.offers()
    assert allocator.explainer.waiting() == {"e": {"cpu": 0, "gpu": 0}}
    allocator.node_lost("one", is_dead=True)
    assert allocator.explainer.waiting() == {"e": {"cpu": 0, "gpu": 4}}
