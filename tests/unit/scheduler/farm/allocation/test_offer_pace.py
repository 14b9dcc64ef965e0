"""A search gets slots as fast as it uses them."""

from __future__ import annotations

from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.offer_pace import OfferPace

_CPU = {"cpu": 1.0}
_GPU = {"cpu": 1.0, "gpu": 1.0}


def _counts(usage: OfferUsage) -> list[int]:
    return [one.count for one in usage.wants]


def _usage(cpus: float = 0.0, wants: int = 9) -> OfferUsage:
    held = {"one": ResourceAmounts({"cpu": cpus})} if cpus else {}
    return OfferUsage(seen={"one": 1}, held=held, wants=(SlotDemand(_CPU, wants),))


def test_new_experiment_gets_one_slot_for_each_request():
    usage = OfferUsage(
        wants=(SlotDemand(_CPU, 9, "one"), SlotDemand(_GPU, 2), SlotDemand({"gpu": 1}, 0))
    )
    heard = OfferPace().heard(usage, 0.0)
    assert heard.wants == (
        SlotDemand(_CPU, 1, "one"),
        SlotDemand(_GPU, 1),
        SlotDemand({"gpu": 1}, 0),
    )


def test_experiment_that_uses_a_slot_soon_gets_all_it_requests():
    pace = OfferPace()
    pace.heard(_usage(), 0.0)
    pace.offered("one", _CPU, 0.1)
    assert pace.heard(_usage(1.0), 0.2) == _usage(1.0)


def test_experiment_that_uses_slots_slowly_gets_them_one_by_one():
    pace = OfferPace()
    pace.offered("one", _CPU, 0.0)
    assert _counts(pace.heard(_usage(), 0.1)) == [1]  # it has the slot, but no suggestion yet
    assert _counts(pace.heard(_usage(1.0), 60.0)) == [1]
    pace.offered("one", {"cpu": 2.0}, 60.0)
    assert _counts(pace.heard(_usage(2.0), 120.0)) == [1]
    pace.offered("one", {"cpu": 3.0}, 120.0)
    assert _counts(pace.heard(_usage(3.0), 120.1)) == [9]  # it has suggested many


def test_slot_that_became_empty_counts_from_then_on():
    pace = OfferPace()
    pace.offered("one", {"cpu": 2.0}, 0.0)
    pace.heard(_usage(2.0), 0.1)
    pace.heard(_usage(1.0), 100.0)
    assert _counts(pace.heard(_usage(2.0), 100.1)) == [9]
    pace.heard(_usage(1.0), 200.0)
    assert _counts(pace.heard(_usage(2.0), 260.0)) == [1]


def test_dead_node_no_longer_counts():
    pace = OfferPace()
    pace.heard(_usage(), 0.0)
    pace.offered("one", _CPU, 0.1)
    pace.forget("one")
    pace.forget("one")
    assert _counts(pace.heard(_usage(1.0), 0.2)) == [1]
