"""Telling files in progress from leftovers, even where locks do not work."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.leases import leased
from tunemq_shared.checkpoints import staging as module
from tunemq_shared.checkpoints.staging import STAGING, StagingFolder

DAY_S = 24 * 3600


@pytest.fixture
def staging(tmp_path: Path) -> StagingFolder:
    return StagingFolder(tmp_path)


def leave(staging: StagingFolder, name: str = "", *, age_s: float = 0, lock: bool = True) -> Path:
    """Create the leftovers of a writer that died ``age_s`` ago, by default on this machine."""
    folder = staging.name()
    folder = folder.with_name(name or folder.name)
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "part").write_bytes(b"12345")
    then = time.time() - age_s
    if lock:
        folder.with_name(f"{folder.name}.lock").touch()
        os.utime(folder.with_name(f"{folder.name}.lock"), (then, then))
    for path in (folder / "files" / "part", folder / "files", folder):
        os.utime(path, (then, then))
    return folder


def everything(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / STAGING))


def test_folder_exists_while_it_is_used(staging: StagingFolder, tmp_path: Path) -> None:
    with staging.new() as folder:
        (folder / "part").touch()
        assert staging.remove_leftovers() == (0, 0)
        assert (folder / "part").exists()
    assert everything(tmp_path) == []


def test_folder_that_was_moved_away_stays(staging: StagingFolder, tmp_path: Path) -> None:
    with staging.new() as folder:
        (folder / "whole").touch()
        folder.rename(tmp_path / "final")
    assert everything(tmp_path) == []
    assert (tmp_path / "final" / "whole").exists()


def test_error_leaves_nothing(staging: StagingFolder, tmp_path: Path) -> None:
    def fail_within() -> None:
        with staging.new() as folder:
            (folder / "part").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_within()
    assert everything(tmp_path) == []


@pytest.mark.parametrize("lock", [True, False])
def test_leftover_of_a_killed_writer_on_this_machine_is_removed_at_once(
    staging: StagingFolder, tmp_path: Path, lock: bool
) -> None:
    leave(staging, lock=lock)
    assert staging.remove_leftovers() == (1, 5)
    assert everything(tmp_path) == []


def test_lock_without_a_folder_is_removed(staging: StagingFolder, tmp_path: Path) -> None:
    leave(staging).rename(tmp_path / "moved")
    assert staging.remove_leftovers() == (0, 0)
    assert everything(tmp_path) == []


@pytest.mark.parametrize(("age_s", "removed"), [(0, 0), (DAY_S - 600, 0), (DAY_S + 600, 1)])
def test_leftover_of_another_machine_is_removed_after_a_day(
    staging: StagingFolder, tmp_path: Path, age_s: float, removed: int
) -> None:
    leave(staging, "othermachine-1234", age_s=age_s)
    assert staging.remove_leftovers().files == removed
    assert len(everything(tmp_path)) == 2 * (1 - removed)


def test_one_new_file_shows_that_another_machine_still_writes(
    staging: StagingFolder, tmp_path: Path
) -> None:
    folder = leave(staging, "othermachine-1234", age_s=2 * DAY_S)
    os.utime(folder / "files" / "part")
    assert staging.remove_leftovers() == (0, 0)
    assert len(everything(tmp_path)) == 2


def test_without_locks_only_age_counts(
    staging: StagingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", reject)
    with staging.new() as folder:
        assert staging.remove_leftovers() == (0, 0)
        assert folder.exists()
    leave(staging, age_s=DAY_S + 600)
    assert staging.remove_leftovers().files == 1
    assert everything(tmp_path) == []


def test_writer_whose_lock_was_taken_for_a_leftover_takes_another(
    staging: StagingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    lost: list[Path] = []

    def lose_and_lock(fd: int, operation: int) -> None:
        if not lost:
            [lock] = (tmp_path / STAGING).iterdir()
            lock.unlink()
            lost.append(lock)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lose_and_lock)
    with staging.new() as folder:
        assert lost
        assert everything(tmp_path) == [folder.name, f"{folder.name}.lock"]
        assert staging.remove_leftovers() == (0, 0)


@pytest.mark.parametrize("locked", [1, 50])
def test_new_folder_whose_lock_a_trial_holds_for_long_gets_another_name_or_fails(
    staging: StagingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: int
) -> None:
    held: list[int] = []
    opened: list[Path] = []

    def lock_first(path: Path, flags: int) -> int:
        fd = open_regular(path, flags)
        opened.append(path)
        assert len(opened) < 50, "it tries for ever"
        if len(held) < locked:  # a trial is faster
            held.append(os.open(path, os.O_RDWR))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    open_regular = module.open_regular
    monkeypatch.setattr(module, "open_regular", lock_first)
    try:
        if locked == 1:
            with staging.new() as folder:
                assert folder.is_dir()
        else:
            with pytest.raises(BlockingIOError, match="locks or removes"), staging.new():
                pass
    finally:
        for fd in held:
            os.close(fd)
    staging.remove_leftovers()
    assert everything(tmp_path) == []


def test_leftovers_with_held_locks_cost_no_time(staging: StagingFolder, tmp_path: Path) -> None:
    flocked, with_lease = leave(staging), leave(staging)
    began, used = time.monotonic(), time.process_time()
    with (
        open(f"{flocked}.lock", "r+b") as file,
        leased(with_lease.with_name(f"{with_lease.name}.lock")),
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(20):
            assert staging.remove_leftovers().files == 0
            with staging.new():
                pass
    assert time.monotonic() - began < 15.0
    assert time.process_time() - used < 2.0
    assert flocked.exists()
    assert with_lease.exists()


def test_foreign_folders_that_take_too_long_to_read_stay(
    staging: StagingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    foreign = leave(staging, "othermachine-1234", age_s=2 * DAY_S)
    leave(staging)
    assert staging.remove_leftovers() == (0, 0)  # in this time it counts nothing
    assert everything(tmp_path) == [foreign.name, f"{foreign.name}.lock"]
    monkeypatch.undo()
    assert staging.remove_leftovers() == (1, 5)


def test_machine_without_boot_id_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, **_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file", str(self))

    monkeypatch.setattr(Path, "read_text", missing)
    name = module._machine.__wrapped__()
    assert name
    assert "-" not in name


def test_missing_folder_has_no_leftovers(staging: StagingFolder) -> None:
    assert staging.remove_leftovers() == (0, 0)


def test_lock_with_a_lease_is_in_use(staging: StagingFolder, tmp_path: Path) -> None:
    folder = leave(staging)
    with leased(folder.with_name(f"{folder.name}.lock")):
        assert staging.remove_leftovers() == (0, 0)
        assert len(everything(tmp_path)) == 2
    assert staging.remove_leftovers() == (1, 5)


@pytest.mark.parametrize(
    "put",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/full", path)],
    ids=["FIFO", "folder", "link"],
)
def test_lock_that_is_no_file_protects_no_leftover(
    staging: StagingFolder, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    put(leave(staging, lock=False).with_suffix(".lock"))
    assert staging.remove_leftovers() == (1, 5)
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    "put",
    [os.mkfifo, Path.touch, lambda path: path.symlink_to(path)],
    ids=["FIFO", "file", "link"],
)
def test_staging_folder_that_is_no_folder_has_no_leftovers(
    staging: StagingFolder, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    put(tmp_path / STAGING)
    assert staging.remove_leftovers() == (0, 0)
