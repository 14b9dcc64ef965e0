"""Changes of trials' files are synced to disk, mostly in a thread beside the search."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tests.unit.scheduler.fake_trials import FakeTrial
from tunemq_scheduler.output import pending_fsyncs as module
from tunemq_scheduler.output.loggers import CSVLoggerCallback, JsonLoggerCallback
from tunemq_scheduler.output.pending_fsyncs import AT_ONCE, UnsyncedFiles
from tunemq_shared.base.errors import StoreError


class Disk:
    """A disk that records each fsync, and may delay or fail it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.is_open = threading.Event()
        self.is_open.set()
        self.fails_at = ""
        self._fsync = os.fsync
        monkeypatch.setattr(module.os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.is_open.wait(60)
        self.threads.add(threading.current_thread())
        if path == self.fails_at:
            raise OSError(errno.EIO, "Input/output error")
        self._fsync(descriptor)
        self.synced.append(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.is_open.set()


def written(files: UnsyncedFiles, folder: Path, count: int) -> list[str]:
    """Write ``count`` files, note them as unsynced and return their paths."""
    paths = [folder / f"{number}.json" for number in range(count)]
    for path in paths:
        path.write_text("{}")
        files.note(str(path))
    return [str(path) for path in paths]


def test_few_unsynced_files_are_synced_at_once_with_their_folders(
    disk: Disk, tmp_path: Path
) -> None:
    files = UnsyncedFiles()
    paths = written(files, tmp_path, 3)
    assert files.settle()
    assert disk.synced == [*paths, str(tmp_path), str(tmp_path.parent)]
    assert disk.threads == {threading.current_thread()}
    assert files.settle()
    assert len(disk.synced) == 5, "no file was written since"


def test_many_unsynced_files_do_not_block_the_search(disk: Disk, tmp_path: Path) -> None:
    files = UnsyncedFiles()
    paths = written(files, tmp_path, AT_ONCE + 1)
    disk.is_open.clear()
    assert not files.settle()
    assert not files.settle()
    assert files.is_settling
    disk.is_open.set()
    files.note(paths[0])  # a result that arrived meanwhile
    eventually(files.settle)
    assert set(paths) <= set(disk.synced)
    assert disk.synced.count(paths[0]) == 2
    assert not files.is_settling
    files.close()


def rounds_of(files: UnsyncedFiles, folder: Path, counts: list[int]) -> list[bool]:
    """Write ``counts[i]`` files in round i, and return the answers of ``settle``."""
    said = []
    for count in counts:
        written(files, folder, count)
        said.append(files.settle())
        if files._thread is not None:
            files._thread.join()
    return said


def test_unsynced_files_of_running_trials_are_waited_for(disk: Disk, tmp_path: Path) -> None:
    files = UnsyncedFiles()
    few = AT_ONCE + 1
    assert rounds_of(files, tmp_path, [9 * few, 4 * few, few, few]) == [False, False, False, True]
    assert disk.synced.count(str(tmp_path / "0.json")) == 4


def test_unsynced_files_that_never_become_few_are_never_waited_for(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_AT_ONCE", AT_ONCE + 1)
    files = UnsyncedFiles()
    assert not any(rounds_of(files, tmp_path, [AT_ONCE + 2] * 6))
    assert threading.current_thread() not in disk.threads
    assert rounds_of(files, tmp_path, [1]) == [True]


def test_search_that_ends_stops_the_sync_of_files(disk: Disk, tmp_path: Path) -> None:
    files = UnsyncedFiles()
    written(files, tmp_path, AT_ONCE + 1)
    files._is_closed = True
    assert not files.settle()
    files.close()
    assert not disk.synced


def test_unsynced_files_are_not_tracked_where_no_snapshot_is_possible(
    disk: Disk, tmp_path: Path
) -> None:
    files = UnsyncedFiles()
    written(files, tmp_path, 3)
    files.forget()
    assert not list(files)
    assert files.settle()
    assert not disk.synced


def test_file_that_a_full_disk_did_not_take_stays_unsynced(disk: Disk, tmp_path: Path) -> None:
    files = UnsyncedFiles()
    (path,) = written(files, tmp_path, 1)
    files.hold(path)
    assert not files.settle()
    files.note(path)
    assert files.settle()


@pytest.mark.parametrize("count", [1, AT_ONCE + 1])
def test_failed_fsync_is_reported_with_the_file(disk: Disk, tmp_path: Path, count: int) -> None:
    files = UnsyncedFiles()
    disk.fails_at = written(files, tmp_path, count)[0]
    with pytest.raises(StoreError, match=r"0.json cannot be brought to the disk: Input/output"):
        eventually(files.settle)


def test_unsynced_files_that_are_gone_are_skipped(disk: Disk, tmp_path: Path) -> None:
    files = UnsyncedFiles()
    (path,) = written(files, tmp_path, 1)
    os.unlink(path)
    assert files.settle()


def test_loggers_note_each_file_that_they_wrote(disk: Disk, tmp_path: Path) -> None:
    files = UnsyncedFiles()
    trial = FakeTrial(0, tmp_path)
    loggers = JsonLoggerCallback(files), CSVLoggerCallback(files)
    for logger in loggers:
        logger.log_trial_start(trial)
        logger.log_trial_result(0, trial, trial.result(1, loss=1.0))
        logger.flush()
    assert files.settle()
    assert {Path(path).name for path in disk.synced} >= {
        "result.json",
        "progress.csv",
        "params.json",
        "params.pkl",
    }
    disk.synced.clear()
    for logger in loggers:
        logger.log_trial_result(0, trial, trial.result(2, loss=1.0, more=2.0))
        logger.log_trial_end(trial)
    assert files.settle()
    assert {Path(path).suffix for path in disk.synced if Path(path).is_file()} == {".json", ".csv"}
    for logger in loggers:
        logger.on_experiment_end([])
