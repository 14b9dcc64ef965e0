"""Workers of a farm are told to stop, replaced and started again while a search runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.farm_processes import Farm, farms
from tests.support import eventually
from tunemq_shared import messages as m
from tunemq_shared import wire

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    yield from farms(tmp_path)


def test_f24_trials_of_a_worker_that_is_told_to_stop_go_on_elsewhere_and_are_not_blamed(farm):
    farm.worker("one")
    search = farm.scheduler(trials=2, steps=80, save_every=5, step_s=0.05, gate=20)
    farm.wait_for_steps(2, 12, within=60)
    farm.worker("two")
    farm.workers["one"].send(signal.SIGTERM)
    log = farm.folder / "worker-one" / "node.log"
    eventually(lambda: "node.stopping" in log.read_text(), message=lambda: str(farm))
    farm.open_gate(80)  # before, the trials might have been over when it was told
    assert farm.workers["one"].ends() == 0, farm
    assert search.ends(90) == 0, farm
    farm.nothing_is_missing_or_doubled(2, 80)
    (lost,) = farm.all_of(m.NodeLost)
    assert lost.is_dead  # it said goodbye: nobody waited for its lease to run out
    assert len(farm.all_of(m.TrialPaused)) == 2
    assert not farm.all_of(m.HostDied)
    repeated = [len(done) - len(set(done)) for done in farm.steps().values()]
    assert max(repeated) <= 5


@pytest.mark.soak
def test_f24_a_worker_that_was_killed_and_started_again_is_another_one_at_once(farm):
    farm.worker("one")
    search = farm.scheduler(trials=2, steps=60, save_every=5, step_s=0.05)
    farm.wait_for_steps(2, 12, within=60)
    farm.workers["one"].kill()
    farm.worker("one")
    assert search.ends(90) == 0, farm
    farm.nothing_is_missing_or_doubled(2, 60)
    assert [lost.is_dead for lost in farm.all_of(m.NodeLost)] == [True]
    repeated = [len(done) - len(set(done)) for done in farm.steps().values()]
    assert max(repeated) <= 5


@pytest.mark.soak
def test_f24_of_two_workers_with_one_name_the_older_one_ends(farm):
    older = farm.worker("one")
    search = farm.scheduler(trials=1, steps=100, save_every=5, step_s=0.05)
    farm.wait_for_steps(1, 5, within=60)
    newer = farm.worker("one", 2, "--workdir", str(farm.folder / "another-workdir"))
    assert older.ends() == 76, farm
    assert search.ends(90) == 0, farm
    farm.nothing_is_missing_or_doubled(1, 100)
    assert newer.process.poll() is None


def test_f24_what_a_farm_leaves_in_redis_has_an_owner_or_an_expiry(farm):
    farm.worker("one")
    assert farm.scheduler(trials=2, steps=3, step_s=0.01).ends(60) == 0, farm
    for worker in farm.workers.values():
        worker.send(signal.SIGTERM)
        assert worker.ends() == 0, farm
    client = farm.redis.client
    for_ever = {key.decode() for key in client.keys("*") if client.ttl(key) == -1}
    # The farm's own, of which there is one each, whatever it did.
    assert for_ever <= {wire.GENERATION, wire.NODES, wire.TERM, wire.STREAMS}, for_ever
    # The next scheduler takes note of the goodbye, and removes what it is about.
    farm.worker("two")
    assert farm.scheduler("--name", "another").ends(60) == 0, farm
    eventually(lambda: client.xlen(wire.NODES) == 1)
