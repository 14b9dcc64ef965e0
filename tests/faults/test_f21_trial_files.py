"""F21: the store is away when a trial on a farm has ended and its node uploads its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import Node, RedisServer, Scheduler, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.stores.object_servers import ObjectServer, running_minio
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import NodeWarned, ResultReported, SlotFreed

__all__ = ["scheduler", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.fixture
def minio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with running_minio(tmp_path / "minio") as minio:
        for name, value in minio.environ.items():
            monkeypatch.setenv(name, value)
        yield minio


@pytest.fixture
def node(
    server: RedisServer, scheduler: Scheduler, minio: ObjectServer, tmp_path: Path
) -> Iterator[Node]:
    node = Node(server, scheduler, tmp_path / "node")
    yield node
    node.end()


def writing(config):
    """Report once, write a file in the trial's folder, and end."""
    from pathlib import Path

    from tunemq_shared.trial.session import report

    report({"loss": 1.0})
    Path("model.bin").write_bytes(b"m" * 1000)


def end_a_trial(scheduler, node, minio, bucket, **how) -> None:
    """Have a trial write a file and end while the store is away."""
    store = minio.address(bucket, "runs/exp")
    begin = scheduler.start(writing, store=store, folder="exp/train_a", **how)
    scheduler.assign(node.instance_id, order("t", begin))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert scheduler.said(ResultReported)


def test_f21_files_of_a_trial_reach_a_store_that_returns_within_sync_timeout(
    scheduler, node, minio
):
    bucket = minio.create_bucket()
    minio.kill()
    end_a_trial(scheduler, node, minio, bucket, sync_timeout_s=600.0)

    minio.start()

    def is_stored() -> bool:
        found = minio.client().list_objects(bucket, recursive=True)
        return "runs/exp/train_a/attempt_1/model.bin" in {one.object_name for one in found}

    eventually(is_stored, within=60, message=node.log)
    eventually(lambda: not list((node.folder / "trials").iterdir()), message=node.log)
    assert not scheduler.said(NodeWarned)


@pytest.mark.parametrize("store_leaves", [ObjectServer.kill, ObjectServer.freeze])
def test_f21_files_of_a_trial_stay_on_the_node_if_the_store_is_away_for_sync_timeout(
    server, scheduler, node, minio, store_leaves
):
    bucket = minio.create_bucket()
    store_leaves(minio)
    end_a_trial(scheduler, node, minio, bucket, sync_timeout_s=3.0)

    eventually(lambda: scheduler.said(NodeWarned), within=90, message=node.log)

    (file,) = node.folder.glob("trials/*/model.bin")
    assert file.read_bytes() == b"m" * 1000
    (warned,) = scheduler.said(NodeWarned)
    assert "given up after 3 s" in warned.text
    assert f"in {file.parent} on node" in warned.text
    assert f"files.not_sent folder={file.parent}" in node.log()
    node.end()
    again = Node(server, scheduler, node.folder)
    again.end()
    assert file.exists()
