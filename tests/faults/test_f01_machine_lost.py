"""F01: a machine fails with its node and all of its trials, at any moment."""

from __future__ import annotations

import time

import pytest

from tests.support.farms.cut_farm import CutRun, cut_farm
from tests.support.searches.chain import executed
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

__all__ = ["cut_farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: Allowance for a busy machine that checks leases, loads the trial's code and forks a process late.
SLACK_S = 30.0
SAVE_EVERY = 10


@pytest.mark.slow
@pytest.mark.parity(141)
def test_f01_trial_of_a_lost_machine_continues_elsewhere_when_its_lease_expires(cut_farm, tmp_path):
    farm = cut_farm()
    # The gate bounds how many steps run unrecorded, however late the journal and this test are.
    run = CutRun(farm, tmp_path, steps=250, step_s=0.04, save_every=SAVE_EVERY, gate=90)
    run.wait_for_recorded(60, attempt=1, within=60)
    node = run.node_of(0)
    killed = farm.kill(node)
    done = max(executed(tmp_path / "executed")[0])
    run.open_gate(250)
    eventually(lambda: executed(tmp_path / "executed")[0][-1] > done, within=60, message=run.state)
    took = time.monotonic() - killed
    print(f"the first new step came {took:.2f} s after the machine was lost")
    assert took < redis_keys.LEASE_TTL_S + 1.0 + SLACK_S
    run.ends_well()

    (lost,) = run.all_of(m.NodeLost)
    assert not lost.is_dead, "the scheduler cannot know"
    assert run.all_of(m.NodeReturned) == []
    # The journal recorded the checkpoint of step 50 before step 60.
    assert run.repeated()[0] <= 4 * SAVE_EVERY
    assert any("is lost" in line for line in run.told)


@pytest.mark.soak
@pytest.mark.slow
def test_f01_restarted_machine_counts_as_empty_at_once(cut_farm, tmp_path):
    farm = cut_farm()
    run = CutRun(farm, tmp_path, steps=400, trials=2, step_s=0.03, save_every=SAVE_EVERY)
    run.wait_for_step(30)
    killed = farm.kill(0)
    farm.nodes[0].start()
    lost = run.wait_for(m.NodeLost)
    assert lost.is_dead
    assert time.monotonic() - killed < redis_keys.LEASE_TTL_S - 1.0, "no lease was waited for"
    run.ends_well()
