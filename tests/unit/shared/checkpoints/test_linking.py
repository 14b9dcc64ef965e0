"""A node's cache links files that equal those of an older checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.searches.checkpoints import contents, info, put
from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import METADATA_FILE, Checkpoint
from tunemq_shared.checkpoints.hashed_copy import _CHUNK
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore

FIRST, SECOND = "train_0/checkpoint_1-000001", "train_0/checkpoint_1-000002"


@pytest.fixture
def cache(tmp_path: Path) -> LocalCheckpointStore:
    (tmp_path / "cache").mkdir()
    return LocalCheckpointStore(tmp_path / "cache", durable=False, linking=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "weights").write_bytes(os.urandom(3 * _CHUNK + 17))
    (source / "deep" / "embeddings").write_bytes(os.urandom(2 * _CHUNK))
    (source / "config").write_bytes(b"config")
    (source / "nothing").touch()
    return source


def put_second(cache: LocalCheckpointStore, source: Path, base: str = FIRST) -> str:
    return cache.put_checkpoint(SECOND, source, info(n=2), base=base).sha256


def links(cache: LocalCheckpointStore, key: str = SECOND) -> dict[str, int]:
    """Return the number of hard links of each file."""
    files = cache.root / key / "files"
    return {
        str(path.relative_to(files)): path.stat().st_nlink
        for path in files.rglob("*")
        if path.is_file()
    }


def test_unchanged_file_is_linked(cache: LocalCheckpointStore, source: Path) -> None:
    put(cache, source, FIRST)
    sha256 = put_second(cache, source)
    assert set(links(cache).values()) == {2}
    opened = cache.open_checkpoint(SECOND, sha256)
    assert contents(opened.path) == contents(source)


@pytest.mark.parametrize("place", [0, _CHUNK - 1, _CHUNK, 2 * _CHUNK, 3 * _CHUNK + 16])
def test_one_changed_byte_makes_a_copy(
    cache: LocalCheckpointStore, source: Path, place: int
) -> None:
    put(cache, source, FIRST)
    with (source / "weights").open("r+b") as file:
        old = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), place)
    sha256 = put_second(cache, source)
    assert links(cache) == {"weights": 1, "deep/embeddings": 2, "config": 2, "nothing": 2}
    assert contents(cache.open_checkpoint(SECOND, sha256).path) == contents(source)


def test_removed_added_renamed_or_resized_file_is_not_linked(
    cache: LocalCheckpointStore, source: Path
) -> None:
    put(cache, source, FIRST)
    (source / "nothing").unlink()
    (source / "config").rename(source / "settings")
    with (source / "weights").open("ab") as file:
        file.write(b"more")
    sha256 = put_second(cache, source)
    assert links(cache) == {"weights": 1, "deep/embeddings": 2, "settings": 1}
    assert contents(cache.open_checkpoint(SECOND, sha256).path) == contents(source)


def test_older_checkpoint_may_be_removed_first(cache: LocalCheckpointStore, source: Path) -> None:
    put(cache, source, FIRST)
    sha256 = put_second(cache, source)
    cache.delete_checkpoint(FIRST)
    assert contents(cache.open_checkpoint(SECOND, sha256).path) == contents(source)


def test_shared_files_are_read_only(cache: LocalCheckpointStore, source: Path) -> None:
    put(cache, source, FIRST)
    put_second(cache, source)
    for key in (FIRST, SECOND):
        for path in (cache.root / key / "files").rglob("*"):
            assert path.is_dir() or path.stat().st_mode & 0o777 == 0o444


def test_copy_of_shared_files_is_writable(
    cache: LocalCheckpointStore, source: Path, tmp_path: Path
) -> None:
    sha256 = put(cache, source, FIRST).sha256
    cache.get_checkpoint(FIRST, sha256, tmp_path / "got")
    opened = cache.open_checkpoint(FIRST, sha256).path
    for folder in (tmp_path / "got", Path(Checkpoint(opened).to_directory(tmp_path / "copy"))):
        assert (folder / "config").stat().st_mode & 0o777 == 0o644
        assert contents(folder) == contents(source)


def test_base_with_writable_files_is_made_read_only(
    cache: LocalCheckpointStore, source: Path
) -> None:
    put(cache, source, FIRST)
    for path in (cache.root / FIRST / "files").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    put_second(cache, source)
    assert (cache.root / SECOND / "files" / "weights").stat().st_mode & 0o777 == 0o444


def test_sharing_shows_a_private_file_to_no_other_user(
    cache: LocalCheckpointStore, source: Path
) -> None:
    old = os.umask(0o077)
    try:
        put(cache, source, FIRST)
        put_second(cache, source)
    finally:
        os.umask(old)
    assert set(links(cache).values()) == {2}
    assert (cache.root / SECOND / "files" / "weights").stat().st_mode & 0o777 == 0o400


def test_metadata_is_never_shared(cache: LocalCheckpointStore, source: Path) -> None:
    Checkpoint(source).set_metadata({"note": "first"})
    first = put(cache, source, FIRST)
    # A user changes the older checkpoint: its manifest does not have the new content's hash.
    Checkpoint(cache.open_checkpoint(FIRST, first.sha256).path).set_metadata({"note": "other"})
    Checkpoint(source).set_metadata({"note": "other"})
    sha256 = put_second(cache, source)
    assert links(cache)[METADATA_FILE] == 1
    manifest = cache.read_manifest(SECOND, sha256)
    old = cache.read_manifest(FIRST, first.sha256)
    assert set(manifest.files) - set(old.files) == {
        file for file in manifest.files if file.name == METADATA_FILE
    }


@pytest.mark.parametrize("content", [None, b"{}", b""])
def test_missing_or_damaged_base_is_ignored(
    cache: LocalCheckpointStore, source: Path, content: bytes | None
) -> None:
    put(cache, source, FIRST)
    if content is None:
        cache.delete_checkpoint(FIRST)
    else:
        (cache.root / FIRST / "manifest.json").write_bytes(content)
    sha256 = put_second(cache, source)
    assert set(links(cache).values()) == {1}
    assert cache.open_checkpoint(SECOND, sha256)


def test_downloaded_base_serves_as_well(cache: LocalCheckpointStore, source: Path) -> None:
    put(cache, source, FIRST)
    folder = cache.root / FIRST
    (folder / "manifest.json").rename(folder / "committed.json")
    put_second(cache, source)
    assert set(links(cache).values()) == {2}


def test_damaged_file_of_the_base_is_not_linked(cache: LocalCheckpointStore, source: Path) -> None:
    put(cache, source, FIRST)
    damaged = cache.root / FIRST / "files" / "weights"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.chmod(0o644)
    damaged.write_bytes(content)
    sha256 = put_second(cache, source)
    assert links(cache)["weights"] == 1
    assert cache.open_checkpoint(SECOND, sha256)


@pytest.mark.parametrize("number", [errno.EMLINK, errno.EXDEV, errno.ENOENT])
def test_file_that_cannot_be_linked_is_copied(
    cache: LocalCheckpointStore, source: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    put(cache, source, FIRST)
    monkeypatch.setattr(os, "link", reject)
    sha256 = put_second(cache, source)
    assert set(links(cache).values()) == {1}
    assert cache.open_checkpoint(SECOND, sha256)


def test_source_that_changes_during_the_comparison_is_detected(
    cache: LocalCheckpointStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Callable[..., None] = os.link

    def link_and_change(old: Path, new: Path, **kwargs: object) -> None:
        link(old, new, **kwargs)
        if new.name == "weights":
            os.utime(source / "weights", ns=(1, 1))

    put(cache, source, FIRST)
    monkeypatch.setattr(os, "link", link_and_change)
    with pytest.raises(CheckpointError, match=r"weights' changed while it was saved"):
        put_second(cache, source)
    assert cache.list_checkpoints() == [FIRST]


def test_store_that_shares_nothing_links_nothing(tmp_path: Path, source: Path) -> None:
    (tmp_path / "experiment").mkdir()
    store = LocalCheckpointStore(tmp_path / "experiment")
    put(store, source, FIRST)
    put_second(store, source)
    assert set(links(store).values()) == {1}
