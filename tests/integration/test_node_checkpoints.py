"""A node's checkpoints in a real MinIO: writing, uploading, downloading once, and waiting."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import (
    Node,
    RedisServer,
    Scheduler,
    children_of,
    command_line,
    order,
)
from tests.integration.node_fixtures import scheduler, server
from tests.support.proxies.counted_proxy import counted
from tests.support.stores.object_servers import ObjectServer, running_minio
from tests.support.waiting import eventually
from tunemq_shared.base.failpoints import VARIABLE as FAILPOINTS
from tunemq_shared.broker import redis_keys
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointLost,
    CheckpointRef,
    CheckpointWritten,
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialPaused,
    TrialProcessDied,
    TrialWaits,
)

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration

SIZE = 3_000_000


@pytest.fixture
def store(minio: ObjectServer, bucket: str) -> str:
    return minio.address(bucket, "runs/exp")


@pytest.fixture
def node(
    server: RedisServer, scheduler: Scheduler, minio: ObjectServer, tmp_path: Path
) -> Iterator[Node]:
    node = Node(server, scheduler, tmp_path / "node")
    yield node
    node.end()


def saving(config):
    """Save ``steps`` times, starting from a restored checkpoint; the weights never change."""
    import os
    import tempfile
    import time

    from tunemq_shared.checkpoints.checkpoint import Checkpoint
    from tunemq_shared.trial.session import get_checkpoint, report

    done = 0
    restored = get_checkpoint()
    if restored is not None:
        with restored.as_directory() as folder:
            with open(os.path.join(folder, "done")) as file:
                done = int(file.read())
            with open(os.path.join(folder, "weights"), "rb") as file:
                assert file.read() == b"w" * config["size"]
    for step in range(done + 1, config["steps"] + 1):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "weights"), "wb") as file:
                file.write(b"w" * config["size"])
            with open(os.path.join(folder, "done"), "w") as file:
                file.write(str(step))
            report({"step": step, "done_before": done}, checkpoint=Checkpoint(folder))
        time.sleep(config.get("pause_s", 0))


def start(scheduler, store, number=0, *, steps=3, size=SIZE, pause_s=0.0, **how):
    config = {"steps": steps, "size": size, "pause_s": pause_s}
    return scheduler.start(saving, config, store=store, trial_number=number, **how)


def keys(scheduler, kind):
    return [event.key for event in scheduler.said(kind)]


def downloads(node):
    """Return how many checkpoints the node has downloaded."""
    return node.log().count("checkpoint.downloaded")


def stored_bytes(minio, bucket):
    return sum(found.size for found in minio.client().list_objects(bucket, recursive=True))


def committed(scheduler, trial="t"):
    """Return a reference to the newest committed checkpoint."""
    *_, last = [event for event in scheduler.said(CheckpointCommitted) if event.trial == trial]
    return CheckpointRef(last.key, last.sha256, last.step)


def test_checkpoint_is_written_then_committed_and_the_node_is_idle(
    node, scheduler, store, minio, bucket
):
    scheduler.assign(node.instance_id, order("t", start(scheduler, store)))
    eventually(lambda: len(scheduler.said(CheckpointCommitted)) == 3, message=node.log)
    expected = [f"trial_0/checkpoint_1-{n:06d}" for n in (1, 2, 3)]
    assert keys(scheduler, CheckpointWritten) == keys(scheduler, CheckpointCommitted) == expected
    events = [
        (type(event), event.step)
        for event in scheduler.events()
        if isinstance(event, ResultReported | CheckpointWritten)
    ]
    assert events == [(kind, n) for n in (1, 2, 3) for kind in (ResultReported, CheckpointWritten)]
    # The weights were sent once.
    assert stored_bytes(minio, bucket) < 1.1 * SIZE
    shared = [event.shared for event in scheduler.said(CheckpointCommitted)]
    assert [len(each) for each in shared] == [0, 1, 1]
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert scheduler.said(TrialFinished)


def committed_by(node):
    """Return the names of trials whose checkpoints this node, or one before it, has committed."""
    return set(re.findall(r"checkpoint\.committed key=(\w+)/", node.log()))


def clone_ten(server, scheduler, store, ref, folder, first):
    """Restore ten trials from one checkpoint on a new node, and wait until each has saved again."""
    node = Node(server, scheduler, folder)
    try:
        starts = [
            start(scheduler, store, n, steps=2, restore=(ref,)) for n in range(first, first + 10)
        ]
        clones = [order(f"c{n}", begin) for n, begin in enumerate(starts)]
        names = {begin.trial_name for begin in starts}
        scheduler.assign(node.instance_id, *clones)
        eventually(lambda: names <= committed_by(node), message=node.log)
    finally:
        node.end()
    return node


def test_trials_cloned_from_one_checkpoint_download_it_once_per_node(
    server, minio, bucket, tmp_path
):
    with counted(minio.port) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        store = f"s3://{bucket}/exp?endpoint={endpoint}&region=us-east-1"
        scheduler = Scheduler(server, tmp_path)
        node = Node(server, scheduler, tmp_path / "first")
        try:
            scheduler.assign(node.instance_id, order("t", start(scheduler, store, steps=1)))
            eventually(lambda: scheduler.said(CheckpointCommitted), message=node.log)
        finally:
            node.end()
        assert proxy.moved > SIZE
        ref = committed(scheduler)
        proxy.moved = 0
        same = clone_ten(server, scheduler, store, ref, node.folder, 1)
        assert downloads(same) == 0
        assert proxy.moved < 0.01 * 10 * SIZE
        proxy.moved = 0
        other = clone_ten(server, scheduler, store, ref, tmp_path / "other", 11)
        assert downloads(other) == 1
        assert SIZE < proxy.moved < SIZE + 0.01 * 10 * SIZE


def test_node_waits_for_a_missing_store_with_a_notice_and_skips_no_checkpoint(
    server, scheduler, tmp_path, monkeypatch
):
    with running_minio(tmp_path / "minio") as minio:
        for name, value in minio.environ.items():
            monkeypatch.setenv(name, value)
        minio.create_bucket("mine")
        node = Node(server, scheduler, tmp_path / "node")
        try:
            minio.stop()
            begin = start(scheduler, minio.address("mine", "exp"), steps=6, size=1000)
            scheduler.assign(node.instance_id, order("t", begin))
            eventually(
                lambda: any(": " in event.reason for event in scheduler.said(TrialWaits)),
                message=node.log,
            )
            waits = scheduler.said(TrialWaits)[0]
            assert (waits.trial, waits.attempt, waits.what) == ("t", 1, "save")
            assert len(scheduler.said(CheckpointWritten)) == 2
            assert len(scheduler.said(ResultReported)) == 3
            minio.start()
            eventually(lambda: len(scheduler.said(CheckpointCommitted)) == 6, message=node.log)
        finally:
            node.end()
    assert keys(scheduler, CheckpointCommitted) == keys(scheduler, CheckpointWritten)
    assert scheduler.said(TrialWaits)[-1].what == ""
    assert not scheduler.said(TrialFailed)


def test_store_that_stays_away_fails_the_trial_after_sync_timeout(
    server, scheduler, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "is there")
    store = "s3://mine/exp?endpoint=http://127.0.0.1:1&region=us-east-1"
    node = Node(server, scheduler, tmp_path / "node")
    try:
        begin = start(scheduler, store, steps=9, size=10, sync_timeout_s=5)
        scheduler.assign(node.instance_id, order("t", begin))
        eventually(lambda: scheduler.said(SlotFreed), within=60, message=node.log)
        # Each upload has as long as the trial that waits for them, and is given up before or after.
        written = keys(scheduler, CheckpointWritten)
        eventually(lambda: keys(scheduler, CheckpointLost) == written, message=node.log)
    finally:
        node.end()
    (failed,) = scheduler.said(TrialFailed)
    assert failed.kind == "storage"
    assert "127.0.0.1:1" in failed.error
    assert not scheduler.said(TrialProcessDied)


def test_a_paused_trial_saves_though_the_store_is_away(server, scheduler, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "is there")
    store = "s3://mine/exp?endpoint=http://127.0.0.1:1&region=us-east-1"
    node = Node(server, scheduler, tmp_path / "node")
    try:
        scheduler.assign(node.instance_id, order("t", start(scheduler, store, steps=9, size=10)))
        eventually(lambda: scheduler.said(TrialWaits), message=node.log)
        scheduler.assign(node.instance_id, order("t", None, pause=True))
        eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    finally:
        node.end()
    assert scheduler.said(TrialPaused)
    assert len(scheduler.said(CheckpointWritten)) == 3


def naming_a_false_size(config):
    """Save once, say that the checkpoint has 200 GB, and run on."""
    import os
    import tempfile
    import threading
    from functools import partial

    from tunemq_shared.checkpoints.checkpoint import Checkpoint
    from tunemq_shared.trial.session import report
    from tunemq_workers.trial_process import cache_sink

    def written(real, *said):
        return real(*said[:-1], 200 * 10**9)

    cache_sink.CheckpointWritten = partial(written, cache_sink.CheckpointWritten)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "done"), "w") as file:
            file.write("1")
        report({"step": 1}, checkpoint=Checkpoint(folder))
    threading.Event().wait()


def test_trial_that_names_a_false_size_of_its_checkpoint_fails(node, scheduler, store):
    begin = scheduler.start(naming_a_false_size, {}, store=store)
    scheduler.assign(node.instance_id, order("t", begin))
    eventually(lambda: scheduler.said(TrialFailed), message=node.log)
    (failed,) = scheduler.said(TrialFailed)
    assert failed.kind == "storage"
    assert "has 1 bytes, and its trial's process said 200000000000." in failed.error


def test_uploads_continue_after_the_trial_and_a_new_node_reuses_them(
    server, scheduler, store, minio, tmp_path
):
    node = Node(server, scheduler, tmp_path / "node")
    try:
        scheduler.assign(node.instance_id, order("t", start(scheduler, store, steps=2)))
        eventually(lambda: len(scheduler.said(CheckpointCommitted)) == 2, message=node.log)
        ref = committed(scheduler)
        scheduler.assign(node.instance_id)
        node.process.kill()
        node.process.wait()
        again = Node(server, Scheduler(server, tmp_path, "exp"), tmp_path / "node")
    finally:
        node.end()
    try:
        begin = start(scheduler, store, steps=3, restore=(ref,))
        scheduler.assign(again.instance_id, order("t", begin, attempt=2))
        cache = next((tmp_path / "node" / "cache").iterdir())
        eventually(
            (cache / "trial_0" / "checkpoint_2-000001" / "committed.json").exists,
            message=again.log,
        )
        assert downloads(again) == 0
    finally:
        again.end()


def test_damaged_copy_on_the_disk_is_downloaded_again(node, scheduler, store, tmp_path):
    scheduler.assign(node.instance_id, order("t", start(scheduler, store, steps=1)))
    eventually(lambda: scheduler.said(CheckpointCommitted), message=node.log)
    # An unfinished trial would be killed for its successor.
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    ref = committed(scheduler)
    (weights,) = (tmp_path / "node" / "cache").glob(f"*/{ref.key}/files/weights")
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.write(b"W")
    begin = start(scheduler, store, steps=2, restore=(ref,))
    scheduler.assign(node.instance_id, order("t", begin, attempt=2))
    eventually(lambda: len(scheduler.said(TrialFinished)) == 2, message=node.log)
    assert downloads(node) == 1
    assert not scheduler.said(CheckpointDamaged)


def test_killed_transfers_process_loses_nothing(node, scheduler, store):
    begin = start(scheduler, store, steps=8, pause_s=0.2)
    scheduler.assign(node.instance_id, order("t", begin))
    eventually(lambda: scheduler.said(CheckpointCommitted), message=node.log)
    for pid in children_of(node.process.pid):
        if b"tunemq_workers.transfers" in command_line(pid):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(scheduler.said(CheckpointCommitted)) == 8, message=node.log)
    assert keys(scheduler, CheckpointCommitted) == keys(scheduler, CheckpointWritten)


def test_cache_of_a_finished_experiment_is_removed(node, scheduler, store):
    scheduler.assign(node.instance_id, order("t", start(scheduler, store, steps=1)))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    eventually(lambda: scheduler.said(CheckpointCommitted), message=node.log)
    scheduler.assign(node.instance_id)
    assert list((node.folder / "cache").iterdir())
    scheduler.journal(node.instance_id, redis_keys.EVERYTHING)
    eventually(lambda: not list((node.folder / "cache").iterdir()), message=node.log)


def test_trial_processes_write_to_a_local_store_directly(node, scheduler, tmp_path):
    store = str(tmp_path / "local")
    (tmp_path / "local").mkdir()
    scheduler.assign(node.instance_id, order("t", start(scheduler, store, steps=2, size=10)))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert keys(scheduler, CheckpointCommitted) == LocalCheckpointStore(store).list_checkpoints()
    assert not scheduler.said(CheckpointWritten)
    assert not (node.folder / "cache").exists()
    assert not (node.folder / "logs" / "transfers.log").exists()


def test_trial_killed_at_a_failpoint_leaves_no_file(
    server, scheduler, store, minio, tmp_path, monkeypatch
):
    monkeypatch.setenv(FAILPOINTS, "cache.after_rename=kill@2")
    node = Node(server, scheduler, tmp_path / "node")
    try:
        begin = start(scheduler, store, steps=3)
        scheduler.assign(node.instance_id, order("t", begin))
        eventually(lambda: scheduler.said(SlotFreed), message=node.log)
        (died,) = scheduler.said(TrialProcessDied)
        assert died.signal == signal.SIGKILL
        (written,) = keys(scheduler, CheckpointWritten)
        (root,) = (tmp_path / "node" / "cache").iterdir()
        eventually(
            lambda: LocalCheckpointStore(root).list_checkpoints() == [written], message=node.log
        )
    finally:
        node.end()


@pytest.mark.parametrize("option", ["--cache-bytes", "--disk-bytes"])
def test_a_wrong_size_of_the_cache_is_named(tmp_path, server, option):
    import subprocess
    import sys

    command = [
        sys.executable,
        "-P",
        "-m",
        "tunemq_workers.node.node_process",
        "--redis",
        server.url,
    ]
    options = ["--name", "n", "--workdir", str(tmp_path / "node"), option, "much"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert f"{option} is 'much'" in done.stderr
    shutil.rmtree(tmp_path / "node")
