"""An object server that dies, restarts, or stops answering in the middle of a file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores.object_servers import ObjectServer, running_minio
from tests.support.waiting import eventually
from tunemq_shared.base.retrying import (
    CancelToken,
    StoreUnavailable,
    TransferCancelled,
    TransferTimedOut,
)
from tunemq_shared.objects import remote_object_store
from tunemq_shared.objects.multipart import PART
from tunemq_shared.objects.s3_objects import S3Objects

pytestmark = [pytest.mark.faults, pytest.mark.integration]

SIZE = 4 * PART + 17


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with running_minio(tmp_path / "minio") as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    # A healthy server has to answer within this time on a busy machine, too.
    monkeypatch.setattr(remote_object_store, "CONNECT_S", 4.0)
    monkeypatch.setattr(remote_object_store, "READ_S", 4.0)


@pytest.fixture
def objects(server: ObjectServer) -> Iterator[S3Objects]:
    with server.objects(server.create_bucket(), "exp") as objects:
        yield objects


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


def put(
    objects: S3Objects, file: Path, cancel: CancelToken, on_trouble=remote_object_store.ignore
) -> None:
    data = file.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    objects.put_file("a", file, size=len(data), sha256=sha256, cancel=cancel, on_trouble=on_trouble)


class Once:
    """Calls a function at the first reported trouble only; several threads may report one."""

    def __init__(self, call) -> None:
        self.told: list[str] = []
        self._call = call
        self._lock = threading.Lock()

    def __call__(self, trouble: str) -> None:
        with self._lock:
            self.told.append(trouble)
            if len(self.told) == 1:
                self._call()


def when_half_is_sent(monkeypatch: pytest.MonkeyPatch, call) -> None:
    """Call a function between two parts of a file."""
    left = iter([lambda: None, call])
    monkeypatch.setattr(remote_object_store, "failpoint", lambda _name: next(left, lambda: None)())


def test_f21_upload_continues_after_the_server_died_within_a_file(
    server, objects, file, tmp_path, monkeypatch
):
    is_dead = threading.Event()

    def kill() -> None:
        server.kill()
        is_dead.set()

    def start() -> None:
        assert is_dead.wait(60)
        server.start()

    when_half_is_sent(monkeypatch, kill)
    restart = Once(start)
    put(objects, file, CancelToken(150), restart)
    assert "the server cannot be reached" in restart.told[0]
    objects.get_file("a", tmp_path / "copy", size=SIZE, cancel=CancelToken(150))
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    assert list(objects._client.unfinished()) == []


def test_f21_download_waits_for_a_server_that_restarts(server, objects, file, tmp_path):
    put(objects, file, CancelToken(150))
    server.kill()
    restart = Once(server.start)
    objects.get_file("a", tmp_path / "copy", size=SIZE, cancel=CancelToken(150), on_trouble=restart)
    assert restart.told
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


def test_transfer_continues_after_the_server_hung_within_a_file(
    impatient, server, objects, file, tmp_path, monkeypatch
):
    when_half_is_sent(monkeypatch, server.freeze)
    thaw = Once(server.thaw)
    put(objects, file, CancelToken(150), thaw)
    assert "timed out" in thaw.told[0]
    server.freeze()
    thaw = Once(server.thaw)
    objects.get_file("a", tmp_path / "copy", size=SIZE, cancel=CancelToken(150), on_trouble=thaw)
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


def test_transfer_that_times_out_names_the_cause(server, objects, file, tmp_path):
    server.kill()
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()  # its time limit begins only then
    with pytest.raises(TransferTimedOut, match=r"Connection refused.*Gave up after 3 s"):
        objects.put_file("a", file, size=SIZE, sha256=sha256, cancel=CancelToken(3))
    with pytest.raises(TransferTimedOut, match=r"Connection refused.*Gave up after 3 s"):
        objects.get_file("a", tmp_path / "copy", size=SIZE, cancel=CancelToken(3))


@pytest.mark.parity(151)
def test_transfer_that_waits_for_the_server_can_be_cancelled(
    impatient, server, objects, file, monkeypatch
):
    when_half_is_sent(monkeypatch, server.freeze)
    cancel = CancelToken()
    with pytest.raises(TransferCancelled):
        put(objects, file, cancel, Once(cancel.cancel))
    server.thaw()
    assert list(objects.list()) == []


def test_small_requests_fail_at_once_while_the_server_is_away(server, objects):
    objects.put_bytes("a", b"1")
    server.kill()
    for use in (
        lambda: objects.put_bytes("b", b""),
        lambda: objects.get_bytes("a", limit=1),
        lambda: objects.delete(["a"]),
        lambda: list(objects.list()),
        lambda: objects.abort_uploads(lambda _key: True),
    ):
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            use()
    server.start()
    eventually(lambda: objects.get_bytes("a", limit=1) == b"1")


MEASURE = """
import hashlib, os, resource, sys
from pathlib import Path
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.checkpoints.open_store import open_objects

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

file, size = Path(sys.argv[2]), int(sys.argv[3])
with file.open("rb") as opened:
    sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
with open_objects(sys.argv[1]) as objects:
    objects.probe()
    before = peak()
    objects.put_file("a", file, size=size, sha256=sha256, cancel=CancelToken(300))
    objects.get_file("a", file.with_name("copy"), size=size, cancel=CancelToken(300))
print(peak() - before)
"""


@pytest.mark.slow
def test_upload_of_a_large_file_uses_memory_for_a_few_parts(minio, bucket, tmp_path):
    size = 320 * 2**20
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
    command = [sys.executable, "-c", MEASURE, minio.address(bucket), tmp_path / "file", str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 150, "MiB"
    assert (tmp_path / "copy").stat().st_size == size
