"""F13: batches of results that are duplicated, late, or reordered."""

from __future__ import annotations

import random

import pytest

from tests.support.farms.own_farm import ChainRun, OwnFarm, farm
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


STEPS = 300


def unread(own: OwnFarm, run: ChainRun) -> tuple[bytes, list[tuple[bytes, dict]]]:
    """Hold the scheduler back; return the stream's key and the entries that it has not seen.

    Trials run until there are enough entries: those that do not wait may finish before the fault.
    """
    (key,) = own.server.client.keys("tunemq:events:*")
    own.to_scheduler.hold()
    # The scheduler may have read the present entries without removing them yet.
    newest = own.server.client.xinfo_stream(key)["last-generated-id"]
    # Read after `newest`, so that the next step's result comes behind it.
    start = max(run.done().values())
    found: list[tuple[bytes, dict]] = []

    def are_enough() -> bool:
        # Each further step waits for one more entry, so that trials do not run ahead of slow
        # entries.
        run.open_gate(min(start + len(found) + 1, STEPS))
        found[:] = own.server.client.xrange(key, min=b"(" + newest)
        return len(found) > 8

    eventually(are_enough, message=run.state)
    return key, found


def test_f13_results_that_come_again_and_late_are_recorded_once(farm, tmp_path):
    chance = random.Random(13)
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=STEPS, lock_step=False, gate=5)
    run.wait_for_step(5)
    older: list[dict] = []
    for _ in range(4):
        key, entries = unread(own, run)
        older += [fields for _, fields in entries]
        chance.shuffle(older)
        for fields in older:
            own.server.client.xadd(key, fields)
        own.to_scheduler.heal()
    run.open_gate(STEPS)
    run.ends()


def test_f13_a_result_that_overtakes_others_is_recorded_in_its_turn(farm, tmp_path):
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=STEPS, lock_step=False, gate=5)
    run.wait_for_step(5)
    for _ in range(3):
        key, entries = unread(own, run)
        before = own.server.client.get(redis_keys.GENERATION)
        own.server.client.xdel(key, *(entry_id for entry_id, _ in entries))
        for _, fields in reversed(entries):
            own.server.client.xadd(key, fields)
        own.to_scheduler.heal()
        # After the gap, nodes send everything again. Before holding the scheduler once more, wait
        # for the new generation: without one, no node appends.
        eventually(
            lambda before=before: (
                own.server.client.get(redis_keys.GENERATION) not in {before, None}
            ),
            message=run.state,
        )
    run.open_gate(STEPS)
    run.ends()


def test_f13_malformed_batch_is_named_and_ignored(farm, tmp_path):
    own = farm()
    run = ChainRun(own, tmp_path, steps=60)
    run.wait_for_step(3)
    (key,) = own.server.client.keys("tunemq:events:*")
    own.server.client.xadd(key, {"h": b"\xc1", "e": b""})
    own.server.client.xadd(key, {"nothing": "of ours"})
    run.ends()
    assert any("cannot be read" in line for line in run.told), run.told
