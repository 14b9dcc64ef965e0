"""F08: a node loses its connection to Redis, keeps running, and is re-attached or fenced later."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.farms.cut_farm import CutRun, cut_farm
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

__all__ = ["cut_farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.mark.slow
@pytest.mark.parity(74, 141)
def test_f08_late_results_and_checkpoints_of_a_node_that_was_cut_off_change_nothing(
    cut_farm, tmp_path
):
    farm = cut_farm()
    run = CutRun(farm, tmp_path, steps=700, step_s=0.02, gate=600)  # both trials wait there
    run.wait_for_recorded(60, attempt=1, within=60)
    node = run.node_of(0)
    zombie = run.wait_for_start(0, 1).pid
    farm.proxies[node].cut(stay=True)
    run.wait_for_start(0, 2, within=60)
    run.wait_for_recorded(120, attempt=2)
    # The node cannot know. The kernel may omit some children while others end.
    eventually(lambda: zombie in farm.process_tree(node), message=run.state)
    farm.proxies[node].heal()
    run.wait_for(m.NodeReturned)
    eventually(lambda: zombie not in farm.process_tree(node), message=run.state)
    freed = m.SlotFreed(run.all_of(m.TrialStarted)[0].trial, 1)
    eventually(lambda: freed in run.all_of(m.SlotFreed), message=run.state)
    run.open_gate(700)
    run.ends_well()

    (result,) = run.results
    there = {path.parent for path in Path(result.path).glob("checkpoint_*/*")}
    kept = {Path(checkpoint.path).parent for checkpoint, _ in result.best_checkpoints}
    assert kept
    assert there == kept, "nothing of what came late is left in the store"
    late = [one for one in run.all_of(m.ResultReported) if one.attempt == 1]
    assert max(one.step for one in late) > 100, "it has said all that it did meanwhile"
    assert any("of a former attempt" in line for line in run.told), run.told
    assert farm.nodes[node].process.poll() is None, "it continues as a node"
    assert len(run.all_of(m.NodeJoined)) == 2, "and is no new one"
    assert not run.all_of(m.TrialProcessDied)


def cut_off_and_back(cut_farm, tmp_path, seconds: float) -> None:
    farm = cut_farm()
    steps = int((seconds + 12.0) / 0.03)
    run = CutRun(farm, tmp_path, trials=2, steps=steps, step_s=0.03)
    run.wait_for_step(20)
    farm.proxies[0].cut(stay=True)
    time.sleep(seconds)  # the test is about the length of the outage
    farm.proxies[0].heal()
    run.ends_well()

    assert len(run.all_of(m.NodeLost)) == len(run.all_of(m.NodeReturned)) == 1
    assert run.repeated() == {0: 0, 1: 0}, "no other node had a slot, so it continued"
    assert {one.attempt for one in run.all_of(m.TrialStarted)} == {1}
    assert any("is back after" in line for line in run.told)


@pytest.mark.soak
@pytest.mark.slow
def test_f08_node_that_returns_before_a_slot_is_free_repeats_no_step(cut_farm, tmp_path):
    cut_off_and_back(cut_farm, tmp_path, redis_keys.LEASE_TTL_S + 2.5)


@pytest.mark.soak
def test_f08_fifteen_seconds_without_a_slot_elsewhere_repeat_no_step(cut_farm, tmp_path):
    cut_off_and_back(cut_farm, tmp_path, 15.0)


@pytest.mark.soak
def test_f08_cut_off_of_all_nodes_for_twenty_seconds_loses_no_node(cut_farm, tmp_path):
    farm = cut_farm()
    run = CutRun(farm, tmp_path, trials=2, steps=1200, step_s=0.03)
    run.wait_for_step(20)
    for proxy in farm.proxies:
        proxy.cut(stay=True)
    time.sleep(20.0)  # the test is about the length of the outage
    for proxy in farm.proxies:
        proxy.heal()
    run.ends_well()

    assert run.all_of(m.NodeLost) == []
    assert run.repeated() == {0: 0, 1: 0}
