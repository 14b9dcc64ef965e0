"""A search's report keeps no more of a node from the others than the search was offered."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from tests.simulation.allocator_books import check_books
from tests.simulation.shared_farm import node
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.amounts import MOST_REQUESTS
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.granting import MOST_GRANTS
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_scheduler.farm.allocation.node_grants import MOST_SLOTS
from tunemq_scheduler.farm.allocation.overdue_slots import OVERDUE_S
from tunemq_shared.protocol.messages import NodeOffered

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
    kinds = allocator.explainer.waiting()["hostile"].keys()
    assert len(kinds) < 20
    assert "other" in kinds
    assert len(allocator._ledger._estimates) <= MOST_REQUESTS
    assert len(allocator._granting._blocked) <= 100


# --- after a restart of the scheduler, which does not know what a search was offered --------------


class Restarted:
    """A farm with two nodes whose hostile search runs on; an honest one waits for slots."""

    def __init__(self, first: OfferUsage, wanted: str = "cpu") -> None:
        self.wants = (SlotDemand({wanted: 1.0}, 8),)
        self.allocator = FairShareAllocator(FairShareSettings())
        self.now = 1.0
        self.allocator.advance(self.now)
        for name in ("n", "o"):
            self.allocator.node_joined(node(name, 2, 4.0))
        for name in ("hostile", "honest"):
            self.allocator.experiment_added(name, name)
        self.allocator.expect("hostile")
        self.allocator.usage("hostile", first)
        self.sent: dict[str, dict[str, NodeOffered]] = {"hostile": {}, "honest": {}}
        self.overdue_at = 0.0

    def run(self, until: float, hostile: Callable[[dict[str, NodeOffered]], OfferUsage]) -> None:
        """Let the time pass until something is overdue; the honest search always obeys."""
        while self.now < until and not self.overdue_at:
            self.now += 5.0
            self.allocator.advance(self.now)
            for name, offer in self.allocator.offers():
                self.sent[name][offer.instance_id] = offer
            self.allocator.usage("hostile", hostile(self.sent["hostile"]))
            seen = {name: offer.n for name, offer in self.sent["honest"].items()}
            self.allocator.usage("honest", OfferUsage(seen, {}, self.wants))
            if "hostile" in self.allocator.overdue():
                self.overdue_at = self.now
        check_books(self.allocator)

    @property
    def is_served(self) -> bool:
        return any(offer.resources for offer in self.sent["honest"].values())


def _numbers(sent: dict[str, NodeOffered]) -> dict[str, int]:
    return {name: offer.n for name, offer in sent.items()}


def test_s15_search_that_never_confirms_an_offer_after_a_restart_is_overdue() -> None:
    farm = Restarted(OfferUsage({"n": 1, "o": 1}))
    farm.run(2000.0, lambda _: OfferUsage({"n": 1, "o": 1}))
    assert not farm.is_served
    assert OVERDUE_S < farm.overdue_at < OVERDUE_S + 60.0


@pytest.mark.parametrize(("wanted", "there"), [("gpu", 4.0), ("cpu", 8.0)])
@pytest.mark.parametrize("is_late", [False, True])
def test_s15_search_that_claims_all_nodes_after_a_restart_is_preempted_and_overdue(
    wanted: str, there: float, is_late: bool
) -> None:
    held = {
        name: ResourceAmounts({"cpu": 1000.0, "gpu": 2.0}, {f"{name}-0": 1.0, f"{name}-1": 1.0})
        if wanted == "gpu"
        else ResourceAmounts({"cpu": 1000.0})
        for name in ("n", "o")
    }
    farm = Restarted(OfferUsage({"n": 1, "o": 1}, {} if is_late else held), wanted)
    farm.run(4000.0, lambda sent: OfferUsage(_numbers(sent), held))
    assert farm.overdue_at
    farm.allocator.experiment_gone("hostile")  # as the farm does once it has ended the trials
    farm.allocator.experiment_added("hostile", "hostile")
    farm.overdue_at = 0.0
    farm.run(farm.now + 60.0, lambda sent: OfferUsage(_numbers(sent), held))
    assert sum(one.resources[wanted] for one in farm.sent["honest"].values()) == there


def test_s15_search_that_raises_its_numbers_after_a_restart_closes_no_node() -> None:
    farm = Restarted(OfferUsage({"n": 1, "o": 1}))
    numbers = itertools.count(100, 100)
    farm.run(60.0, lambda _: OfferUsage(dict.fromkeys(("n", "o"), next(numbers))))
    assert farm.is_served


def test_s15_search_that_says_it_has_nodes_alone_after_a_restart_keeps_one_for_a_while() -> None:
    usage = OfferUsage({"n": 1, "o": 1}, alone=("n", "o"))
    farm = Restarted(usage)
    farm.run(60.0, lambda sent: msgspec.structs.replace(usage, seen=_numbers(sent)))
    assert farm.sent["honest"].keys() == {"o"} or farm.sent["honest"].keys() == {"n"}
    farm.run(1900.0, lambda sent: msgspec.structs.replace(usage, seen=_numbers(sent)))
    assert farm.sent["honest"].keys() == {"n", "o"}
    offered = dict(farm.sent["honest"])
    farm.run(6000.0, lambda sent: msgspec.structs.replace(usage, seen=_numbers(sent)))
    assert farm.sent["honest"] == offered, "and not again later"


def test_search_that_obeys_late_is_not_overdue() -> None:
    farm = Restarted(OfferUsage({"n": 1, "o": 1}))
    late: list[dict[str, int]] = [{"n": 1, "o": 1}] * 100  # 500 s

    def hostile(sent: dict[str, NodeOffered]) -> OfferUsage:
        late.append(_numbers(sent))
        return OfferUsage(late.pop(0))

    farm.run(3000.0, hostile)
    assert not farm.overdue_at
    assert farm.is_served
