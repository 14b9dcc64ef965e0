"""A withheld GPU, from the driver to the trials that wait for it, and its return."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.gpu_fixtures import uuids
from tests.support.fake_gpus import FOLDER, FakeGpus, gpu
from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.farm_service import FarmService, Here, Search
from tests.support.waiting import eventually
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_shared.protocol import farm_requests as r

__all__ = ["uuids"]

pytestmark = pytest.mark.integration


class MachineWithGpus(Here):
    """A machine with a fake GPU driver."""

    def __init__(self, gpus: FakeGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        sees = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{environ['PYTHONPATH']}"}
        return super().start(command, {**environ, **self._gpus.environment(), **sees}, log)


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    redis = TcpRedis(tmp_path)
    farm = FarmService(tmp_path, redis.url)
    try:
        farm.start_scheduler()
        yield farm
    finally:
        farm.close()
        redis.end()


def test_f23_trial_that_needs_a_gpu_in_use_waits_with_a_notice_and_runs_later(
    farm: FarmService, uuids: list[str], tmp_path: Path
) -> None:
    gpus = FakeGpus(tmp_path / "gpus.json", [gpu(uuid) for uuid in uuids])
    bad = uuids[1]
    gpus.hold(bad, os.getpid(), 20e9)
    farm.add_worker("one", 2, machine=MachineWithGpus(gpus))

    def withheld() -> list[str | None]:
        nodes = farm.nodes()
        return [one.withheld for one in nodes["one"].gpus] if "one" in nodes else []

    def is_set_aside() -> bool:
        return [bool(one) for one in withheld()] == [False, True]

    eventually(is_set_aside, within=60, message=lambda: f"{withheld()}{farm}")
    assert farm.nodes()["one"].total["gpu"] == 1
    assert farm.nodes()["one"].health == "1 of 2 GPUs set aside"
    farm.submit(Search(name="exp", trials=1, steps=2, resources={"cpu": 1, "gpu": 2}))
    words = f"GPU {bad} of node one is set aside: "

    def why() -> tuple[str, ...]:
        found = farm._ask(r.ExplainState(name="exp"), a.Explanation, "why exp")
        return found.lines if found is not None else ()

    def is_reported() -> bool:
        return any(line.startswith(words) for line in why())

    eventually(is_reported, within=60, message=lambda: f"{why()}{farm}")
    assert f"1 of 2 x {gpu(bad)['name']}" in farm.tunemq("nodes")
    gpus.release(bad, os.getpid())
    farm.wait_for("exp", "FINISHED")
    assert farm.nodes()["one"].total["gpu"] == 2
    assert words in farm.said()
    assert f"GPU {bad} of node one may be used again." in farm.said()
