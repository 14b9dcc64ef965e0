"""The GPUs of `tunemq worker`: those that trials see, and what it reports about its machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.farm_support import RedisServer, Scheduler, order
from tests.integration.gpu_fixtures import uuids
from tests.integration.node_fixtures import scheduler, server
from tests.support.farms.farm_processes import Command
from tests.support.other_users import NOBODY, reachable
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import decode_node_metrics
from tunemq_shared.protocol.messages import (
    Gpu,
    ResultReported,
    SlotFreed,
    TrialPaused,
    TrialProcessDied,
)
from tunemq_shared.protocol.registration import NodeRegistration

__all__ = ["scheduler", "server", "uuids"]

pytestmark = pytest.mark.integration


def reports_visible_devices(config):

    from tunemq_shared.trial.session import report

    report({"sees": os.environ.get("CUDA_VISIBLE_DEVICES", "anything")})


def saves_every_third_step(config):
    import tempfile
    import time
    from pathlib import Path

    from tunemq_shared.checkpoints.checkpoint import Checkpoint
    from tunemq_shared.trial.session import report

    step = 0
    while True:
        step += 1
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            report({"step": step}, checkpoint=Checkpoint(folder) if step % 3 == 0 else None)
        time.sleep(0.05)


class Worker(Command):
    def __init__(
        self, server: RedisServer, folder: Path, name: str, *more: str, **variables: str
    ) -> None:
        line = ["worker", "--redis", server.url, "--name", name, "--cpus", "4"]
        line += ["--workdir", str(folder / f"workdir-{name}"), *more]
        super().__init__(*line, log=folder / f"{name}.log", variables=variables)

    def registration(self, scheduler: Scheduler) -> NodeRegistration:
        found: list[NodeRegistration] = []

        def is_registered() -> bool:
            found[:] = [one for one in scheduler.registrations() if one.pid == self.process.pid]
            return bool(found)

        eventually(is_registered, message=lambda: f"no registration\n{self.said}")
        return found[-1]


@pytest.fixture
def worker(server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    running: list[Worker] = []

    def start(name: str, *more: str, **variables: str) -> Worker:
        running.append(Worker(server, tmp_path, name, *more, **variables))
        return running[-1]

    yield start
    for one in running:
        one.kill()


def seen(scheduler: Scheduler) -> dict[str, Any]:
    return {one.trial: one.metrics["sees"] for one in scheduler.said(ResultReported)}


def test_a_worker_announces_its_gpus_memory_and_other_resources(worker, scheduler, uuids):
    one = worker("one", "--gpus", ",".join(uuids), "--resources", '{"licence": 3}')
    registration = one.registration(scheduler)
    assert registration.gpus == tuple(map(Gpu, uuids))
    assert {name: registration.resources[name] for name in ("cpu", "gpu", "licence")} == {
        "cpu": 4.0,
        "gpu": 2.0,
        "licence": 3.0,
    }
    assert registration.resources["memory"] > 2**28
    one.says(uuids[1])


def test_trials_see_the_gpus_that_they_were_given_and_no_others(worker, scheduler, uuids):
    instance_id = worker("one", "--gpus", ",".join(uuids)).registration(scheduler).instance_id
    first, second = uuids
    given = {
        "whole": ({"gpu": 2.0}, {first: 1.0, second: 1.0}),
        "half": ({"gpu": 0.5}, {second: 0.5}),
        "other-half": ({"gpu": 0.5}, {second: 0.5}),
        "memory": ({"gpu_memory": 1e9}, {first: 0.25}),
        "none": ({"cpu": 1.0}, {}),
    }
    orders = [
        order(
            name,
            scheduler.start(
                reports_visible_devices, trial_number=number, resources=resources, devices=devices
            ),
        )
        for number, (name, (resources, devices)) in enumerate(given.items())
    ]
    scheduler.assign(instance_id, *orders)
    eventually(lambda: len(seen(scheduler)) == len(given))
    assert seen(scheduler) == {
        "whole": f"{first},{second}",
        "half": second,
        "other-half": second,
        "memory": first,
        "none": "",
    }


def test_trials_of_a_reused_process_see_their_own_gpu(worker, scheduler, uuids):
    instance_id = worker("one", "--gpus", ",".join(uuids)).registration(scheduler).instance_id
    for number, uuid in enumerate((*uuids, uuids[1])):
        start = scheduler.start(
            reports_visible_devices,
            trial_number=number,
            resources={"gpu": 1.0},
            devices={uuid: 1.0},
            reuse=True,
        )
        scheduler.assign(instance_id, order(f"t{number}", start))
        eventually(lambda: len(scheduler.said(SlotFreed)) == number + 1)  # noqa: B023
    assert seen(scheduler) == {"t0": uuids[0], "t1": uuids[1], "t2": uuids[1]}


def test_gpus_without_names_leave_the_visible_devices_unchanged(worker, scheduler):
    one = worker("one", "--gpus", "2", CUDA_VISIBLE_DEVICES="")
    registration = one.registration(scheduler)
    assert (registration.gpus, registration.resources["gpu"]) == ((), 2.0)
    start = scheduler.start(reports_visible_devices, resources={"gpu": 1.0}, devices={"0": 1.0})
    scheduler.assign(registration.instance_id, order("t", start))
    eventually(lambda: seen(scheduler) == {"t": "anything"})


def test_a_second_worker_on_a_gpu_is_refused_until_the_first_is_gone(worker, scheduler, uuids):
    first = worker("one", "--gpus", ",".join(uuids))
    first.registration(scheduler)
    rejected = worker("two", "--gpus", f"{uuids[1]},{uuids[1]}-other")
    assert rejected.ends() == 64
    assert f"GPU {uuids[1]} cannot be offered: used by" in rejected.said
    assert f"process {first.process.pid} (worker one)" in rejected.said
    first.kill()
    worker("three", "--gpus", f"{uuids[1]},").registration(scheduler)


def test_a_worker_of_root_starts_on_a_gpu_whose_lock_another_user_holds(worker, scheduler, uuids):
    holds = (
        "import sys; from tunemq_shared.protocol.messages import Gpu;"
        "from tunemq_workers.gpu.gpu_locks import take_gpus;"
        "take_gpus([Gpu(sys.argv[1])], 'trial');"
        "print('locked', flush=True); sys.stdin.read()"
    )
    line = [*reachable(NOBODY), sys.executable, "-c", holds, uuids[0]]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, cwd="/") as trial:
        assert trial.stdout is not None
        assert trial.stdout.readline() == "locked\n"
        one = worker("one", "--gpus", uuids[0])
        assert one.registration(scheduler).gpus == (Gpu(uuids[0]),)
        one.says(f"used by process {trial.pid} (trial)")
        trial.kill()


def test_gpus_that_cannot_be_offered_are_named(worker):
    for option, what in (("1,x y", "--gpus is '1,x y'"), ("100", "--gpus is 100")):
        rejected = worker("one", "--gpus", option)
        assert rejected.ends() == 64
        assert what in rejected.said
    rejected = worker("one", "--gpus", "1", "--resources", '{"gpu": 2}')
    assert rejected.ends() == 64
    assert "remove one of them" in rejected.said


def test_worker_publishes_node_metrics_with_its_lease(worker, scheduler):
    one = worker("one", "--gpus", "0")
    instance_id = one.registration(scheduler).instance_id
    key = redis_keys.node_metrics(instance_id)
    found = []

    def has_looked() -> bool:
        if said := scheduler.client.get(key):
            opened = scheduler.keys.events.open(said, b"node_metrics", instance_id.encode())
            found[:] = [decode_node_metrics(opened)]
        return bool(found) and found[0].load is not None

    eventually(has_looked)
    assert found[0].disk_free > 0
    assert found[0].version
    assert 0 < scheduler.client.pttl(key) <= redis_keys.LEASE_TTL_S * 1000
    one.send(signal.SIGTERM)
    assert one.ends() == 0
    assert not scheduler.client.exists(key)


def test_a_worker_that_is_to_retire_saves_its_trials_and_ends(worker, scheduler):
    one = worker("one", "--gpus", "0", "--grace", "60")
    instance_id = one.registration(scheduler).instance_id
    scheduler.assign(instance_id, order("t", scheduler.start(saves_every_third_step)))
    eventually(lambda: scheduler.said(ResultReported))
    scheduler.reply(instance_id, "r", "retired by ann")
    one.says("This worker is retiring (retired by ann)")
    eventually(lambda: scheduler.said(SlotFreed))
    assert scheduler.said(TrialPaused)
    scheduler.journal(instance_id, len(scheduler.events()))
    assert one.ends() == 0
    assert scheduler.deregistrations() == [instance_id]


def test_trial_of_a_stopping_worker_runs_until_it_has_saved(worker, scheduler):
    one = worker("one", "--gpus", "0", "--grace", "240")
    instance_id = one.registration(scheduler).instance_id
    scheduler.assign(instance_id, order("t", scheduler.start(saves_every_third_step)))
    eventually(lambda: len(scheduler.said(ResultReported)) >= 4)
    began = time.monotonic()
    one.send(signal.SIGTERM)
    eventually(lambda: scheduler.said(SlotFreed))
    assert time.monotonic() - began < 110  # it was not the plain pause, which comes after 120
    assert not scheduler.said(TrialProcessDied)
    assert scheduler.said(ResultReported)[-1].step % 3 == 0
    scheduler.journal(instance_id, len(scheduler.events()))
    assert one.ends() == 0
