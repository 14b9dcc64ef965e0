"""GPUs of a real node with a fake driver: leftover memory, foreign processes, and defects."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator

import pytest

from tests.integration.farm_support import Node, is_alive, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.fake_gpus import FakeGpus, gpu, remove_locks
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import (
    NodeWarned,
    ResultReported,
    SlotFreed,
    TrialPaused,
    TrialProcessDied,
    TrialStarted,
    TrialWaits,
)

__all__ = ["scheduler", "server"]

pytestmark = [pytest.mark.integration, pytest.mark.faults]


def takes_memory(config):
    import os
    import subprocess
    import sys
    import time
    from pathlib import Path

    from tunemq_shared.trial.session import report

    def hold(pid, size):
        folder = Path(config["held"])
        folder.mkdir(exist_ok=True)
        name = f"{pid}@{os.environ['CUDA_VISIBLE_DEVICES']}"
        new = folder / f"{name}.new"  # the fake driver reads files whose names end with a UUID
        new.write_text(str(size))
        new.replace(folder / name)

    hold(os.getpid(), config["takes"])
    # A data loader in a separate session, which only the node ends.
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    loader = subprocess.Popen(sleep, start_new_session=True).pid if config["loads"] else 0
    if loader:
        hold(loader, 1e9)
    report({"pid": os.getpid(), "loader": loader})
    while not Path(config["gate"]).exists():
        time.sleep(0.01)


class Gpus:
    """A node with two GPUs, and trials on them."""

    def __init__(self, tmp_path, monkeypatch, server, scheduler, uuids):
        self.a, self.b = uuids
        self.fake = FakeGpus(tmp_path / "gpus.json", [gpu(self.a), gpu(self.b)])
        self.fake.install(monkeypatch)
        self.scheduler, self._orders = scheduler, {}
        self.gate = tmp_path / "gate"
        self.node = Node(server, scheduler, tmp_path / "node", "--gpus", ",".join(uuids))

    def begin(self, trial, uuid, share=1.0, *, takes=30e9, loads=False):
        """Have the node start a trial beside those that it runs."""
        held = f"{self.fake.file}.held"
        config = {"held": held, "takes": takes, "gate": str(self.gate), "loads": loads}
        start = self.scheduler.start(
            takes_memory,
            config,
            trial_number=len(self._orders),
            resources={"gpu": share},
            devices={uuid: share},
        )
        self._orders[trial] = order(trial, start)
        self.scheduler.assign(self.node.instance_id, *self._orders.values())

    def forget(self, trial):
        """Remove the trial from the node's orders after its end."""
        del self._orders[trial]

    def said(self, kind, trial):
        """Return the trial's events of this kind."""
        return [event for event in self.scheduler.said(kind) if event.trial == trial]

    def runs(self, trial):
        """Return the trial's report, once it has taken its memory."""
        eventually(lambda: self.said(ResultReported, trial), within=60, message=self.node.log)
        return self.said(ResultReported, trial)[0].metrics

    def withheld(self):
        """Return the withheld GPUs that the node reports."""
        return self.scheduler.registrations()[-1].withheld


@pytest.fixture
def gpus(tmp_path, monkeypatch, server, scheduler) -> Iterator[Gpus]:
    uuids = [f"GPU-test-{secrets.token_hex(6)}" for _ in range(2)]
    gpus = Gpus(tmp_path, monkeypatch, server, scheduler, uuids)
    yield gpus
    gpus.node.end()
    remove_locks(*uuids)


def test_no_trial_process_starts_before_gpu_memory_of_a_killed_one_is_free(gpus):
    gpus.begin("killed", gpus.a)
    pid = gpus.runs("killed")["pid"]
    gpus.fake.change(gpus.a, keeps_memory=True)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: gpus.said(SlotFreed, "killed"), within=30)
    assert gpus.said(TrialProcessDied, "killed")[0].signal == signal.SIGKILL
    gpus.forget("killed")
    gpus.begin("next", gpus.a)
    gpus.begin("beside", gpus.b)
    gpus.runs("beside")  # it came later, and waits for no other trial
    eventually(lambda: gpus.said(TrialWaits, "next"), within=30)
    (waits,) = gpus.said(TrialWaits, "next")
    assert waits.what == "device"
    assert f"GPU {gpus.a}: memory not released" in waits.reason
    assert not gpus.said(TrialStarted, "next")
    gpus.fake.change(gpus.a, keeps_memory=False)
    gpus.runs("next")
    assert gpus.said(TrialWaits, "next")[1].what == ""
    assert gpus.withheld() == {}


def test_gpu_half_is_reused_when_the_process_tree_of_the_dead_trial_is_gone(gpus):
    gpus.begin("stays", gpus.a, 0.5)
    gpus.begin("killed", gpus.a, 0.5, loads=True)
    killed, stays = gpus.runs("killed"), gpus.runs("stays")
    os.kill(killed["pid"], signal.SIGKILL)
    eventually(lambda: gpus.said(SlotFreed, "killed"), within=30)
    assert not is_alive(killed["loader"])
    gpus.forget("killed")
    gpus.begin("next", gpus.a, 0.5)
    gpus.runs("next")
    assert is_alive(stays["pid"])
    gpus.gate.touch()
    eventually(lambda: gpus.said(SlotFreed, "next") and gpus.said(SlotFreed, "stays"), within=30)
    assert gpus.withheld() == {}


def test_foreign_process_on_a_gpu_is_named_and_a_large_one_has_it_withheld(gpus):
    gpus.begin("trial", gpus.a)
    gpus.runs("trial")
    me = os.getpid()
    gpus.fake.hold(gpus.a, me, 2e9)
    eventually(lambda: gpus.scheduler.said(NodeWarned), within=30)
    (warned,) = gpus.scheduler.said(NodeWarned)
    assert f"GPU {gpus.a} is used by a process that is not of this farm: process {me} (" in (
        warned.text
    )
    assert warned.text.endswith("holds 1.86 GiB")
    assert gpus.withheld() == {}
    gpus.fake.hold(gpus.a, me, 9e9)
    eventually(gpus.withheld, within=30)
    assert list(gpus.withheld()) == [gpus.a]
    assert f"not of this farm: process {me} (" in gpus.withheld()[gpus.a]
    gpus.fake.release(gpus.a, me)
    eventually(lambda: gpus.withheld() == {}, within=30)
    assert not gpus.said(SlotFreed, "trial")


def test_broken_gpu_is_withheld_for_good_and_gpu_error_of_a_trial_is_not(gpus):
    gpus.begin("guilty", gpus.a)
    gpus.runs("guilty")
    gpus.fake.xid(gpus.a, 31)
    eventually(lambda: "XID 31" in gpus.node.log(), within=30)
    assert any("gpu.xid" in line and "guilty/1" in line for line in gpus.node.log().splitlines())
    gpus.fake.xid(gpus.b, 79)
    gpus.fake.change(gpus.a, ecc_uncorrected=1)
    eventually(lambda: set(gpus.withheld()) == {gpus.a, gpus.b}, within=30)
    assert "XID 79" in gpus.withheld()[gpus.b]
    assert "ECC" in gpus.withheld()[gpus.a]
    gpus.fake.change(gpus.a, ecc_uncorrected=0)
    gpus.begin("late", gpus.b)  # the scheduler does not know about it yet
    eventually(lambda: gpus.said(SlotFreed, "late"), within=30)
    assert gpus.said(TrialPaused, "late")
    assert not gpus.said(TrialStarted, "late")
    assert set(gpus.withheld()) == {gpus.a, gpus.b}
    assert not gpus.said(SlotFreed, "guilty")
