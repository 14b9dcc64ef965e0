"""F11: a node, or the scheduler, is stopped for longer than a lease and wakes up again."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.support.farms.cut_farm import CutRun, cut_farm
from tests.support.searches.chain import executed
from tests.support.searches.chain_searches import ChainSearch
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

__all__ = ["cut_farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def a_stopped_node_wakes(cut_farm, tmp_path, seconds: float, steps: int) -> None:
    farm = cut_farm()
    run = CutRun(farm, tmp_path, steps=steps, step_s=0.02, gate=steps - 100)
    run.wait_for_recorded(30, attempt=1, within=60)
    node = run.node_of(0)
    zombie = run.wait_for_start(0, 1).pid
    stopped = time.monotonic()
    process_tree = farm.stop(node)
    try:
        run.wait_for_start(0, 2, within=60)
        time.sleep(max(0.0, stopped + seconds - time.monotonic()))  # the test's subject
    finally:
        farm.resume(process_tree)
    eventually(lambda: zombie not in farm.process_tree(node), message=run.state)
    run.wait_for(m.NodeReturned)
    run.open_gate(steps)  # earlier, it might finish while the node wakes up
    run.ends_well()

    assert len(run.all_of(m.NodeReturned)) == 1
    assert farm.nodes[node].process.poll() is None
    assert not run.all_of(m.TrialProcessDied)


@pytest.mark.slow
def test_f11_a_node_that_was_stopped_for_longer_than_its_lease_changes_nothing(cut_farm, tmp_path):
    a_stopped_node_wakes(cut_farm, tmp_path, redis_keys.LEASE_TTL_S + 2.0, steps=700)


@pytest.mark.soak
def test_f11_a_node_that_was_stopped_for_ten_leases_changes_nothing(cut_farm, tmp_path):
    a_stopped_node_wakes(cut_farm, tmp_path, 10 * redis_keys.LEASE_TTL_S, steps=4000)


def a_stopped_scheduler_wakes(tmp_path, seconds: float) -> None:
    steps = int((seconds + 8.0) / 0.05)
    about = {"trials": 2, "steps": steps, "save_every": 20, "payload": 64, "step_s": 0.05}
    search = ChainSearch(tmp_path, storage=str(tmp_path), cpus=2, **about)
    with contextlib.closing(search):
        search.wait_for(m.ResultReported, within=30)
        search.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)  # the test's subject
        os.kill(search.process.pid, signal.SIGCONT)
        assert search.ends(60) == 0, search
        assert not search.all_of(m.NodeLost)
        assert not search.all_of(m.TrialProcessDied)
        for done in executed(tmp_path / "executed").values():
            assert done == list(range(1, steps + 1))


@pytest.mark.soak
@pytest.mark.slow
def test_f11_a_scheduler_that_was_stopped_takes_no_node_for_lost(tmp_path):
    a_stopped_scheduler_wakes(tmp_path, redis_keys.LEASE_TTL_S + 3.0)


@pytest.mark.soak
def test_f11_a_scheduler_that_was_stopped_for_thirty_seconds_takes_no_node_for_lost(tmp_path):
    a_stopped_scheduler_wakes(tmp_path, 30.0)
