"""F13: batches of results that come again, late, or before those that belong before them."""

from __future__ import annotations

import random

import pytest

from tests.own_farm import ChainRun, OwnFarm, farm
from tests.support import eventually
from tunemq_shared import wire

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def unread(own: OwnFarm, run: ChainRun) -> tuple[bytes, list[tuple[bytes, dict]]]:
    """Hold the scheduler back; the stream's key, and the entries that it has not seen."""
    (key,) = own.server.client.keys("tunemq:events:*")
    own.to_scheduler.hold()
    eventually(lambda: own.server.client.xlen(key) > 8, within=15, message=run.state)
    return key, own.server.client.xrange(key)


def test_f13_results_that_come_again_and_late_are_recorded_once(farm, tmp_path):
    chance = random.Random(13)
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=300, lock_step=False)
    run.wait_for_step(5)
    older: list[dict] = []
    for _ in range(4):
        key, entries = unread(own, run)
        older += [fields for _, fields in entries]
        chance.shuffle(older)
        for fields in older:
            own.server.client.xadd(key, fields)
        own.to_scheduler.heal()
    run.ends()


def test_f13_a_result_that_overtakes_others_is_recorded_in_its_turn(farm, tmp_path):
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=300, lock_step=False)
    run.wait_for_step(5)
    for _ in range(3):
        key, entries = unread(own, run)
        before = own.server.client.get(wire.GENERATION)
        own.server.client.xdel(key, *(entry_id for entry_id, _ in entries))
        for _, fields in reversed(entries):
            own.server.client.xadd(key, fields)
        own.to_scheduler.heal()
        # The gap has everything sent anew. Held while there is no generation, no node would append.
        eventually(
            lambda before=before: own.server.client.get(wire.GENERATION) not in {before, None},
            within=15,
            message=run.state,
        )
    run.ends()


def test_f13_what_is_no_batch_at_all_is_named_and_ignored(farm, tmp_path):
    own = farm()
    run = ChainRun(own, tmp_path, steps=60)
    run.wait_for_step(3)
    (key,) = own.server.client.keys("tunemq:events:*")
    own.server.client.xadd(key, {"h": b"\xc1", "e": b""})
    own.server.client.xadd(key, {"nothing": "of ours"})
    run.ends()
    assert any("cannot be read" in line for line in run.told), run.told
