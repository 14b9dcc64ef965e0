"""A crash leaves each experiment in the queue as it was before or after its last change."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.farms.farm_api_server import CODE
from tests.support.synced_files import SyncedFiles
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.farm.ipc.ipc_messages import RETRY_ALL
from tunemq_scheduler.farm.service import experiment_queue as queue_module
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.queue_entry import LEGAL
from tunemq_shared.base.errors import BugError, ConfigError, JournalError
from tunemq_shared.protocol.farm_requests import ExperimentEnvironment


@pytest.fixture
def queue(tmp_path: Path) -> ExperimentQueue:
    return ExperimentQueue(tmp_path / "q", now=lambda: 100.0)


def add(queue, name, priority=0, owner="ann"):
    return queue.add(name, owner=owner, code=CODE, priority=priority)


def again(queue) -> ExperimentQueue:
    return ExperimentQueue(queue._folder)


def names(entries):
    return [entry.name for entry in entries]


def test_waiting_experiments_are_ordered_by_priority_and_then_by_submission(queue):
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)):
        add(queue, name, priority)

    assert names(queue.waiting()) == ["b", "d", "a", "c", "e"]
    assert queue.ahead_of(queue.get("c")) == 3
    assert names(again(queue).waiting()) == ["b", "d", "a", "c", "e"]


def test_experiment_survives_the_end_of_the_process(queue):
    settings = ExperimentEnvironment(
        python="/venv/bin/python", variables={"A": "1"}, preload=("numpy",)
    )
    queue.add("a", owner="ann", code=CODE, priority=3, settings=settings, request="r1")
    queue.move("a", State.RUNNING, "it began")

    found = again(queue)

    assert found.get("a") == queue.get("a")
    assert found.get("a").settings == settings
    assert found.submitted_by("r1") == found.get("a")
    assert found.damaged == []


def test_each_experiment_has_a_unique_id_of_five_hexadecimal_digits(queue, monkeypatch):
    drawn = iter([b"\x01\x02\x03", b"\x01\x02\x0f", b"\x0a\xbc\xde"])
    monkeypatch.setattr(queue_module.os, "urandom", lambda _: next(drawn))

    assert [add(queue, name).id for name in ("a", "b")] == ["01020", "0abcd"]


def test_times_are_those_of_the_newest_run(queue):
    add(queue, "a")
    queue.move("a", State.RUNNING)
    entry = queue.move("a", State.FAILED, "its process died")
    assert (entry.submitted, entry.started, entry.ended, entry.runs) == (100, 100, 100, 1)

    entry = queue.move("a", State.QUEUED, retry=RETRY_ALL)
    assert (entry.ended, entry.retry) == (None, RETRY_ALL)
    entry = queue.move("a", State.RUNNING)
    assert (entry.runs, entry.retry) == (2, RETRY_ALL)
    assert queue.move("a", State.FINISHED).retry == ""


@pytest.mark.parametrize("start", list(State))
@pytest.mark.parametrize("finish", list(State))
def test_only_legal_transitions_are_made(queue, start, finish):
    way = {
        State.QUEUED: [],
        State.RUNNING: [State.RUNNING],
        State.PAUSED: [State.PAUSED],
        State.STOPPING: [State.RUNNING, State.STOPPING],
        State.FINISHED: [State.RUNNING, State.FINISHED],
        State.STOPPED: [State.STOPPED],
        State.FAILED: [State.FAILED],
    }[start]
    add(queue, "a")
    for state in way:
        queue.move("a", state)

    if finish in LEGAL[start]:
        assert queue.move("a", finish).state is finish
        assert names(queue.in_state(finish)) == ["a"]
    else:
        with pytest.raises(BugError, match=f"from {start} to {finish}"):
            queue.move("a", finish)
        assert again(queue).get("a").state is start


def test_experiment_that_leaves_the_queue_no_longer_waits(queue):
    for name in "abc":
        add(queue, name)
    queue.move("b", State.RUNNING)
    assert names(queue.waiting()) == ["a", "c"]
    queue.move("b", State.QUEUED)
    assert names(queue.waiting()) == ["a", "b", "c"]


def test_name_that_is_taken_or_unsafe_is_rejected(queue):
    add(queue, "a")
    with pytest.raises(ConfigError, match="the experiment a exists already"):
        add(queue, "a")
    with pytest.raises(ConfigError, match=r"'\.\./x' is invalid for an experiment; use 'x'"):
        add(queue, "../x")
    for name in ("blobs", "journal"):
        with pytest.raises(ConfigError, match=f"use '_{name}'"):
            add(queue, name)


def test_removed_experiment_is_gone_and_its_name_is_free(queue):
    add(queue, "a")
    with pytest.raises(BugError, match="QUEUED"):
        queue.remove("a")
    queue.move("a", State.STOPPED)
    queue.remove("a")

    assert queue.all() == again(queue).all() == []
    add(queue, "a")


def test_known_reason_is_not_written_again(queue, tmp_path):
    add(queue, "a")
    queue.explain("a", "no node has a gpu")
    before = (tmp_path / "q" / "a.json").stat().st_ino
    queue.explain("a", "no node has a gpu")

    assert (tmp_path / "q" / "a.json").stat().st_ino == before
    assert again(queue).get("a").reason == "no node has a gpu"


def test_change_cut_at_any_byte_leaves_the_state_before(queue, tmp_path):
    add(queue, "a")
    whole = (tmp_path / "q" / "a.json").read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "q" / "a.new").write_bytes(whole[:size])
        found = again(queue)
        assert names(found.waiting()) == ["a"]
        assert found.damaged == []
        assert not (tmp_path / "q" / "a.new").exists()


def test_experiment_with_a_damaged_file_fails_and_the_file_stays(queue, tmp_path):
    for name in "abc":
        add(queue, name)
    path = tmp_path / "q" / "b.json"
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, 11):
        path.write_bytes(whole[:size])
        found = again(queue)
        assert names(found.waiting()) == ["a", "c"]
        (failed,) = found.in_state(State.FAILED)
        assert failed.name == "b"
        for part in (str(path), "backup", "tunemq rm b"):
            assert part in failed.reason
        assert found.damaged == [f"b: {failed.reason}"]
        assert not found.may(failed, State.QUEUED)
        assert path.read_bytes() == whole[:size]
    path.write_bytes(whole)  # as it says
    assert names(again(queue).waiting()) == ["a", "b", "c"]


def test_experiment_with_a_damaged_file_can_be_removed(queue, tmp_path):
    add(queue, "a")
    (tmp_path / "q" / "a.json").write_bytes(b"{")
    found = again(queue)
    found.remove("a")
    assert found.all() == again(queue).all() == []
    add(found, "a")


def test_file_under_another_name_is_a_damaged_experiment(queue, tmp_path):
    add(queue, "a")
    for name in ("z", "no name"):
        (tmp_path / "q" / f"{name}.json").write_bytes((tmp_path / "q" / "a.json").read_bytes())

    found = again(queue)

    assert names(found.waiting()) == ["a"]
    assert names(found.in_state(State.FAILED)) == ["z"], "no experiment has the other name"
    assert len(found.damaged) == 2


def test_file_of_a_later_version_is_left_alone_and_rejected(queue, tmp_path):
    add(queue, "a")
    path = tmp_path / "q" / "a.json"
    later = {**msgspec.json.decode(path.read_bytes()), "version": 99, "state": "DREAMING"}
    path.write_bytes(msgspec.json.encode(later))

    with pytest.raises(JournalError, match="version 99"):
        again(queue)
    assert path.exists()


def test_failing_disk_leaves_everything_as_it_was(queue, monkeypatch):
    add(queue, "a")

    def reject(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(queue_module.os, "fsync", reject)
    with pytest.raises(JournalError, match="No space left"):
        queue.move("a", State.RUNNING)
    with pytest.raises(JournalError):
        add(queue, "b")
    monkeypatch.undo()

    assert names(queue.waiting()) == names(again(queue).waiting()) == ["a"]


def test_change_is_synced_before_it_counts(queue, tmp_path, monkeypatch):
    disk = SyncedFiles(monkeypatch)
    add(queue, "a")
    queue.move("a", State.RUNNING)
    assert len(disk.renamed) == 2
    assert disk.unsynced == []
    assert disk.has(tmp_path / "q")


def test_files_are_private_to_the_owner(queue, tmp_path):
    add(queue, "a")
    assert (tmp_path / "q").stat().st_mode & 0o077 == 0
    assert (tmp_path / "q" / "a.json").stat().st_mode & 0o077 == 0


def test_thousand_waiting_experiments_are_read_at_once_and_change_one_file_each(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # do not measure the disk's speed
    queue = ExperimentQueue(tmp_path / "q")
    for number in range(1000):
        add(queue, f"e{number}", number % 3)

    begun = time.thread_time()  # processor time: the load of the machine does not matter
    found = again(queue)
    assert time.thread_time() - begun < 5
    reads = []
    monkeypatch.setattr(Path, "read_bytes", reads.append)
    add(found, "urgent", 100)
    assert found.waiting()[0].name == "urgent"
    found.move("urgent", State.RUNNING)
    assert len(found.waiting()) == 1000
    assert reads == []
