"""A node is killed while it, its trial processes and transfers write; the next node cleans up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_forkserver_death import SOON, with_a_daemon
from tests.integration.farm_support import (
    CACHES,
    Node,
    RedisServer,
    Scheduler,
    command_line,
    is_alive,
    order,
    process_tree_of,
)
from tests.integration.node_fixtures import scheduler, server
from tests.integration.test_node_checkpoints import SIZE, committed, keys, start
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tunemq_shared.base.failpoints import VARIABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.checkpoints.checkpoint_markers import TEMPORARY_PREFIX
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointWritten,
    ResultReported,
    TrialFinished,
)

__all__ = ["scheduler", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.fixture
def store(minio: ObjectServer, bucket: str) -> str:
    return minio.address(bucket, "runs/exp")


def files_in(folder: Path) -> list[str]:
    """Return all files in a node's working folder except logs; some may vanish meanwhile."""
    found = [
        os.path.relpath(os.path.join(at, name), folder)
        for at, folders, files in os.walk(folder)
        for name in (*folders, *files)
    ]
    return [name for name in found if not name.endswith(".log")]


def the_next_one_leaves_only_logs(
    server: RedisServer, scheduler: Scheduler, node: Node, folder: Path
) -> None:
    """Kill a node, start another one in its place, and check that only caches and logs remain."""
    process_tree = process_tree_of(node.process.pid)
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait()
    eventually(lambda: not any(map(is_alive, process_tree)))
    again = Node(server, scheduler, folder)
    try:
        scheduler.journal(again.instance_id, redis_keys.EVERYTHING)
        eventually(
            lambda: set(files_in(folder)) <= CACHES,
            message=lambda: f"{files_in(folder)}\n{again.log()}",
        )
    finally:
        again.end()
    assert set(files_in(folder)) <= CACHES


def test_f01_killed_node_with_stopped_processes_leaves_no_process(
    server, scheduler, store, tmp_path
):
    node = Node(server, scheduler, tmp_path / "node")
    begin = start(scheduler, store, steps=1)
    daemon = scheduler.start(with_a_daemon, trial_number=1)
    scheduler.assign(node.instance_id, order("t", begin), order("with a daemon", daemon))
    eventually(lambda: keys(scheduler, CheckpointCommitted), message=node.log)
    eventually(lambda: len(scheduler.said(ResultReported)) == 2, message=node.log)
    process_tree = process_tree_of(node.process.pid)
    lines = b" ".join(map(command_line, process_tree))
    for each in (
        b"tunemq_workers.forkservers.forkserver",
        b"tunemq_workers.broker.celery_consumer",
        b"tunemq_workers.transfers",
    ):
        assert each in lines
    for pid in process_tree[1:]:
        os.kill(pid, signal.SIGSTOP)
    node.process.kill()
    node.process.wait()
    try:
        eventually(lambda: not any(map(is_alive, process_tree)), within=SOON)
    finally:
        for pid in filter(is_alive, process_tree):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("failpoint", "seen"),
    [
        ("cache.after_copy", "cache/*/.staging/*/files/weights"),
        ("cache.after_rename", "cache/*/*/checkpoint_1-000001/files/weights"),
        ("upload.before_object", "cache/*/*/checkpoint_1-000001/manifest.json"),
        ("upload.before_manifest", "cache/*/*/checkpoint_1-000001/manifest.json"),
        ("upload.after_committed_file", "cache/*/*/checkpoint_1-000001/committed.json"),
    ],
)
def test_f01_node_killed_during_upload_leaves_only_logs(
    server, scheduler, store, tmp_path, monkeypatch, failpoint, seen
):
    folder = tmp_path / "node"
    monkeypatch.setenv(VARIABLE, f"{failpoint}=delay:60")
    node = Node(server, scheduler, folder)
    monkeypatch.delenv(VARIABLE)
    scheduler.assign(node.instance_id, order("t", start(scheduler, store)))
    eventually(lambda: list(folder.glob(seen)), message=node.log)
    the_next_one_leaves_only_logs(server, scheduler, node, folder)


def test_f01_node_killed_during_download_leaves_only_logs(
    server, scheduler, store, tmp_path, monkeypatch
):
    first = Node(server, scheduler, tmp_path / "first")
    try:
        scheduler.assign(first.instance_id, order("t", start(scheduler, store, steps=1)))
        eventually(lambda: scheduler.said(TrialFinished), message=first.log)
        eventually(lambda: keys(scheduler, CheckpointWritten), message=first.log)
        eventually(lambda: keys(scheduler, CheckpointCommitted), message=first.log)
    finally:
        first.end()
    folder = tmp_path / "node"
    monkeypatch.setenv(VARIABLE, "download.before_rename=delay:60")
    node = Node(server, scheduler, folder)
    monkeypatch.delenv(VARIABLE)
    begin = start(scheduler, store, steps=2, restore=(committed(scheduler),))
    scheduler.assign(node.instance_id, order("t", begin, attempt=2))
    staged = "cache/*/.staging/*/files/weights"
    eventually(
        lambda: [path for path in folder.glob(staged) if path.stat().st_size == SIZE],
        message=node.log,
    )
    the_next_one_leaves_only_logs(server, scheduler, node, folder)


def leaves_its_folder(config):
    """Leave a temporary checkpoint folder in the trial's folder, as the `save` of a class does."""
    import os
    import time

    from tunemq_shared.trial.session import report

    if config["is_first"]:
        os.mkdir("checkpoint_tmp0123")
        with open("checkpoint_tmp0123/weights", "wb") as file:
            file.write(b"w" * 1000)
    left = [name for name in os.listdir() if name.startswith("checkpoint_tmp")]
    report({"left": len(left)})
    if config["is_first"]:
        time.sleep(600)


def test_f02_partial_checkpoint_of_a_killed_trial_is_gone_when_it_continues(
    server, scheduler, tmp_path
):
    node = Node(server, scheduler, tmp_path / "node")
    try:
        assert TEMPORARY_PREFIX == "checkpoint_tmp"
        begin = scheduler.start(leaves_its_folder, {"is_first": True})
        scheduler.assign(node.instance_id, order("t", begin))
        eventually(lambda: scheduler.said(ResultReported), message=node.log)
        again = scheduler.start(leaves_its_folder, {"is_first": False})
        scheduler.assign(node.instance_id, order("t", again, attempt=2))
        eventually(lambda: len(scheduler.said(ResultReported)) == 2, message=node.log)
        first, second = scheduler.said(ResultReported)
        assert first.metrics["left"] == 1
        assert second.metrics["left"] == 0
    finally:
        node.end()
