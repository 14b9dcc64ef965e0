"""A folder server that is killed leaves whole objects and no partial ones."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores.object_servers import ServedFolder, serving
from tunemq_scheduler.cli.store_serve_command import BUCKET, INCOMPLETE
from tunemq_shared.base.retrying import CancelToken, TransferTimedOut, in_parallel, retried
from tunemq_shared.objects import remote_object_store
from tunemq_shared.objects.multipart import PART
from tunemq_shared.objects.s3_objects import S3Objects

pytestmark = [pytest.mark.faults, pytest.mark.integration]

LARGE = 4 * PART + 12345


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServedFolder]:
    with serving(tmp_path / "server") as server:
        yield server


@pytest.fixture
def objects(server: ServedFolder) -> Iterator[S3Objects]:
    with server.objects(BUCKET) as objects:
        yield objects


def content(n: int) -> bytes:
    return hashlib.sha256(str(n).encode()).digest() * (1000 * n)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def make_file(path: Path, size: int) -> str:
    data = os.urandom(size)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def test_f19_server_killed_at_any_moment_has_complete_objects_only(server, objects, tmp_path):
    chance = random.Random(7)
    sha256 = make_file(tmp_path / "file", LARGE)
    is_over = threading.Event()
    acknowledged: list[int] = []

    def put_all(n: int, cancel: CancelToken) -> None:
        if n == 0:
            objects.put_file("large", tmp_path / "file", size=LARGE, sha256=sha256, cancel=cancel)
            return
        for m in range(n, n + 20):
            retried(lambda m=m: objects.put_bytes(f"t/{m}", content(m)), cancel)
            acknowledged.append(m)

    def put() -> None:
        in_parallel(put_all, [0, 1, 21, 41], CancelToken(240), at_once=4)
        is_over.set()

    writer = threading.Thread(target=put)
    writer.start()
    try:
        for _ in range(5):
            is_over.wait(chance.uniform(0.05, 0.3))  # the kill comes at a random moment
            server.kill()
            assert {f"{m}" for m in acknowledged} <= names_in(server.data / BUCKET / "t")
            for file in (server.data / BUCKET).rglob("*"):
                if file.name.startswith(INCOMPLETE):
                    continue  # no list shows it
                if file.parent.name == "t":
                    assert file.read_bytes() == content(int(file.name))
                elif file.name == "large":
                    assert file.stat().st_size == LARGE
            server.start()
    finally:
        writer.join()
    assert is_over.is_set()
    assert len(list(objects.list("t/"))) == 60
    objects.get_file("large", tmp_path / "copy", size=LARGE, cancel=CancelToken(150))
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()


def test_f21_upload_continues_after_a_server_outage(server, objects, tmp_path, monkeypatch):
    sha256 = make_file(tmp_path / "file", LARGE)
    troubles: list[str] = []
    one_at_a_time = threading.Lock()
    is_dead = threading.Event()

    def kill() -> None:
        server.kill()
        is_dead.set()

    reached = iter([lambda: None, kill])
    monkeypatch.setattr(
        remote_object_store, "failpoint", lambda _name: next(reached, lambda: None)()
    )

    def start_again(trouble: str) -> None:
        with one_at_a_time:  # several parts are on their way
            troubles.append(trouble)
            if len(troubles) == 1:
                assert is_dead.wait(60)
                server.start()

    objects.put_file(
        "a",
        tmp_path / "file",
        size=LARGE,
        sha256=sha256,
        cancel=CancelToken(150),
        on_trouble=start_again,
    )
    assert "the server cannot be reached" in troubles[0]
    objects.get_file("a", tmp_path / "copy", size=LARGE, cancel=CancelToken(150))
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert server.incomplete() == []


def test_f10_silent_server_is_reported_and_its_late_answer_is_used(server, tmp_path, monkeypatch):
    # A resumed server has to answer within this time on a busy machine, too.
    monkeypatch.setattr(remote_object_store, "READ_S", 4.0)
    sha256 = make_file(tmp_path / "file", LARGE)
    with server.objects(BUCKET) as objects:
        server.freeze()
        with pytest.raises(TransferTimedOut, match=r"timed out.*Gave up after 2 s"):
            objects.put_file(
                "a", tmp_path / "file", size=LARGE, sha256=sha256, cancel=CancelToken(2)
            )
        objects.put_file(
            "a",
            tmp_path / "file",
            size=LARGE,
            sha256=sha256,
            cancel=CancelToken(150),
            on_trouble=lambda _trouble: server.thaw(),
        )
        objects.get_file("a", tmp_path / "copy", size=LARGE, cancel=CancelToken(150))
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
