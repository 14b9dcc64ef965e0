"""What `LocalStore` promises beside what every store does (``tests/contracts/test_store.py``)."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import KEY, contents, fill, put
from tunemq_shared import copying
from tunemq_shared.errors import CheckpointCorrupt, ConfigError, StoreError
from tunemq_shared.local_store import LocalStore
from tunemq_shared.stores import open_store

#: Puts a checkpoint and hangs in the middle of it, saying so.
KILLED_WRITER = """
import sys, time
from pathlib import Path
from tunemq_shared import copying
from tunemq_shared.local_store import LocalStore
from tunemq_shared.manifest import CheckpointInfo

write_all = copying.write_all

def write_one_piece(fd, data):
    write_all(fd, data)
    print("writing", flush=True)
    sys.stdin.readline()

copying.write_all = write_one_piece
info = CheckpointInfo(trial="t0", epoch=1, n=1, step=1, metrics={}, state={})
LocalStore(sys.argv[1]).put_checkpoint(sys.argv[2], Path(sys.argv[3]), info)
"""


@pytest.fixture(params=[True, False], ids=["durable", "quick"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "experiment", durable=request.param)
    yield store
    # Whatever a test did, nothing of it is left half done.
    staging = tmp_path / "experiment" / ".staging"
    assert not staging.exists() or not list(staging.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source")


def test_the_layout_is_readable_without_us(store: LocalStore, source: Path) -> None:
    put(store, source)
    folder = store.root / KEY
    assert sorted(os.listdir(folder)) == ["files", "manifest.json"]
    assert json.loads((folder / "manifest.json").read_text())["trial"] == "t0"
    assert contents(folder / "files") == contents(source)


def test_a_missing_folder_is_found(store: LocalStore, source: Path) -> None:
    committed = put(store, source)
    (store.root / KEY / "files" / "hollow").rmdir()
    with pytest.raises(CheckpointCorrupt, match="folder 'hollow' is missing"):
        store.open_checkpoint(KEY, committed.sha256)


@pytest.mark.parametrize("place", ["nothing", "deep", "extra"])
def test_links_put_into_a_checkpoint_are_refused(
    store: LocalStore, source: Path, place: str
) -> None:
    committed = put(store, source)
    path = store.root / KEY / "files" / place
    if path.exists():
        path.rename(store.root / "moved")
    path.symlink_to(store.root / "moved")
    with pytest.raises(CheckpointCorrupt, match="is a link or device"):
        store.open_checkpoint(KEY, committed.sha256)


def test_files_that_are_a_link_are_refused(store: LocalStore, source: Path) -> None:
    committed = put(store, source)
    files = store.root / KEY / "files"
    files.rename(store.root / "moved")
    files.symlink_to(store.root / "moved")
    with pytest.raises(CheckpointCorrupt, match="files is not a folder"):
        store.open_checkpoint(KEY, committed.sha256)


def test_an_empty_folder_in_the_way_is_taken(store: LocalStore, source: Path) -> None:
    (store.root / KEY).parent.mkdir(parents=True)
    assert put(store, source)


def test_of_two_writers_of_a_key_one_wins(
    store: LocalStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def somebody_was_faster(self: Path, target: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(Path, "rename", somebody_was_faster)
    with pytest.raises(StoreError, match="was written by somebody else"):
        put(store, source)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"cannot be written: .*experiment: No space left.* bytes are free\)"),
        (errno.EROFS, r"cannot be written: .*experiment: Read-only file system\.$"),
    ],
)
def test_a_failing_disk_is_an_error_with_path_and_bytes(
    store: LocalStore,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    message: str,
) -> None:
    def fail(fd: int, data: memoryview) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(copying, "write_all", fail)
    with pytest.raises(StoreError, match=message):
        put(store, source)
    assert store.list_checkpoints() == []
    assert "tunemq-hasher" not in [thread.name for thread in threading.enumerate()]


def test_a_root_that_is_a_file_is_an_error_with_its_path(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError, match=r"file/\.staging: Not a directory|file: File exists"):
        put(store, source)
    with pytest.raises(StoreError, match=r"cannot be listed: .*Not a directory"):
        store.list_checkpoints()


def test_other_things_in_the_folder_are_no_checkpoints(store: LocalStore, source: Path) -> None:
    put(store, source)
    (store.root / "result.json").touch()
    (store.root / "train_0" / "artifacts").mkdir()
    (store.root / "train_0" / "artifacts" / "manifest.json").touch()
    assert store.list_checkpoints() == [KEY]


@pytest.mark.parity(114)
def test_a_killed_writer_leaves_nothing_at_the_key_and_is_swept(
    store: LocalStore, source: Path
) -> None:
    command = [sys.executable, "-c", KILLED_WRITER, store.root, KEY, source]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            assert store.list_checkpoints() == []
            # Somebody who sweeps meanwhile does not disturb a living writer.
            assert store.sweep() == 0
            assert len(list((store.root / ".staging").iterdir())) == 1
        finally:
            writer.send_signal(signal.SIGKILL)
    assert not (store.root / KEY).exists()
    assert store.sweep() > 0
    assert list((store.root / ".staging").iterdir()) == []
    assert put(store, source)


def test_a_swept_staging_folder_is_made_again(
    store: LocalStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir
    swept: list[Path] = []

    def make_and_lose(self: Path, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.parent.name == ".staging" and not swept:
            swept.append(self)
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    assert put(store, source)
    assert swept


def test_sweeping_an_empty_store_is_no_error(store: LocalStore) -> None:
    assert store.sweep() == 0


def test_several_threads_write_at_once(store: LocalStore, source: Path) -> None:
    keys = [f"train_{n}/checkpoint_1-000001" for n in range(4)]
    threads = [threading.Thread(target=put, args=(store, source, key)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.list_checkpoints() == keys
    assert "tunemq-hasher" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parity(157)
def test_an_address_means_a_store(tmp_path: Path) -> None:
    for address in (str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        store = open_store(address)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path
    with pytest.raises(ConfigError, match="s3://bucket"):
        open_store("s3://bucket")
