"""A node reports its trials' GPU use: real processes on fake GPUs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.integration.farm_support import Node, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.fake_gpus import FakeGpus, gpu, remove_locks
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import DevicesUsed, ResultReported, SlotFreed

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration


def takes_memory(config):
    import time
    from pathlib import Path

    from tunemq_shared.trial.session import report

    folder = Path(config["held"])
    folder.mkdir(exist_ok=True)
    name = f"{os.getpid()}@{os.environ['CUDA_VISIBLE_DEVICES']}"
    (folder / f".{name}").write_text(str(config["takes"]))
    (folder / f".{name}").replace(folder / name)
    report({"has": config["takes"]})
    while not Path(config["gate"]).exists():
        time.sleep(0.01)


@pytest.fixture
def uuid() -> Iterator[str]:
    """Yield the unique UUID of a fake GPU."""
    uuid = f"GPU-test-{secrets.token_hex(6)}"
    yield uuid
    remove_locks(uuid)


def test_two_halves_of_a_gpu_are_told_apart_by_memory_and_share_its_energy(
    tmp_path, monkeypatch, server, scheduler, uuid
):
    fake = FakeGpus(tmp_path / "gpus.json", [gpu(uuid, energy_mj=1_000_000, utilisation=40)])
    fake.install(monkeypatch)
    gate = tmp_path / "gate"
    node = Node(server, scheduler, tmp_path / "node", "--gpus", uuid)
    try:
        takes = {"small": 3e9, "large": 20e9}
        orders = []
        for number, (trial, memory) in enumerate(takes.items()):
            config = {"held": f"{fake.file}.held", "takes": memory, "gate": str(gate)}
            how = {"resources": {"gpu": 0.5}, "devices": {uuid: 0.5}}
            begin = scheduler.start(takes_memory, config, trial_number=number, **how)
            orders.append(order(trial, begin))
        scheduler.assign(node.instance_id, *orders)
        eventually(lambda: len(scheduler.said(ResultReported)) == 2, within=60)
        # Use counts from the first snapshot on; the fake driver notes a question before it answers.
        eventually(lambda: fake.energy_questions() >= 2)
        fake.change(uuid, energy_mj=5_000_000)
        before = fake.energy_questions()
        # Questions of a running look, of a second one, and of a third: by then the second is
        # reported.
        eventually(lambda: fake.energy_questions() >= before + 3, within=60)
        gate.touch()
        eventually(lambda: len(scheduler.said(SlotFreed)) == 2, within=60)
    finally:
        node.end()

    events = scheduler.events()
    for trial, memory in takes.items():
        used = [one for one in events if isinstance(one, DevicesUsed) and one.trial == trial]
        freed = [one for one in events if isinstance(one, SlotFreed) and one.trial == trial]
        assert events.index(used[0]) < events.index(freed[0])
        ((use,),) = (one.devices for one in used)
        assert (use.uuid, use.model, use.share) == (uuid, "NVIDIA H100 80GB HBM3", 0.5)
        assert use.memory_peak == memory
        assert use.energy_j == 2000  # half of what the device took meanwhile
        assert use.utilisation == pytest.approx(0.4)
        assert use.seconds > 0
