"""An experiment, its farm's allocator and nodes that exchange offers and usage."""

from __future__ import annotations

import pytest

from tests.simulation.shared_farm import node
from tunemq_scheduler.core.runner_settings import EXCLUDE_NODE, LogRule, RunnerSettings
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_shared.protocol import messages as m

ECC = "uncorrectable ECC"
REQUEST = {"cpu": 1.0, "gpu": 1.0}


class Farm:
    """Nodes with one GPU each, offered to one experiment with a given number of trials."""

    def __init__(self, *nodes: str, trials: int) -> None:
        self.allocator = FairShareAllocator(FairShareSettings())
        self.runner = TrialRunner(RunnerSettings(log_rules=(LogRule(ECC, EXCLUDE_NODE),)))
        self.allocator.advance(1.0)
        self.allocator.experiment_added("e", "ada")
        for name in nodes:
            self.join(name)
        for number in range(trials):
            self.runner.handle(m.ConfigSuggested(number, f"t{number}", b"", "", REQUEST))
        self.runner.handle(m.SearchExhausted())

    def join(self, name: str) -> None:
        joined = node(name, 1)
        self.allocator.node_joined(joined)
        self.runner.handle(joined)

    def settle(self) -> None:
        """Exchange messages until nothing changes; trials start where they may."""
        for _ in range(10):
            self.runner.handle(m.Tick(self.runner.elapsed + 1.0))
            while waiting := next(self.runner.waiting(), None):
                self.runner.handle(m.TrialChosen(waiting.trial_id))
            self.allocator.usage("e", self.runner.usage())
            for _, offer in self.allocator.offers():
                self.runner.handle(offer)

    def where(self) -> dict[str, str]:
        """Return the node of each running trial."""
        return {trial: name for trial, _, name in self.runner.slots}

    def fail_for_its_node(self, trial: str) -> None:
        attempt = self.runner.live[trial].attempt
        self.runner.handle(m.LogMatched(trial, attempt, ECC, "an ECC error", 0.0))
        self.runner.handle(m.TrialProcessDied(trial, attempt, 1, 9, None, 0.0))
        self.runner.handle(m.SlotFreed(trial, attempt))


@pytest.mark.parametrize("is_there_before", [True, False])
def test_trial_that_excludes_a_node_is_offered_another_and_leaves_the_first_to_others(
    is_there_before: bool,
) -> None:
    farm = Farm("one", *(["two"] if is_there_before else []), trials=1)
    farm.settle()
    before = farm.where()["t0"]
    farm.fail_for_its_node("t0")
    farm.settle()
    if not is_there_before:
        assert farm.where() == {}
        assert farm.allocator.explainer.snapshot()[0].held == {}, (
            "others may have the resources that it does not use"
        )
        assert "only nodes that exclude it" in farm.allocator.explainer.why("e", REQUEST)[0]
        farm.join("two")
        farm.settle()
    assert farm.where()["t0"] != before


def test_each_of_two_equal_requests_gets_the_node_that_it_may_use() -> None:
    farm = Farm("one", trials=2)
    farm.settle()
    ((shy, _),) = farm.where().items()
    farm.fail_for_its_node(shy)
    farm.settle()
    other = "t1" if shy == "t0" else "t0"
    assert farm.where() == {other: "one"}
    farm.join("two")
    farm.settle()
    assert farm.where() == {other: "one", shy: "two"}


def test_trial_whose_node_is_excluded_is_offered_another_that_becomes_free() -> None:
    farm = Farm("one", "two", trials=4)
    farm.allocator.experiment_added("f", "bob")
    farm.allocator.usage("f", OfferUsage({}, {}, (SlotDemand(REQUEST, 1, "two"),)))
    farm.allocator.offers()
    farm.allocator.usage(
        "f", OfferUsage({"two": 1}, {"two": ResourceAmounts(REQUEST, {"two-0": 1.0})})
    )
    farm.settle()
    for trial in ("t0", "t1", "t2"):
        assert farm.where() == {trial: "one"}
        farm.runner.handle(m.TrialProcessDied(trial, 1, 1, 9, None, 0.0))
        farm.runner.handle(m.SlotFreed(trial, 1))
        farm.settle()
    assert farm.where() == {}
    farm.allocator.experiment_gone("f")
    farm.settle()
    assert farm.where() == {"t3": "two"}
