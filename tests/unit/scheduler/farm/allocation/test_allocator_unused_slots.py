"""A slot that an experiment leaves unused goes to its other request that has no room."""

from __future__ import annotations

import pytest

from tests.simulation.shared_farm import node
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.members import FairShareSettings

SMALL = {"cpu": 1.0, "gpu": 0.5}
WANTS = SlotDemand(SMALL, 1), SlotDemand({"cpu": 4.0}, 1)


class Experiment:
    """An experiment that requests a small slot and a large one and uses neither.

    Args:
        quota: the owner's quota.
    """

    def __init__(self, *, quota: float | None = None, nodes: int = 1) -> None:
        quotas = {} if quota is None else {"ada": {"cpu": quota}}
        self.allocator = FairShareAllocator(FairShareSettings(quotas=quotas))
        self.now = 1.0
        self.allocator.advance(self.now)
        for number in range(nodes):
            self.allocator.node_joined(node(f"n{number}", 1, 4.0))
        self.allocator.experiment_added("e", "ada")
        self.seen: dict[str, int] = {}
        self.offered: dict[str, ResourceAmounts] = {}
        self.wants: tuple[SlotDemand, ...] = WANTS

    def live(self, seconds: int) -> None:
        """Confirm each offer for this many seconds, and use none."""
        for _ in range(seconds):
            self.now += 1.0
            self.allocator.advance(self.now)
            for _, offer in self.allocator.offers():
                self.seen[offer.instance_id] = offer.n
                self.offered[offer.instance_id] = ResourceAmounts(offer.resources, offer.devices)
            self.allocator.usage("e", OfferUsage(dict(self.seen), {}, self.wants))

    def has(self) -> list[dict[str, float]]:
        return [one.resources for one in self.offered.values() if one.resources]


@pytest.mark.parametrize(("quota", "nodes"), [(None, 1), (4.0, 2)])
def test_unused_slot_that_blocks_another_request_is_given_to_it(
    quota: float | None, nodes: int
) -> None:
    experiment = Experiment(quota=quota, nodes=nodes)
    experiment.live(3)
    assert experiment.has() == [SMALL]
    experiment.live(60)
    assert experiment.has() == [{"cpu": 4.0}]


def test_requests_of_an_experiment_that_uses_none_take_turns() -> None:
    experiment = Experiment()
    had = set[float]()
    for _ in range(60):
        experiment.live(10)
        had |= {one["cpu"] for one in experiment.has()}
    assert had == {1.0, 4.0}


def test_unused_slot_that_blocks_no_request_is_kept() -> None:
    experiment = Experiment(nodes=2)
    experiment.live(3)
    before = experiment.has()
    experiment.live(300)
    assert experiment.has() == before == [SMALL, {"cpu": 4.0}]


def test_later_request_is_served_once_no_other_waits() -> None:
    experiment = Experiment()
    experiment.live(60)
    experiment.wants = WANTS[:1]
    experiment.live(5)
    assert experiment.has() == [SMALL]
