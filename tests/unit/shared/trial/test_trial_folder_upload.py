"""Which files of a trial's folder are uploaded to the store."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.leases import leased
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, TransferCancelled
from tunemq_shared.objects.object_store import InvalidObjectName
from tunemq_shared.trial import trial_folder_upload
from tunemq_shared.trial.trial_folder_upload import send_folder

#: The keys of the files of `folder`.
STDOUT, PLOT = "train_a/attempt_1/stdout", "train_a/attempt_1/plots/a.png"


class Objects:
    """A store that accepts files."""

    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.changes: set[str] = set()
        self.before: Callable[[str], object] = lambda key: None

    def put_file(self, key, path, *, size, sha256, cancel, on_trouble):
        self.before(key)
        if len(key.encode()) > 1024:
            raise InvalidObjectName(key)
        if key.rpartition("/")[2] in self.changes:
            raise CheckpointCorrupt(f"{path}: the file has grown")
        self.there[key] = path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"stdout": "hello\n", "stderr": "", "plots/a.png": "png"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("/etc/passwd")
    return tmp_path


def send(folder: Path, *, attempt: int = 1, objects: Objects | None = None, **how: int) -> Objects:
    objects = objects or Objects()
    send_folder(objects, folder, "train_a", attempt, CancelToken(), **how)
    return objects


def test_files_go_below_the_attempt_of_the_trial_except_links_and_empty_output(folder):
    assert send(folder).there == {
        STDOUT: b"hello\n",
        PLOT: b"png",
    }


def test_files_of_each_attempt_are_beside_the_others(folder):
    assert send(folder, attempt=2).there.keys() == {
        "train_a/attempt_2/stdout",
        "train_a/attempt_2/plots/a.png",
    }


def test_send_folder_with_a_leased_file_sends_the_others(folder):
    with leased(folder / "a"):
        assert send(folder).there.keys() == {
            STDOUT,
            PLOT,
        }


@pytest.mark.parametrize("name", ["checkpoint_tmp3f", "checkpoint_-00001", "checkpoint_000005"])
def test_send_folder_after_a_kill_during_save_leaves_unfinished_checkpoints_out(folder, name):
    (folder / name).mkdir()
    (folder / name / "weights").write_bytes(b"w")
    (folder / "plots" / name).mkdir()
    (folder / "plots" / name / "mine").write_bytes(b"m")
    assert send(folder).there.keys() == {
        STDOUT,
        PLOT,
        f"train_a/attempt_1/plots/{name}/mine",
    }


def test_files_beyond_the_limit_stay_out_and_the_largest_is_named(folder):
    (folder / "big").write_bytes(bytes(2**20))
    objects = Objects()
    with pytest.raises(StoreError, match=r"1 files were not sent.*take 100 KiB.*big \(1 MiB\)"):
        send(folder, objects=objects, limit_bytes=100 * 2**10)
    assert set(objects.there) == {STDOUT, PLOT}


@pytest.mark.parametrize(
    "name",
    [
        *("journal/a", "deep/journal/a", "tuner.pkl", "deep/tuner.pkl", "deep/tuner.pkl/a"),
    ],
)
def test_send_folder_names_reserved_for_the_scheduler_are_left_out_and_reported(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")
    (folder / "plots" / "journal").write_text("a file of that name is no folder")
    objects = Objects()
    with pytest.raises(StoreError, match=rf"1 files were not sent, such as {name}.*scheduler's"):
        send(folder, objects=objects)
    assert f"train_a/attempt_1/{name}" not in objects.there
    assert {STDOUT, "train_a/attempt_1/plots/journal"} <= set(objects.there)


def test_send_folder_names_that_are_too_long_are_left_out_and_reported(folder):
    long = "/".join(["d" * 200] * 6)
    (folder / long).mkdir(parents=True)
    (folder / long / "f").write_text("x")
    objects = Objects()
    with pytest.raises(StoreError, match=r"1 files were not sent, such as d{100}\.\.\.: .*1024"):
        send(folder, objects=objects)
    assert objects.there.keys() == {STDOUT, PLOT}


@pytest.mark.parametrize("limit", ["MAX_NAMES", "MAX_NAME_CHARS"])
def test_send_folder_with_too_many_names_sends_some_within_little_memory(
    limit, folder, monkeypatch
):
    deep = folder / "/".join(["d" * 250] * 12)
    deep.mkdir(parents=True)
    (deep / "0").touch()
    for number in range(1, 2_000):
        os.link(deep / "0", deep / str(number))
    monkeypatch.setattr(trial_folder_upload, limit, 40 if limit == "MAX_NAMES" else 50_000)
    objects = Objects()
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=r"more than .*pack them into an archive"):
            send(folder, objects=objects)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert {STDOUT, PLOT} >= objects.there.keys() > set()


def test_send_folder_that_is_cancelled_ends_while_it_lists_files(folder):
    objects, cancel = Objects(), CancelToken()
    cancel.cancel()
    for name in ("stdout", "stderr", "plots/a.png"):
        (folder / name).unlink()
    with pytest.raises(TransferCancelled):
        send_folder(objects, folder, "train_a", 1, cancel)


def test_file_being_written_is_left_to_the_next_upload(folder):
    objects = Objects()
    objects.changes = {"stdout"}
    assert set(send(folder, objects=objects).there) == {PLOT}


def test_file_that_becomes_endless_meanwhile_is_left_out(folder):
    (folder / "large").write_bytes(b"x" * 5000)
    objects = Objects()
    objects.before = lambda _: os.truncate(folder / "large", 2**43)
    assert set(send(folder, objects=objects).there) == {
        PLOT,
        STDOUT,
    }


def test_folder_that_was_never_created_is_empty(tmp_path):
    assert send(tmp_path / "none").there == {}


@pytest.mark.parametrize("level", ["folder below", "trial", "experiment"])
def test_send_folder_follows_no_link_that_replaces_a_folder_meanwhile(level, tmp_path, monkeypatch):
    folder = tmp_path / "trials" / "experiment" / "trial"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("1")
    (folder / "sub" / "secret").write_text("of the trial's, and longer")
    secrets = tmp_path / "secrets"
    for inner in ("", "sub", "trial/sub"):
        (secrets / inner).mkdir(parents=True, exist_ok=True)
        (secrets / inner / "secret").write_text("of the worker's, and longer")
    monkeypatch.chdir(secrets)
    replaced = {"folder below": folder / "sub", "trial": folder, "experiment": folder.parent}[level]

    def replace(key):
        if not replaced.is_symlink():
            replaced.rename(tmp_path / "renamed")
            os.symlink("/proc/self/cwd", replaced)

    objects = Objects()
    objects.before = replace
    send(folder, objects=objects)

    assert objects.there == {"train_a/attempt_1/a": b"1"}
