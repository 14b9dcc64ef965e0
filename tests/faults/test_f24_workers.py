"""Workers of a farm are stopped, replaced and restarted while an experiment runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.waiting import descendants, eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path) as farm:
        farm.add_worker("one")
        yield farm


def submit(farm: FarmService, **options: float) -> None:
    """Submit a search whose trials wait behind step 20, if they have that many steps."""
    farm.submit(Search(name="search", failures=0, has_gate=True, **options))
    farm.open_gate("search", 20)


def test_f24_trials_of_a_stopped_worker_continue_elsewhere_without_blame(farm):
    submit(farm, trials=2, steps=80, save_every=5, step_s=0.05)
    farm.wait_for_steps("search", 2, 12)
    farm.add_worker("two")
    farm.workers["one"].send_signal(signal.SIGTERM)
    eventually(
        lambda: any(
            "node.stopping" in log.read_text() for log in (farm.folder / "one").rglob("node.log")
        ),
        message=lambda: str(farm),
    )
    farm.open_gate("search", 80)  # earlier, the trials might outrun SIGTERM
    assert farm.workers["one"].wait(60) == 0, farm
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")
    (lost,) = farm.events("search", m.NodeLost)
    assert lost.is_dead  # it deregistered, so the scheduler did not wait for its lease to expire
    assert len(farm.events("search", m.TrialPaused)) == 2
    assert not farm.events("search", m.TrialProcessDied)
    repeated = [len(done) - len(set(done)) for done in farm.steps("search").values()]
    assert max(repeated) <= 5


def test_f24_sigterm_to_all_processes_of_a_worker_blames_no_trial(farm):
    """As a shutdown, or a supervisor that signals each process, ends them."""
    submit(farm, trials=2, steps=80, save_every=5, step_s=0.05)
    farm.wait_for_steps("search", 2, 12)
    one = farm.workers["one"]
    for pid in [*sorted(descendants(one.pid), reverse=True), one.pid]:
        os.kill(pid, signal.SIGTERM)
    assert one.wait(60) == 0, farm
    farm.add_worker("two")
    farm.open_gate("search", 80)
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")
    assert not farm.events("search", m.TrialProcessDied)
    assert not farm.events("search", m.TrialFailed)


#: Trials that handle SIGTERM themselves.
HANDLERS = """
import os, signal, sys, time
import tunemq as tune

def train(config):
    signals = []

    def handle(*_):
        signals.append(1)
        if config["how"] == "exit":
            sys.exit(0)
        if config["how"] == "raise":
            raise RuntimeError("SIGTERM was received")

    signal.signal(signal.SIGTERM, handle)
    kept = tune.get_checkpoint()
    step = 0 if kept is None else kept.to_dict()["step"]
    while step < 60 and not (signals and config["how"] == "return"):
        step += 1
        time.sleep(0.05)
        tune.report({"loss": step}, checkpoint=tune.Checkpoint.from_dict({"step": step}))

tuner = tune.Tuner(
    train,
    param_space={"how": tune.grid_search(["exit", "raise", "return", "ignore"])},
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
)
"""


@pytest.mark.parametrize("is_node_first", [True, False])
def test_f24_trials_that_handle_sigterm_continue_elsewhere(tmp_path: Path, is_node_first: bool):
    (tmp_path / "handlers.py").write_text(HANDLERS)
    with farm_service(tmp_path) as farm:
        one = farm.add_worker("one", 4)
        farm.tunemq("submit", str(tmp_path / "handlers.py"), "--name", "search", "--detach")

        def steps() -> list[list[int]]:
            return [[row["loss"] for row in rows] for rows in farm.recorded("search").values()]

        def have_begun() -> bool:
            return len(steps()) == 4 and min(map(len, steps())) >= 10

        eventually(have_begun, within=90, message=lambda: str(farm))
        pids = [*sorted(descendants(one.pid), reverse=True), one.pid]
        for pid in reversed(pids) if is_node_first else pids:
            with suppress(ProcessLookupError):  # the node has ended it already
                os.kill(pid, signal.SIGTERM)
        assert one.wait(60) == 0, farm
        farm.add_worker("two", 4)
        farm.wait_for("search", "FINISHED")
        assert steps() == [list(range(1, 61))] * 4


def test_f24_sigterm_to_all_processes_of_a_scheduler_ends_no_search(farm):
    submit(farm, trials=2, steps=40, save_every=5, step_s=0.05)
    farm.wait_for_steps("search", 2, 12)
    pids = [*sorted(descendants(farm.scheduler.pid), reverse=True), farm.scheduler.pid]
    assert len(pids) > 1
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert farm.scheduler.wait(60) == 0, farm
    farm.start_scheduler()
    farm.open_gate("search", 40)
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")


def test_f24_sigterm_to_a_forkserver_ends_no_trial(farm):
    submit(farm, trials=1, steps=40, save_every=5, step_s=0.05)
    farm.wait_for_steps("search", 1, 5)
    children = descendants(farm.workers["one"].pid)
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    forkservers = [pid for pid in children if names[pid] == "tunemq-fork"]
    for pid in forkservers:
        os.kill(pid, signal.SIGTERM)
    assert forkservers
    farm.open_gate("search", 40)
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")
    (done,) = farm.steps("search").values()
    assert len(done) == len(set(done))  # none twice, so there was one attempt


def stop_worker(farm: FarmService, name: str) -> None:
    """Send SIGTERM to a worker; return when the scheduler knows."""
    farm.workers[name].send_signal(signal.SIGTERM)

    def is_known() -> bool:
        row = farm.nodes().get(name)
        return row is not None and row.state == "draining"

    eventually(is_known, within=60, message=lambda: f"{farm.nodes()}{farm}")


def test_f24_workers_stopped_within_one_step_of_a_trial_do_not_make_it_poison(tmp_path: Path):
    with farm_service(tmp_path) as farm:
        one = farm.add_worker("one", 2, "--grace", "0.2")
        submit(farm, trials=1, steps=40, save_every=5)
        for life in range(1, 5):
            farm.wait_for_gate("search", 21, life)
            one.send_signal(signal.SIGTERM)
            assert one.wait(60) == 0, farm
            one = farm.add_worker("one", 2, "--grace", "0.2")
        farm.open_gate("search", 40)
        farm.wait_for("search", "FINISHED")
        farm.check_results("search")


def test_f24_free_slot_of_a_worker_that_is_being_stopped_gets_no_trial(tmp_path: Path):
    with farm_service(tmp_path) as farm:
        one = farm.add_worker("one", 2, "--grace", "600")
        submit(farm, trials=1, steps=40, save_every=5)
        farm.wait_for_gate("search", 21, 1)
        stop_worker(farm, "one")  # it waits for the trial, which waits within a step
        farm.submit(Search(name="second", trials=2, steps=3))
        farm.add_worker("two")
        farm.wait_for("second", "FINISHED")
        assert one.poll() is None
        # One that was placed on the node that ends would have been placed a second time.
        assert len(farm.events("second", m.TrialChosen)) == 2
        farm.check_steps("second")
        farm.open_gate("search", 40)
        assert one.wait(60) == 0, farm
        farm.wait_for("search", "FINISHED")
        farm.check_results("search")


def test_f24_workers_stopped_one_after_another_get_no_trial(tmp_path: Path):
    with farm_service(tmp_path) as farm:
        workers = [farm.add_worker(name, 2, "--grace", "600") for name in ("one", "two")]
        farm.has_nodes("one", "two")
        submit(farm, trials=3, steps=40, save_every=1)
        farm.wait_for_gate("search", 21, 3)
        for name in ("one", "two"):
            stop_worker(farm, name)
        farm.open_gate("search", 40)
        for worker in workers:
            assert worker.wait(60) == 0, farm
        assert len(farm.events("search", m.TrialChosen)) == 3
        farm.add_worker("three", 3)
        farm.wait_for("search", "FINISHED")
        farm.check_results("search")
        farm.check_steps("search")
        assert len(farm.events("search", m.TrialChosen)) == 6


@pytest.mark.soak
def test_f24_restarted_worker_is_a_new_node_at_once(farm):
    submit(farm, trials=2, steps=60, save_every=5, step_s=0.05)
    farm.wait_for_steps("search", 2, 12)
    farm.workers["one"].kill()
    farm.add_worker("one")
    farm.open_gate("search", 60)
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")
    assert [lost.is_dead for lost in farm.events("search", m.NodeLost)] == [True]
    repeated = [len(done) - len(set(done)) for done in farm.steps("search").values()]
    assert max(repeated) <= 5


@pytest.mark.soak
def test_f24_of_two_workers_with_one_name_the_older_one_ends(farm):
    older = farm.workers["one"]
    submit(farm, trials=1, steps=100, save_every=5, step_s=0.05)
    farm.wait_for_steps("search", 1, 5)
    newer = farm.add_worker("one", 2, "--workdir", str(farm.folder / "another-workdir"))
    assert older.wait(60) == 76, farm
    farm.open_gate("search", 100)
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")
    assert newer.poll() is None


def test_f24_each_redis_key_of_a_farm_has_an_owner_or_an_expiry(farm):
    submit(farm, trials=2, steps=3, step_s=0.01)
    farm.wait_for("search", "FINISHED")
    farm.workers["one"].send_signal(signal.SIGTERM)
    assert farm.workers["one"].wait(60) == 0, farm
    farm.scheduler.send_signal(signal.SIGTERM)
    assert farm.scheduler.wait(60) == 0, farm
    client = farm.redis.client
    for_ever = {key.decode() for key in client.keys("*") if client.ttl(key) == -1}
    # The farm's own keys: one of each, after any number of workers.
    own = {
        redis_keys.GENERATION,
        redis_keys.NODES,
        redis_keys.TERM,
        redis_keys.STREAMS,
        redis_keys.FARM,
        redis_keys.REQUESTS,
    }
    assert for_ever <= {*own, redis_keys.events("farm")}, for_ever
    # The next scheduler reads the deregistration, and removes the node's keys.
    farm.add_worker("two")
    farm.start_scheduler()
    eventually(lambda: client.xlen(redis_keys.NODES) == 1)
