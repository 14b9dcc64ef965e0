"""A restored search uploads the checkpoints that only this machine has."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from tests.support.stores.object_servers import ObjectServer
from tests.unit.scheduler.scripted_loop import NODE, PLAN, result, started
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.storage.local_checkpoint_recovery import recover_local_checkpoints
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.checkpoints.open_store import open_store
from tunemq_shared.protocol import messages as m

pytestmark = pytest.mark.integration

KEY = "train_t_00000/checkpoint_1-000002"


@pytest.fixture
def plan(tmp_path: Path, minio: ObjectServer, bucket: str) -> ExperimentPlan:
    address = minio.address(bucket, "search")
    return msgspec.structs.replace(PLAN, store=address, cache=str(tmp_path / "cache"))


def write(plan: ExperimentPlan, key: str, step: int, content: str) -> m.CheckpointWritten:
    """Write a checkpoint to the node's cache, as a trial process does."""
    source = Path(plan.cache).parent / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    (source / "file").write_text(content, encoding="ascii")
    attempt, n = (int(part) for part in key.rpartition("checkpoint_")[2].split("-"))
    info = CheckpointInfo(trial="t_00000", attempt=attempt, n=n, step=step, metrics={}, state={})
    Path(plan.cache).mkdir(parents=True, exist_ok=True)
    put = LocalCheckpointStore(plan.cache).put_checkpoint(key, source, info)
    return m.CheckpointWritten("t_00000", attempt, n, step, key, put.sha256, put.size)


def left_by_a_run(written: m.CheckpointWritten) -> TrialRunner:
    """Return a runner that knows of a written checkpoint, but of no commit."""
    runner = TrialRunner(RunnerSettings())
    for event in (
        NODE,
        m.ConfigSuggested(0, "t_00000", b"\x80", "0", {"cpu": 1.0}),
        m.TrialChosen("t_00000"),
        started(),
        *(result(step) for step in range(1, 5)),
        written,
        result(5),
    ):
        runner.handle(event)
    return runner


def test_checkpoint_only_written_is_committed_and_resumed_from(plan: ExperimentPlan) -> None:
    runner = left_by_a_run(write(plan, KEY, 4, "content"))
    told: list[str] = []

    facts = recover_local_checkpoints(runner, plan, told.append)
    for fact in facts:
        runner.handle(fact)
    runner.handle(m.ExperimentResumed(2, 0.0))

    assert told == []
    assert [(fact.key, fact.step) for fact in facts] == [(KEY, 4)]
    runner.handle(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}))
    (order,) = runner.handle(m.TrialChosen("t_00000"))
    assert [(ref.key, ref.sha256) for ref in order.restore] == [(KEY, facts[0].sha256)]
    store = open_store(plan.store_address)
    target = Path(plan.cache).parent / "target"
    store.get_checkpoint(KEY, facts[0].sha256, target)
    store.close()
    assert [path.read_text(encoding="ascii") for path in target.rglob("file")] == ["content"]


@pytest.mark.parametrize("damage", ["gone", "changed", "another"])
def test_damaged_or_missing_checkpoint_is_reported_lost(plan: ExperimentPlan, damage: str) -> None:
    written = write(plan, KEY, 4, "content")
    runner, told = left_by_a_run(written), []
    if damage == "gone":
        shutil.rmtree(plan.cache)
    elif damage == "changed":
        (Path(plan.cache) / KEY / "files" / "file").write_text("c0ntent", encoding="ascii")
    else:
        shutil.rmtree(Path(plan.cache) / KEY)
        write(plan, KEY, 4, "another")

    assert recover_local_checkpoints(runner, plan, told.append) == []

    (text,) = told
    assert KEY in text
    assert "continues from the one before" in text
    runner.handle(m.ExperimentResumed(2, 0.0))
    assert not runner.live["t_00000"].has_checkpoint
    assert not runner.uploading


def test_last_checkpoint_is_committed_when_run_died_after_trial_ended(
    plan: ExperimentPlan,
) -> None:
    first, last = write(plan, KEY, 4, "4"), write(plan, KEY.replace("-000002", "-000003"), 5, "5")
    runner = left_by_a_run(first)
    for event in (last, m.TrialFinished("t_00000", 1), m.SlotFreed("t_00000", 1)):
        runner.handle(event)

    for fact in recover_local_checkpoints(runner, plan, lambda _text: None):
        runner.handle(fact)
    runner.handle(m.ExperimentResumed(2, 0.0))

    assert not runner.live
    summary = runner.summary("t_00000")
    assert [one.key for one in summary.checkpoints] == [first.key, last.key]
