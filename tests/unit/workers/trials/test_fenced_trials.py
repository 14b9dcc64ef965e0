"""Fencing of trial processes whose trials moved, or whose scheduler is silent."""

from __future__ import annotations

from tests.unit.workers.fakes import order, start
from tests.unit.workers.trials.test_trial_supervisor import node
from tunemq_shared.protocol.messages import SlotFreed, TrialPaused, encode
from tunemq_workers.runtime import frames

__all__ = ["node"]


def test_trial_to_be_killed_is_killed_and_its_slot_is_freed(node):
    node.begin("a")
    node.supervisor.obey([order("a", kill=True)])
    node.supervisor.obey([order("a", kill=True)])
    assert node.done == [("kill", "h1")]
    node.end("h1", signal=9)
    assert node.events == [SlotFreed("a", 1)], "its end was already reported"


def test_trial_to_be_killed_that_never_ran_here_is_freed_once(node):
    node.supervisor.obey([order("a", start(), kill=True)])
    node.supervisor.obey([order("a", start(), kill=True)])
    assert node.started == []
    assert node.events == [SlotFreed("a", 1)]


def test_node_without_a_scheduler_pauses_its_trials_and_starts_none(node):
    node.begin("a")
    node.supervisor.give_up()
    (told,) = node.sent("h1")
    assert told[0] == frames.ORDER
    node.supervisor.obey([order("a"), order("b", start())])
    assert node.started == ["a"]
    node.supervisor.said("h1", frames.ENDING, encode(TrialPaused("a", 1)))
    node.end("h1")
    assert node.events == [TrialPaused("a", 1), SlotFreed("a", 1)]
    node.supervisor.go_on()
    assert node.started == ["a", "b"], "an ended trial is not restarted"
