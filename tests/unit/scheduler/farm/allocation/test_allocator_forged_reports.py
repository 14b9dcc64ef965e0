"""A search's report keeps no more of a node from the others than the search was offered."""

from __future__ import annotations

import pytest

from tests.simulation.allocator_books import check_books
from tests.simulation.shared_farm import node
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.amounts import MOST_REQUESTS
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.granting import MOST_GRANTS
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_scheduler.farm.allocation.node_grants import MOST_SLOTS

CPU = {"cpu": 1.0}
ALL = ResourceAmounts({"cpu": 1000.0, "gpu": 2.0}, {"n-0": 1.0, "n-1": 1.0})


@pytest.fixture
def allocator() -> FairShareAllocator:
    made = FairShareAllocator(FairShareSettings())
    made.advance(1.0)
    made.node_joined(node("n", 2, 4.0))
    made.experiment_added("hostile", "ben")
    made.usage("hostile", OfferUsage({}, {}, (SlotDemand(CPU, 1),)))
    assert [name for name, _ in made.offers()] == ["hostile"]
    return made


@pytest.mark.parametrize(
    "forged",
    [
        OfferUsage({"n": 2**53}),
        OfferUsage({"n": 2**53}, {"n": ALL}),
        OfferUsage({"n": 1}, {"n": ALL}),
        OfferUsage({"n": 0}, {"n": ALL}, alone=("n",)),
        OfferUsage({"elsewhere": 2**53}, {"elsewhere": ALL}, alone=("elsewhere",)),
    ],
)
def test_s15_forged_report_keeps_nothing_from_other_searches(
    allocator: FairShareAllocator, forged: OfferUsage
) -> None:
    for _ in range(3):
        allocator.usage("hostile", forged)
        allocator.offers()
    allocator.experiment_added("honest", "ada")
    allocator.usage("honest", OfferUsage({}, {}, (SlotDemand(CPU, 3),)))
    offered = dict(allocator.offers())
    assert offered["honest"].resources["cpu"] >= 3.0
    check_books(allocator)


def test_s15_search_without_a_part_of_a_node_does_not_reserve_it() -> None:
    allocator = FairShareAllocator(FairShareSettings())
    allocator.advance(1.0)
    allocator.node_joined(node("n", 2, 4.0))
    for name in ("hostile", "honest"):
        allocator.experiment_added(name, name)
    allocator.usage("hostile", OfferUsage(alone=("n",)))
    allocator.offers()
    allocator.usage("honest", OfferUsage({}, {}, (SlotDemand(CPU, 4),)))
    [(name, offer)] = allocator.offers()
    assert (name, offer.resources) == ("honest", {"cpu": 4.0})


def test_s15_endless_demand_for_tiny_slots_gets_a_part_of_them_at_a_time() -> None:
    allocator = FairShareAllocator(FairShareSettings())
    allocator.advance(1.0)
    for name in ("one", "two", "three"):
        allocator.node_joined(node(name, 2, 4.0))
    allocator.experiment_added("hostile", "ben")
    allocator.usage("hostile", OfferUsage({}, {}, (SlotDemand({"cpu": 1e-6}, 2**53),)))
    offered = [offer.resources["cpu"] for _, offer in allocator.offers()]
    assert sum(offered) == pytest.approx(MOST_GRANTS * 1e-6)
    assert max(offered) == pytest.approx(MOST_SLOTS * 1e-6)
    allocator.advance(10.0)
    assert sum(offer.resources["cpu"] for _, offer in allocator.offers()) > 0


def test_s15_ever_new_demands_take_no_more_memory_than_a_few_thousand() -> None:
    allocator = FairShareAllocator(FairShareSettings())
    allocator.advance(1.0)
    allocator.node_joined(node("n", 2, 4.0))
    allocator.experiment_added("hostile", "ben")
    for turn in range(60):
        wants = tuple(SlotDemand({f"r{turn}.{number}": 1.0}, 1) for number in range(100))
        allocator.usage("hostile", OfferUsage({}, {}, wants))
        allocator.advance(2.0 + turn)
        allocator.offers()
    assert len(allocator._ledger._estimates) <= MOST_REQUESTS
    assert len(allocator._granting._blocked) <= 100
