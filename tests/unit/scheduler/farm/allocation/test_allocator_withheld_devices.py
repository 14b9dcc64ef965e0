"""The farm offers withheld devices to no experiment and takes them from none."""

from __future__ import annotations

import itertools

from tests.simulation.shared_farm import Job, SharedFarm, SharingExperiment, node
from tests.unit.scheduler.farm.allocation.test_fair_share_allocator import ONE, an_allocator, wants
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand

BAD = {"n-0": "XID 79"}
WORDS = "GPU n-0 of node n is set aside: XID 79"


def an_experiment(name: str, gpus: float, length: float, count: int) -> SharingExperiment:
    job: Job = ({"cpu": 1.0, "gpu": gpus}, length)
    return SharingExperiment(name, "ada", itertools.repeat(job, count))


def farm_of(gpus: int) -> SharedFarm:
    farm = SharedFarm(1)
    farm.join(node("n", gpus))
    return farm


def devices(experiment: SharingExperiment) -> list[str]:
    return sorted(uuid for trial in experiment.running for uuid in trial.devices)


def test_withheld_device_is_offered_only_once_it_is_back() -> None:
    allocator = an_allocator(("n", 2))
    allocator.devices_withheld("n", BAD)
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(2))
    [(_, offer)] = allocator.offers()
    assert offer.devices == {"n-1": 1.0}
    assert allocator.explainer.why("e", ONE) == [
        "a trial requests gpu=1; the most that is free on any node is 0, of 2 at most",
        WORDS,
    ]
    allocator.devices_withheld("n", {})
    [(_, offer)] = allocator.offers()
    assert offer.devices == {"n-0": 1.0, "n-1": 1.0}


def test_unused_offer_on_a_withheld_device_is_replaced_elsewhere() -> None:
    allocator = an_allocator(("n", 1), ("other", 1))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1, preferred="n"))
    allocator.offers()
    nothing_held = OfferUsage({"n": 1}, {}, (SlotDemand(ONE, 1),))
    allocator.usage("e", nothing_held)
    allocator.devices_withheld("n", BAD)
    offers = {offer.instance_id: offer.devices for _, offer in allocator.offers()}
    assert offers == {"n": {}, "other": {"other-0": 1.0}}


def test_offer_in_flight_is_taken_back_once_it_is_known_to_be_unused() -> None:
    allocator = an_allocator(("n", 1))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    allocator.offers()
    allocator.devices_withheld("n", BAD)
    assert allocator.offers() == [], "a trial may have begun in it"
    allocator.usage("e", OfferUsage({"n": 1}, {}, (SlotDemand(ONE, 1),)))
    [(_, offer)] = allocator.offers()
    assert offer.devices == {}


def test_trial_on_a_withheld_device_ends_there_and_its_slot_is_not_offered() -> None:
    allocator = an_allocator(("n", 1))
    allocator.experiment_added("e", "ada")
    allocator.usage("e", wants(1))
    allocator.offers()
    held = {"n": ResourceAmounts({"cpu": 1.0, "gpu": 1.0}, {"n-0": 1.0})}
    allocator.usage("e", OfferUsage({"n": 1}, held, ()))
    allocator.devices_withheld("n", BAD)
    assert allocator.offers() == []
    [row] = allocator.explainer.snapshot()
    assert (row.free.devices, row.aside.devices, dict(row.withheld)) == ({}, {}, BAD)

    allocator.usage("e", OfferUsage({"n": 1}, {}, (SlotDemand(ONE, 1),)))
    [(_, offer)] = allocator.offers()
    assert (offer.devices, offer.preempt_grace_s) == ({}, None)
    allocator.usage("e", OfferUsage({"n": 2}, {}, (SlotDemand(ONE, 1),)))
    assert allocator.offers() == []
    [row] = allocator.explainer.snapshot()
    assert (row.free.devices, row.aside) == ({}, ResourceAmounts({"gpu": 1.0}, {"n-0": 1.0}))
    assert allocator.explainer.why("e", ONE)[1] == WORDS


def test_slot_is_not_preempted_where_it_would_need_a_withheld_device() -> None:
    farm = farm_of(2)
    small = farm.submit(an_experiment("small", 1.0, 50_000.0, 2))
    farm.run(farm.now + 30.0)
    assert devices(small) == ["n-0", "n-1"]
    farm.withhold("n", BAD)
    large = SharingExperiment("large", "bob", iter([({"cpu": 1.0, "gpu": 2.0}, 10.0)]), 5)
    farm.submit(large)
    farm.run(farm.now + 1_000.0)
    assert devices(small) == ["n-0", "n-1"], "no trial is preempted for one that cannot begin"
    assert any(
        WORDS in line for line in farm.allocator.explainer.why("large", {"cpu": 1.0, "gpu": 2.0})
    )
    farm.withhold("n", {})
    farm.run(farm.now + 1_000.0)
    assert "large" not in farm.experiments, "it has run in their place"


def test_node_with_a_withheld_device_is_used_for_other_requests() -> None:
    farm = farm_of(4)
    farm.withhold("n", BAD)
    one = farm.submit(an_experiment("one", 0.5, 20.0, 30))
    farm.run(farm.now + 5.0)
    assert set(devices(one)) == {"n-1", "n-2", "n-3"}
    assert len(one.running) == 6
    farm.run(farm.now + 500.0)
    assert "one" not in farm.experiments, "all its trials have ended"


def test_trials_on_a_device_that_becomes_withheld_do_not_block_their_experiment() -> None:
    farm = farm_of(2)
    one = farm.submit(an_experiment("one", 1.0, 300.0, 8))
    farm.run(farm.now + 30.0)
    assert devices(one) == ["n-0", "n-1"]
    farm.withhold("n", BAD)
    farm.run(farm.now + 290.0)
    assert devices(one) == ["n-1"]
    farm.run(farm.now + 2_500.0)
    assert "one" not in farm.experiments


def test_supervisor_that_starts_with_withheld_devices_offers_none_of_them() -> None:
    farm = farm_of(2)
    farm.withhold("n", BAD)
    one = farm.submit(an_experiment("one", 1.0, 50.0, 8))
    farm.run(farm.now + 10.0)
    farm.restart()
    farm.run(farm.now + 200.0)
    assert devices(one) == ["n-1"]
