"""Transfers between a node's cache and a real MinIO, by a real process that may be killed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.integration.farm_support import is_alive
from tests.support.searches.checkpoints import contents, fill, put
from tests.support.stores.object_servers import running_minio
from tests.support.transfers import Waiting, run_until
from tests.support.waiting import eventually
from tunemq_shared.base.failpoints import VARIABLE as FAILPOINTS
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_workers.processes.child_process import start_child
from tunemq_workers.runtime.reactor import Reactor
from tunemq_workers.runtime.transfer_messages import (
    DownloadCheckpoint,
    UploadCheckpoint,
    UploadTrialFiles,
)
from tunemq_workers.transfers.transfer_client import TransferClient

pytestmark = pytest.mark.integration

KEY = "train_0/checkpoint_1-000001"
NEXT = "train_0/checkpoint_1-000002"
#: More than one part of an upload.
LARGE = 40 * 2**20


class Node:
    """A node's cache, its transfers, and the process that does them."""

    def __init__(self, folder: Path, store: str) -> None:
        self.store = store
        self.cache = folder / "cache"
        self.log = folder / "transfers.log"
        self.reactor = Reactor()
        self.children: set[int] = set()
        #: The failpoint of each process started from now on, in turn; the last one repeats.
        self.failpoints = [""]
        self.transfers = TransferClient(self.reactor, start=self.start, children=self.children)

    def start(self):
        failpoints = self.failpoints.pop(0) if len(self.failpoints) > 1 else self.failpoints[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FAILPOINTS, failpoints)
            return start_child("tunemq_workers.transfers.transfer_process", (), str(self.log))

    def write(self, source: Path, key: str = KEY) -> Path:
        """Write a checkpoint as a trial process does; return its folder."""
        self.cache.mkdir(exist_ok=True)
        put(LocalCheckpointStore(self.cache, durable=False), source, key)
        return self.cache / key

    def upload(
        self, key: str = KEY, *, base: str = "", base_sha256: str = "", timeout_s: float = 200
    ) -> Waiting:
        it = Waiting()
        folder, committed = str(self.cache / key), self.cache / base / "committed.json"
        order = UploadCheckpoint(self.store, key, folder, "", timeout_s)
        if base:
            sha256 = hashlib.sha256(committed.read_bytes()).hexdigest()
            order = msgspec.structs.replace(
                order, base=str(committed), base_sha256=base_sha256 or sha256
            )
        it.number = self.transfers.start(order, *it.callbacks)
        return it

    def download(self, sha256: str, folder: Path, key: str = KEY, **changes) -> Waiting:
        it = Waiting()
        timeout_s = changes.get("timeout_s", 200)
        order = DownloadCheckpoint(self.store, key, sha256, str(folder), timeout_s)
        it.number = self.transfers.start(order, *it.callbacks)
        return it

    def finish(self, it: Waiting, within: float = 60.0):
        """Return the result of the transfer."""
        self.until(lambda: it.is_over, within)
        assert not it.failed, (it.failed, self.log.read_text())
        return it.done[0]

    def fail(self, it: Waiting, within: float = 60.0) -> tuple[str, bool]:
        """Return why the transfer failed, and whether anything is damaged."""
        self.until(lambda: it.is_over, within)
        assert not it.done
        return it.failed[0]

    def until(self, condition, within: float = 60.0) -> None:
        run_until(self.reactor, condition, within=within)

    def said(self) -> str:
        """Return the log of the transfer processes."""
        return self.log.read_text() if self.log.exists() else ""

    def close(self) -> None:
        self.transfers.close()
        assert not self.children


@pytest.fixture
def node(tmp_path: Path, minio, bucket: str) -> Iterator[Node]:
    node = Node(tmp_path, minio.address(bucket, "runs/one"))
    yield node
    node.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source")


def objects(server, bucket: str) -> set[str]:
    return {o.object_name for o in server.client().list_objects(bucket, recursive=True)}


def test_uploaded_folder_is_downloaded_unchanged(node, source, tmp_path):
    folder = node.write(source)
    uploaded = node.finish(node.upload())
    assert uploaded.sent == uploaded.size == sum(f.stat().st_size for f in source.rglob("*.*")) + 8
    assert uploaded.shared == ()
    assert (folder / "committed.json").exists()
    target = tmp_path / "elsewhere" / KEY
    node.finish(node.download(uploaded.sha256, target))
    assert contents(target / "files") == contents(source)
    assert (target / "committed.json").read_bytes() == (folder / "committed.json").read_bytes()


def test_transfer_of_files_whose_names_are_no_utf8_answers_and_sends_the_others(
    node, tmp_path, minio, bucket
):
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "plain").write_text("x")
    (folder / "zzz").write_text("larger, so it is the last")
    for name in (b"\xff\xfe\n\x1b[31m0", b"sub-\xff"):
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_text("x")
    sent, rejected = Waiting(), Waiting()
    order = UploadTrialFiles(node.store, "trial", str(folder), 1, 60)
    node.transfers.start(order, *sent.callbacks)
    reason, _ = node.fail(sent)
    assert "2 files were not sent, such as \\udcff\\udcfe" in reason
    assert {name.rpartition("/")[2] for name in objects(minio, bucket)} == {"plain", "zzz"}
    (tmp_path / "other" / "journal").mkdir(parents=True)
    Path(os.fsdecode(bytes(tmp_path) + b"/other/journal/\xff")).write_text("x")
    order = UploadTrialFiles(node.store, "other", str(tmp_path / "other"), 1, 20)
    node.transfers.start(order, *rejected.callbacks)
    reason, _ = node.fail(rejected)
    assert "such as journal/\\udcff" in reason


def test_transfer_of_a_folder_of_very_many_names_needs_little_memory(node, tmp_path, minio, bucket):
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "plain").write_text("x")
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(14):
        os.mkdir("d" * 250, dir_fd=fd)
        outer, fd = fd, os.open("d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(outer)
    os.close(os.open("0", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    for number in range(1, 40_000):
        os.link("0", str(number), src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)
    it = Waiting()
    order = UploadTrialFiles(node.store, "trial", str(folder), 1, 200)
    node.transfers.start(order, *it.callbacks)
    reason, _ = node.fail(it)
    assert "their paths have more than" in reason
    status = Path(f"/proc/{node.transfers.pid}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) < 150 * 2**10
    assert {name.rpartition("/")[2] for name in objects(minio, bucket)} == {"plain"}


def test_a_file_that_did_not_change_is_not_sent_again(node, source, tmp_path):
    node.write(source)
    first = node.finish(node.upload())
    (source / "deep" / "er" / "state").write_bytes(b"state 2")
    node.write(source, NEXT)
    second = node.finish(node.upload(NEXT, base=KEY))
    assert second.sent == len(b"state 2")
    assert second.size == first.size + 2
    assert second.shared
    assert all(key.startswith(f"{KEY}/") for key in second.shared)
    target = tmp_path / "elsewhere" / NEXT
    node.finish(node.download(second.sha256, target, NEXT))
    assert contents(target / "files") == contents(source)


def test_upload_reuses_nothing_of_a_base_damaged_on_disk(node, source, tmp_path):
    node.write(source)
    first = node.finish(node.upload())
    committed = node.cache / KEY / "committed.json"
    # It is readable, but names objects of a checkpoint that never existed.
    committed.write_bytes(
        committed.read_bytes().replace(b"checkpoint_1-000001", b"checkpoint_1-000009")
    )
    node.write(source, NEXT)
    second = node.finish(node.upload(NEXT, base=KEY, base_sha256=first.sha256))
    assert second.shared == ()
    target = tmp_path / "elsewhere" / NEXT
    node.finish(node.download(second.sha256, target, NEXT))
    assert contents(target / "files") == contents(source)


@pytest.mark.parametrize(
    "failpoint",
    [
        "upload.before_object",
        "upload.within_object",
        "upload.after_object",
        "upload.before_manifest",
        "upload.after_manifest",
        "upload.after_committed_file",
    ],
)
def test_upload_of_a_killed_process_is_completed_by_the_next(
    node, tmp_path, minio, bucket, failpoint
):
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.bin").write_bytes(os.urandom(LARGE))
    (source / "small").write_bytes(b"small")
    folder = node.write(source)
    node.failpoints = [f"{failpoint}=kill", ""]
    it = node.upload()
    uploaded = node.finish(it)
    assert "ended with SIGKILL" in it.troubles[0]
    assert objects(minio, bucket) == {
        f"runs/one/{KEY}/manifest.json",
        *(f"runs/one/{key}" for key in manifest_of(folder)["objects"].values()),
    }
    target = tmp_path / "elsewhere" / KEY
    node.finish(node.download(uploaded.sha256, target))
    assert contents(target / "files") == contents(source)


@pytest.mark.parametrize("failpoint", ["download.before_rename", "download.after_rename"])
def test_download_of_a_killed_process_is_completed_by_the_next(node, source, tmp_path, failpoint):
    node.failpoints = [f"{failpoint}=kill", ""]
    node.write(source)
    uploaded = node.finish(node.upload())
    target = tmp_path / "elsewhere" / KEY
    it = node.download(uploaded.sha256, target)
    node.finish(it)
    assert "ended with SIGKILL" in it.troubles[0]
    assert contents(target / "files") == contents(source)


def test_transfer_reports_a_missing_store_and_waits(tmp_path, source, monkeypatch):
    with running_minio(tmp_path / "server") as server:
        node = node_for(server, tmp_path, monkeypatch)
        try:
            node.write(source)
            server.stop()
            it = node.upload()
            node.until(lambda: it.troubles)
            assert server.url in it.troubles[0]
            server.start()
            uploaded = node.finish(it)
            server.kill()
            target = tmp_path / "elsewhere" / KEY
            it = node.download(uploaded.sha256, target)
            node.until(lambda: it.troubles)
            server.start()
            node.finish(it)
            assert contents(target / "files") == contents(source)
        finally:
            node.close()


def test_transfer_fails_when_the_store_stays_away_too_long(tmp_path, source, monkeypatch):
    with running_minio(tmp_path / "server") as server:
        node = node_for(server, tmp_path, monkeypatch)
        try:
            folder = node.write(source)
            node.write(source, NEXT)
            node.finish(node.upload(NEXT))  # starting a process uses up part of the three
            server.stop()
            up = node.upload(timeout_s=3)
            down = node.download("0" * 64, tmp_path / "elsewhere" / KEY, timeout_s=3)
            for it in (up, down):
                reason, is_corrupt = node.fail(it)
                assert "it was given up after 3 s: " in reason
                assert server.url in reason
                assert not is_corrupt
            server.start()
            # The failed transfer leaves nothing behind, so another one succeeds.
            assert not (tmp_path / "elsewhere" / KEY).exists()
            assert not (folder / "committed.json").exists()
            node.finish(node.upload())
        finally:
            node.close()


def test_running_upload_can_be_cancelled(node, tmp_path, minio, bucket):
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.bin").write_bytes(os.urandom(LARGE))
    folder = node.write(source)
    # The pause between parts gives a slow test time to cancel it.
    node.failpoints = ["upload.within_object=delay:3,upload.within_object=delay:3@2"]
    it = node.upload()
    node.until(lambda: "transfer.begun" in node.said())
    node.transfers.cancel(it.number)
    assert len(node.transfers) == 0
    node.until(lambda: "called off" in node.said())
    assert not it.is_over
    assert not (folder / "committed.json").exists()
    assert objects(minio, bucket) == set()


@pytest.mark.soak
def test_store_that_only_accepts_connections_blocks_no_transfer_for_ever(tmp_path, monkeypatch):
    with running_minio(tmp_path / "server") as server:
        node = node_for(server, tmp_path, monkeypatch)
        source = tmp_path / "source"
        source.mkdir()
        (source / "model.bin").write_bytes(os.urandom(LARGE))
        try:
            node.write(source)
            server.freeze()
            reason, _ = node.fail(node.upload(timeout_s=40), within=120)
            assert "given up after 40 s: " in reason
            assert server.url in reason
            pid = node.transfers.pid
            server.thaw()
            node.finish(node.upload())
            assert node.transfers.pid == pid
        finally:
            server.thaw()
            node.close()


@pytest.mark.parametrize("what", ["a file", "a file's length", "the manifest"])
def test_damaged_object_in_the_store_is_told_from_other_failures(
    node, source, tmp_path, minio, bucket, what
):
    node.write(source)
    uploaded = node.finish(node.upload())
    name = name_of(what, source)
    client = minio.client()
    with client.get_object(bucket, name) as response:
        data = bytearray(response.read())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2 - (what == "a file's length"))
    client.put_object(bucket, name, io.BytesIO(data), len(data))
    target = tmp_path / "elsewhere" / KEY
    reason, is_corrupt = node.fail(node.download(uploaded.sha256, target))
    assert is_corrupt, reason
    assert KEY in reason
    assert not target.exists()


@pytest.mark.parametrize("what", ["a file", "the manifest"])
def test_missing_object_in_the_store_is_not_retried(node, source, tmp_path, minio, bucket, what):
    node.write(source)
    uploaded = node.finish(node.upload())
    name = name_of(what, source)
    minio.client().remove_object(bucket, name)
    target = tmp_path / "elsewhere" / KEY
    reason, is_corrupt = node.fail(node.download(uploaded.sha256, target))
    assert is_corrupt, reason
    assert not target.exists()


def test_damaged_file_in_the_cache_is_not_uploaded(node, source, minio, bucket):
    folder = node.write(source)
    model = folder / "files" / "model.bin"
    model.chmod(0o600)
    model.write_bytes(bytes(model.stat().st_size))
    reason, is_corrupt = node.fail(node.upload())
    assert is_corrupt, reason
    assert f"runs/one/{KEY}/manifest.json" not in objects(minio, bucket)


def test_store_that_refuses_is_reported_and_retried_until_it_is_fixed(node, source, minio):
    node.write(source)
    missing = f"made-later-{secrets.token_hex(6)}"
    node.store = minio.address(missing, "runs/one")
    upload = node.upload()
    node.until(lambda: upload.troubles)
    assert f"there is no bucket {missing!r}" in upload.troubles[0]
    minio.create_bucket(missing)
    node.finish(upload)


def test_replaced_credentials_file_is_read_again(node, source, minio, tmp_path, monkeypatch):
    keys = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    keys.write_text(text.format("expired", "expired-too"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    node.write(source)
    upload = node.upload()
    node.until(lambda: upload.troubles)
    assert "the server does not know these keys" in upload.troubles[0]
    keys.unlink()
    keys.write_text(text.format(minio.access_key, minio.secret_key))
    node.finish(upload)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[default]\n", "has no aws_access_key_id"),
        (
            "[default]\naws_access_key_id = wrong\naws_secret_access_key = wrong-too\n",
            "the server does not know these keys",
        ),
    ],
)
def test_try_store_with_wrong_keys_fails_until_they_are_corrected(
    node, minio, tmp_path, monkeypatch, text, problem
):
    keys = tmp_path / "credentials"
    keys.write_text(text)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    node.transfers.try_store(node.store)
    node.until(lambda: node.transfers.traffic.failing_s > 0)
    assert problem in node.transfers.traffic.problem
    keys.unlink()
    keys.write_text(
        f"[default]\naws_access_key_id = {minio.access_key}\n"
        f"aws_secret_access_key = {minio.secret_key}\n"
    )
    node.until(lambda: not node.transfers.traffic.failing_s)
    node.until(lambda: not len(node.transfers))


def test_transfer_refused_for_too_long_fails_with_the_reason(node, source, minio):
    node.write(source)
    node.write(source, NEXT)
    node.finish(node.upload(NEXT))  # starting a process uses up part of the three seconds
    node.store = minio.address("no-such-bucket-here", "runs/one")
    reason, is_corrupt = node.fail(node.upload(timeout_s=3.0))
    assert "given up after 3 s" in reason
    assert "no-such-bucket-here" in reason
    assert not is_corrupt


def test_transfers_run_at_low_priority(node, source):
    node.write(source)
    node.finish(node.upload())
    process = psutil.Process(node.transfers.pid)
    assert process.nice() == min(19, psutil.Process().nice() + 10)


def test_store_keys_are_in_no_argument_and_no_log(node, source, minio):
    node.write(source)
    node.finish(node.upload())
    command = " ".join(psutil.Process(node.transfers.pid).cmdline())
    assert minio.secret_key not in command + node.said()
    assert minio.access_key not in command + node.said()


def test_signals_to_the_whole_group_do_not_end_transfers(node, source):
    node.write(source)
    node.finish(node.upload())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(node.transfers.pid, number)
    pid = node.transfers.pid
    node.finish(node.upload())
    assert node.transfers.pid == pid


def test_no_process_is_left_when_the_node_closes_its_transfers(node, source):
    node.write(source)
    node.failpoints = ["upload.before_manifest=delay:30"]
    node.upload()
    node.until(lambda: node.transfers.pid)
    pid = node.transfers.pid
    node.transfers.close()
    assert not is_alive(pid)


def test_transfers_end_with_their_node(tmp_path):
    node = f"""
import time
from tunemq_workers.processes.child_process import start_child
child = start_child("tunemq_workers.transfers.transfer_process", (), {str(tmp_path / "log")!r})
print(child.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", node], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    process.wait()
    eventually(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    "size",
    [400 * 2**20, pytest.param(2 * 2**30, marks=pytest.mark.soak)],
)
def test_transfers_memory_does_not_grow_with_file_size(node, tmp_path, size):
    source = tmp_path / "source"
    source.mkdir()
    (source / "small").write_bytes(b"small")
    node.write(source)
    uploaded = node.finish(node.upload())
    before = most_memory(node.transfers.pid)
    (source / "model.bin").write_bytes(b"")
    os.truncate(source / "model.bin", size)
    large = node.write(source, NEXT)
    shutil.rmtree(source)
    uploaded = node.finish(node.upload(NEXT, timeout_s=300), within=300)
    assert uploaded.sent == size + 5
    (large / "files" / "model.bin").unlink()
    target = tmp_path / "elsewhere" / NEXT
    node.finish(node.download(uploaded.sha256, target, NEXT, timeout_s=300), within=300)
    assert (target / "files" / "model.bin").stat().st_size == size
    assert most_memory(node.transfers.pid) - before < 200 * 2**20


def most_memory(pid: int) -> int:
    """Return the peak memory of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def name_of(what: str, source: Path) -> str:
    """Return the name of an object in the bucket."""
    if what == "the manifest":
        return f"runs/one/{KEY}/manifest.json"
    return f"runs/one/{KEY}/{hashlib.sha256((source / 'model.bin').read_bytes()).hexdigest()}"


def manifest_of(folder: Path):
    return json.loads((folder / "committed.json").read_text())


def node_for(server, folder: Path, patch: pytest.MonkeyPatch) -> Node:
    """Return a node whose transfers go to a separate server."""
    for name, value in server.environ.items():
        patch.setenv(name, value)
    return Node(folder, server.address(server.create_bucket(), "runs/one"))
