"""A farm with a thousand waiting experiments: the cost of a decision does not grow with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.simulation.shared_farm import node
from tests.support.waiting import without_collections
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator

ONE = {"cpu": 1.0, "gpu": 1.0}
WAITING = 1000


def a_full_farm(gpus: int = 8) -> FairShareAllocator:
    """One experiment has all of it, and a thousand of ten owners wait."""
    allocator = FairShareAllocator()
    allocator.advance(1.0)
    allocator.node_joined(node("one", gpus, 64.0))
    allocator.experiment_added("first", "ada")
    allocator.usage("first", OfferUsage({"one": 0}, {}, (SlotDemand(ONE, gpus),)))
    [(_, offer)] = allocator.offers()
    held = {"one": ResourceAmounts(offer.resources, offer.devices)}
    for place in range(WAITING):
        allocator.experiment_added(f"e{place}", f"owner{place % 10}", 0, place)
        allocator.usage(f"e{place}", OfferUsage({"one": 0}, {}, (SlotDemand(ONE, 4),)))
    allocator.usage("first", OfferUsage({"one": 1}, held, (SlotDemand(ONE, 5),)))
    assert allocator.offers() == []
    return allocator


def calls_of(what: Callable[[], Any]) -> int:
    """How many functions are called for it."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    with without_collections():
        sys.setprofile(note)
        try:
            what()
        finally:
            sys.setprofile(None)
    return count


def test_high_priority_search_preempts_in_the_same_turn() -> None:
    allocator = a_full_farm()
    allocator.advance(2.0)
    allocator.experiment_added("urgent", "eve", 100, WAITING)
    allocator.usage("urgent", OfferUsage({"one": 0}, {}, (SlotDemand(ONE, 2),)))
    [(name, lowered)] = allocator.offers()
    assert (name, lowered.resources["gpu"], lowered.preempt_grace_s) == ("first", 6.0, 60.0)
    left = ResourceAmounts(lowered.resources, lowered.devices)
    allocator.usage("first", OfferUsage({"one": lowered.n}, {"one": left}, (SlotDemand(ONE, 7),)))
    [(name, offer)] = allocator.offers()
    assert (name, offer.resources["gpu"]) == ("urgent", 2.0)


def test_high_priority_search_gets_free_slots_in_the_same_turn() -> None:
    allocator = a_full_farm()
    allocator.node_joined(node("two", 2, 8.0))
    allocator.experiment_added("urgent", "eve", 100, WAITING)
    allocator.usage("urgent", OfferUsage({"one": 0}, {}, (SlotDemand(ONE, 2),)))
    [(name, offer)] = allocator.offers()
    assert (name, offer.instance_id, offer.resources["gpu"]) == ("urgent", "two", 2.0)


def test_a_report_while_a_thousand_wait_costs_no_look_at_each_of_them() -> None:
    allocator = a_full_farm()
    usage = OfferUsage({"one": 0}, {}, (SlotDemand(ONE, 3),))

    def report() -> None:
        allocator.usage("e500", usage)
        allocator.offers()

    assert calls_of(report) < WAITING


@pytest.mark.parametrize("slots", [1, 4])
def test_a_slot_that_comes_free_costs_a_few_looks_at_each_at_most(slots: int) -> None:
    allocator = a_full_farm()
    left = ResourceAmounts(
        {"cpu": 8.0 - slots, "gpu": 8.0 - slots},
        {f"one-{place}": 1.0 for place in range(slots, 8)},
    )
    allocator.usage("first", OfferUsage({"one": 1}, {"one": left}, ()))
    [(_, lowered)] = allocator.offers()
    allocator.usage("first", OfferUsage({"one": lowered.n}, {"one": left}, ()))
    offers = []
    assert calls_of(lambda: offers.extend(allocator.offers())) < 30 * WAITING
    assert sum(offer.resources["gpu"] for _, offer in offers) == slots
    assert len({name for name, _ in offers}) == slots  # of as many owners
