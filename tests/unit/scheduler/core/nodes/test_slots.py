"""Which attempts hold slots, and that large attempt numbers cost nothing."""

from __future__ import annotations

import time

from tunemq_scheduler.core.nodes.slots import SlotTable
from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager, RetentionPolicy
from tunemq_scheduler.core.trials.trial import Trial


def trial(name: str, attempt: int) -> Trial:
    made = Trial(
        trial_id=name,
        number=0,
        config=b"",
        tag="",
        resources={"cpu": 1.0},
        checkpoints=CheckpointManager(RetentionPolicy()),
    )
    made.attempt = attempt
    return made


def test_trial_has_a_slot_as_long_as_any_of_its_attempts_has():
    slots = SlotTable()
    slots.add_node("n", {"cpu": 4.0})
    first, other = trial("a", 1), trial("b", 1)
    slots.take_on(first, "n")
    first.attempt = 2
    slots.take_on(first, "n")
    slots.take_on(other, "n")
    assert slots.has_any(first)
    slots.give_back("a", 2)
    assert slots.has_any(first)
    slots.give_back("a", 1)
    assert not slots.has_any(first)
    assert slots.has_any(other)


def test_attempt_numbers_far_ahead_after_a_takeover_cost_nothing():
    slots = SlotTable()
    slots.add_node("n", {"cpu": 4.0})
    slots.take_on(trial("b", 1), "n")
    began = time.thread_time()
    assert not slots.has_any(trial("a", 50_000_000))
    assert time.thread_time() - began < 2
