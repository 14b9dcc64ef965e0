"""Folders are copied completely, only where they changed, and only to their destination."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.leases import leased
from tests.support.searches.checkpoints import contents
from tunemq_scheduler.output.syncing import destinations, mirroring
from tunemq_scheduler.output.syncing.destinations import (
    FileStamp,
    SyncDestination,
    join,
    open_destination,
)
from tunemq_scheduler.output.syncing.excludes import CHECKPOINTS, NEVER_COPIED, excluding
from tunemq_scheduler.output.syncing.mirroring import (
    MirroredFiles,
    delete_folder,
    download_folder,
    upload_folder,
)
from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.base.retrying import CancelToken, TransferCancelled

OLD_NS = 10**18


def make(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(OLD_NS, OLD_NS))
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return make(tmp_path / "here", a=b"a", b=b"b")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def up(
    here: Path, there: Path, copied: MirroredFiles | None = None, exclude: tuple[str, ...] = ()
) -> int:
    return upload_folder(
        str(here), str(there), exclude, copied or MirroredFiles(), cancel=CancelToken()
    )


def test_copy_transfers_only_changed_files_again(here: Path, there: Path) -> None:
    copied = MirroredFiles()
    assert up(here, there, copied) == 2
    assert up(here, there, copied) == 0
    (here / "a").write_bytes(b"A")
    (here / "c").write_bytes(b"c")
    assert up(here, there, copied) == 2
    assert contents(there) == contents(here)


def test_copy_transfers_a_recently_written_file_again(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change might have the same timestamp."""
    monkeypatch.setattr(mirroring, "_SETTLED_NS", 3600 * 10**9)  # even on a slow machine
    copied = MirroredFiles()
    (here / "a").write_bytes(b"1")
    assert up(here, there, copied) == 2
    assert up(here, there, copied) == 1


def test_copy_without_a_record_of_earlier_copies_transfers_everything(
    here: Path, there: Path
) -> None:
    assert up(here, there) == 2
    assert up(here, there) == 2


def test_download_skips_files_unchanged_on_both_sides(here: Path, there: Path) -> None:
    copied = MirroredFiles()

    def down() -> int:
        return download_folder(str(here), str(there), (), copied, cancel=CancelToken())

    assert down() == 2
    assert down() == 0
    make(here, a=b"AA")
    assert down() == 1
    (there / "b").unlink()
    assert down() == 1
    assert contents(there) == contents(here)


def test_file_that_disappears_during_a_copy_is_no_error(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = destinations.FolderDestination.put

    def and_remove_the_next(
        self: SyncDestination, name: str, path: str, cancel: CancelToken
    ) -> None:
        put(self, name, path, cancel)
        (here / "b").unlink(missing_ok=True)

    monkeypatch.setattr(destinations.FolderDestination, "put", and_remove_the_next)
    assert up(here, there) == 1
    assert contents(there) == {"a": b"a"}


def test_file_that_cannot_be_read_does_not_block_the_others(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = destinations.FolderDestination.put

    def refuse_one(self: SyncDestination, name: str, path: str, cancel: CancelToken) -> None:
        if name == "a":
            raise PermissionError(13, "Permission denied", path)
        put(self, name, path, cancel)

    monkeypatch.setattr(destinations.FolderDestination, "put", refuse_one)
    with pytest.raises(StoreError, match=r"1 of the files in .*here/a: Permission denied"):
        up(here, there)
    assert contents(there) == {"b": b"b"}


def test_unwritable_destination_is_named(here: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"/file"):
        up(here, tmp_path / "file" / "below")


def test_interrupted_copy_leaves_no_partial_file(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destinations, "_CHUNK", 10)
    make(here, a=b"x" * 100)
    cancel = CancelToken()
    checks = iter([cancel.check] * 6 + [cancel.cancel] * 2)
    monkeypatch.setattr(cancel, "check", lambda: (next(checks)(), CancelToken.check(cancel)))
    with pytest.raises(TransferCancelled):
        upload_folder(str(here), str(there), (), MirroredFiles(), cancel=cancel)
    assert contents(there) == {}


def test_partial_files_of_an_earlier_copy_are_never_copied(here: Path, there: Path) -> None:
    make(here, **{f"{destinations.PART_PREFIX}1": b"half"})
    up(here, there)
    assert contents(there) == {"a": b"a", "b": b"b"}
    make(there, **{f"{destinations.PART_PREFIX}2": b"half"})
    back = here.parent / "back"
    download_folder(str(there), str(back), (), MirroredFiles(), cancel=CancelToken())
    assert contents(back) == {"a": b"a", "b": b"b"}


def test_links_inside_the_folder_are_copied_as_files_and_others_are_left_out(
    here: Path, there: Path
) -> None:
    secret = make(here.parent / "outside", secret=b"secret")
    (here / "best").symlink_to("a")
    (here / "stolen").symlink_to(secret / "secret")
    (here / "folder").symlink_to(secret)
    (here / "loop").symlink_to("loop")
    (here / "nowhere").symlink_to("nothing")
    os.mkfifo(here / "pipe")
    up(here, there)
    assert contents(there) == {"a": b"a", "b": b"b", "best": b"a"}
    assert not (there / "best").is_symlink()


def test_leased_file_does_not_block_the_others(here: Path, there: Path) -> None:
    with leased(here / "a"), pytest.raises(StoreError, match="1 of the files in"):
        up(here, there)
    assert contents(there) == {"b": b"b"}


def test_folder_link_in_the_target_leads_no_file_out_of_it(here: Path, there: Path) -> None:
    (here / "sub").mkdir()
    make(here / "sub", file=b"new")
    outside = make(there.parent / "outside", file=b"old")
    there.mkdir()
    (there / "sub").symlink_to(outside)
    with pytest.raises(StoreError, match=r"there/sub/file: a link there leads out"):
        download_folder(str(here), str(there), (), MirroredFiles(), cancel=CancelToken())
    assert contents(outside) == {"file": b"old"}


def test_file_link_in_the_target_is_replaced_and_not_followed(here: Path, there: Path) -> None:
    outside = make(there.parent / "outside", file=b"old")
    there.mkdir()
    (there / "a").symlink_to(outside / "file")
    download_folder(str(here), str(there), (), MirroredFiles(), cancel=CancelToken())
    assert contents(outside) == {"file": b"old"}
    assert contents(there) == contents(here)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//x", ".", "a\0x"])
def test_names_that_lead_out_of_the_folder_are_rejected(
    there: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forged:
        def list(self, cancel: CancelToken) -> dict[str, FileStamp]:
            return {name: FileStamp(1, 0)}

        def put(self, name: str, path: str, cancel: CancelToken) -> None: ...

        def get(self, name: str, path: str, size: int, cancel: CancelToken) -> None:
            Path(path).write_bytes(b"x")

        def delete(self, cancel: CancelToken) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(mirroring, "open_destination", lambda _: Forged())
    with pytest.raises(StoreError, match="is not the name of a file below it"):
        download_folder("s3://forged", str(there / "a"), (), MirroredFiles(), cancel=CancelToken())
    assert list(there.rglob("x")) == []


def test_folder_is_not_copied_into_itself(here: Path) -> None:
    for there in (here, here / "copy", here.parent):
        with pytest.raises(StoreError, match="one is inside the other"):
            up(here, there)


def test_root_folder_is_not_deleted() -> None:
    with pytest.raises(StoreError, match="root of the file system"):
        delete_folder("/", MirroredFiles(), cancel=CancelToken())


def test_address_of_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(ConfigError, match="the scheme of the destination 'gs://bucket' is unknown"):
        open_destination("gs://bucket")


@pytest.mark.parametrize(
    ("address", "joined"),
    [
        ("/a/b", "/a/b/c"),
        ("s3://b/p?endpoint=http://h:1/", "s3://b/p/c?endpoint=http://h:1/"),
        ("s3://b", "s3://b/c"),
        ("gs://b/?k=/v", "gs://b/c?k=/v"),
        ("file:///a/", "file:///a/c"),
        ("/what?/", "/what?/c"),
    ],
)
def test_names_are_joined_to_addresses_before_their_query(address: str, joined: str) -> None:
    assert join(address, "c") == joined


@pytest.mark.parametrize("address", ["s3://b/p", "file:///p", "/p"])
def test_record_of_copies_forgets_a_deleted_destination(address: str) -> None:
    copied = MirroredFiles()
    stamp = (FileStamp(1, 1),)
    for name in ("größe/a", "größe 2/a"):
        copied.between("/here", address)[name] = stamp
    copied.forget(join(address, "größe"))
    assert list(copied.between("/here", address)) == ["größe 2/a"]
    copied.forget(f"{address}/")
    assert copied.between("/here", address) == {}


# --- excludes -------------------------------------------------------------------------------------


@pytest.mark.parity(11, 144)
@pytest.mark.parametrize(
    ("name", "is_left_out"),
    [
        ("result.json", False),
        ("checkpoint_1-000001/files/x", False),
        ("checkpoint_best.pt", False),
        ("checkpoint_000005", True),
        ("checkpoint_000005/x", True),
        ("checkpoint_tmp3f/x", True),
        ("checkpoint_-00001/x", True),
        (".staging/ab/files/x", True),
        (".cache/x", True),
        ("plots/.cached", False),
    ],
)
def test_temporary_files_are_never_copied(name: str, is_left_out: bool) -> None:
    assert excluding(NEVER_COPIED)(name) is is_left_out


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("checkpoint_1-000001", True),
        ("checkpoint_12-1000001/manifest.json", True),
        ("checkpoint_best.pt", False),
        ("my/checkpoint_1-000001", False),
    ],
)
def test_checkpoint_folders_are_recognised_by_their_names(name: str, fits: bool) -> None:
    assert excluding([CHECKPOINTS])(name) is fits


@given(
    st.lists(st.sampled_from(["a", "b*", "*/c", "./d/", "[e-g]", "*"]), max_size=3),
    st.lists(st.text("abcdefg", min_size=1, max_size=2), min_size=1, max_size=4),
)
def test_excluded_folder_excludes_everything_below_it(
    patterns: list[str], parts: list[str]
) -> None:
    is_excluded = excluding(patterns)
    states = [is_excluded("/".join(parts[: n + 1])) for n in range(len(parts))]
    assert states == sorted(states)
