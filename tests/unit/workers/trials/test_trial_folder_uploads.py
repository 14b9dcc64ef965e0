"""How a node handles trial folders that the scheduler cannot read; uploads nothing."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.unit.shared.system.test_folder_trees import make_deep  # noqa: F401  a fixture
from tests.unit.workers.fakes import Clock, FakeDisk, start
from tunemq_shared.protocol.messages import NodeWarned, decode_node_event
from tunemq_shared.protocol.output_chunks import decode
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.trials.output_streamer import CHUNK_BYTES, PERIOD_S
from tunemq_workers.trials.trial_folder_uploads import TrialFiles

STORE = "s3://bucket/farm/exp"


class FakeSender:
    """Records the uploads, and reports them as done when a test says so."""

    def __init__(self):
        self.asked = []

    def start(self, send, on_done, on_failed, on_trouble):
        self.asked.append((send, on_done, on_failed))
        return len(self.asked)


class World:
    """A node's folder, and the `TrialFiles` that manage the trials' files in it."""

    def __init__(self, folder, disk_bytes=0):
        self.folder = folder
        self.clock, self.disk, self.sender = Clock(), FakeDisk(), FakeSender()
        self.orders, self.events = [], []
        self.has_time = True
        self.limits = CacheLimits(disk_given=disk_bytes)
        self.files = TrialFiles(
            self.clock,
            self.disk,
            self.sender,
            lambda key, event: self.events.append((key, decode_node_event(event))),
            send=self.orders.append,
            may_send=lambda: self.has_time,
            folder=str(folder),
            node="one",
            limits=self.limits,
        )
        self.running_trials = {}
        self.files.running_trials = lambda: list(self.running_trials.items())
        self.files.start()
        self.disk.settle()

    def process(self, trial="a", attempt=1, **how):
        path = self.path(trial, attempt)
        path.mkdir(parents=True, exist_ok=True)
        begun = start(folder=str(path), store=STORE, **how)
        self.running_trials[trial, attempt] = begun
        return begun

    def leave(self, trial="a", attempt=1):
        begun = self.running_trials.pop((trial, attempt))
        self.files.left((trial, attempt), begun)
        self.disk.settle()

    def finish(self, number):
        """End an upload, counted from 0."""
        self.sender.asked[number][1](None)
        self.disk.settle()

    def fail(self, number, reason):
        """End an upload, counted from 0, as failed."""
        self.sender.asked[number][2](reason, False)
        self.disk.settle()

    def path(self, trial, attempt=1):
        return self.folder / "trials/exp" / str(attempt) / f"train_{trial}"

    def print(self, text, trial="a", name="stdout"):
        with (self.path(trial) / name).open("a") as file:
            file.write(text)

    def told(self):
        """Return the events that were published since the last call."""
        self.clock.advance(PERIOD_S)
        self.disk.settle()
        orders, self.orders[:] = list(self.orders), []
        if orders:
            self.files.output_sent()
        return [(key, decode(piece)) for order in orders for key, piece in order.pieces]

    def said(self):
        return [(piece.offset, piece.data) for _, piece in self.told()]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_new_output_is_reported_once_a_second(world):
    world.process()
    assert world.told() == []
    world.print("one\n")
    world.print("oh\n", name="stderr")
    (key, out), (_, err) = world.told()
    assert (key, out.trial, out.attempt, out.folder) == ("events", "a", 1, "train_a")
    assert (out.name, out.offset, out.data) == ("stdout", 0, b"one\n")
    assert (err.name, err.data) == ("stderr", b"oh\n")
    world.print("two\n")
    assert world.said() == [(4, b"two\n")]
    assert world.said() == []


def test_flood_of_output_reports_the_newest(world):
    world.process()
    world.print("x" * 10 * CHUNK_BYTES + "y" * CHUNK_BYTES)
    assert world.said() == [(10 * CHUNK_BYTES, b"y" * CHUNK_BYTES)]


def test_output_waits_while_the_connection_is_busy(world):
    world.process()
    world.has_time = False
    world.print("one\n")
    assert world.told() == []
    world.has_time = True
    world.clock.advance(PERIOD_S)
    world.disk.settle()
    world.print("two\n")
    world.clock.advance(PERIOD_S)
    world.disk.settle()
    assert len(world.orders) == 1
    assert world.said() == [(0, b"one\n")]
    assert world.said() == [(4, b"two\n")]


def test_last_output_of_a_trial_is_reported_after_its_process_has_ended(world):
    world.process()
    world.print("one\n")
    assert world.said() == [(0, b"one\n")]
    world.print("bye\n")
    world.leave()
    assert world.said() == [(4, b"bye\n")]


def test_shortened_file_is_reported_from_its_beginning(world):
    world.process()
    world.print("0123456789")
    world.told()
    (world.path("a") / "stdout").write_text("[x]9")
    assert world.said() == [(0, b"[x]9")]


def test_trials_with_folders_elsewhere_are_ignored(world, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/stdout").write_text("x")
    world.running_trials["a", 1] = start(folder=str(tmp_path / "shared"), store=STORE)
    assert world.told() == []
    world.leave()
    assert (world.told(), world.sender.asked) == ([], [])


def test_files_are_uploaded_when_a_process_has_left_and_then_removed_from_the_node(world):
    world.process(sync_timeout_s=70.0)
    world.print("one\n")
    world.leave()
    ((send, on_done, _),) = world.sender.asked
    assert (send.store, send.key, send.folder, send.attempt) == (
        *(STORE, "train_a"),
        *(str(world.path("a")), 1),
    )
    assert send.timeout_s == 70.0
    assert world.files.unsettled() == {"events"}
    on_done(None)
    world.disk.settle()
    assert world.files.unsettled() == set()
    assert not (world.folder / "trials/exp").exists()
    assert [name for name in os.listdir(world.folder) if "trash" in name] == []


def test_folder_is_moved_by_a_disk_job_since_a_trial_can_lock_its_parent(world, monkeypatch):
    world.process()
    world.print("one\n")
    world.leave()
    jobs = []
    monkeypatch.setattr(world.disk, "run", lambda place, job, then: jobs.append((job, then)))
    world.sender.asked[0][1](None)
    assert world.path("a").exists()
    assert world.files.unsettled() == {"events"}
    (job, then) = jobs.pop()
    then(job())
    assert not world.path("a").exists()
    assert world.files.unsettled() == set()


def unsent(world):
    return sorted((world.folder / "trials").glob("unsent-*"))


def test_failed_upload_is_reported_and_the_files_stay_out_of_the_way(world):
    world.process()
    world.print("one")
    world.leave()
    world.fail(0, "the store is away.")
    (kept,) = unsent(world)
    assert (kept / "stdout").read_text() == "one"
    text = (
        f"Not all files of train_a are in the store: the store is away. They are in {kept} on node"
        " one for 7 days, or until it needs the space."
    )
    assert world.events == [("events", NodeWarned(text))]
    assert os.listdir(world.folder / "trials") == [kept.name]


def test_files_that_were_not_sent_are_removed_where_they_exceed_their_room(tmp_path, caplog):
    world = World(tmp_path, disk_bytes=2_500_000)
    for trial, size in {"a": 100_000, "b": 100_000, "c": 100_000, "large": 300_000}.items():
        world.process(trial)
        world.print("x" * size, trial)
        world.leave(trial)
    for number in range(4):
        world.fail(number, "the store is away")
    assert [path.name.rpartition("-")[2] for path in unsent(world)] == ["train_b", "train_c"]
    assert caplog.text.count("files.removed") == 2


def test_empty_files_that_were_not_sent_count_as_they_take_inodes(tmp_path):
    world = World(tmp_path, disk_bytes=2_500_000)
    world.process()
    for number in range(20):
        (world.path("a") / str(number)).touch()
    world.leave()
    world.fail(0, "the store is away")
    assert not unsent(world)


def test_old_files_that_were_not_sent_are_removed(world, monkeypatch):
    world.process()
    world.leave()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 8 * 86_400 * 10**9)
    world.fail(0, "the store is away")
    assert unsent(world)
    monkeypatch.undo()
    World(world.folder)
    assert not unsent(world)


def test_next_attempt_does_not_change_the_files_of_the_last_one_while_they_are_sent(world):
    for attempt in (1, 2):
        world.process(attempt=attempt)
        (world.path("a", attempt) / "model").write_text(str(attempt))
        world.leave(attempt=attempt)
    (first, *_), (second, *_) = world.sender.asked
    assert (first.attempt, second.attempt) == (1, 2)
    assert [Path(send.folder, "model").read_text() for send in (first, second)] == ["1", "2"]
    world.finish(0)
    assert not world.path("a").exists()
    assert world.path("a", 2).exists()
    world.finish(1)
    assert os.listdir(world.folder / "trials") == []


def test_files_stay_in_place_without_a_remote_store(world):
    begun = world.process()
    world.files.left(("a", 1), type(begun)(**{**fields(begun), "store": "/shared"}))
    assert world.sender.asked == []
    assert world.path("a").exists()


def fields(begun):
    return {name: getattr(begun, name) for name in begun.__struct_fields__}


def test_leftovers_of_an_earlier_node_are_kept_as_unsent_and_its_trash_is_removed(tmp_path):
    for name in ("old", ".trash-1"):
        (tmp_path / "trials" / name / "deep").mkdir(parents=True)
    world = World(tmp_path)
    world.disk.settle()
    (kept,) = unsent(world)
    assert (kept / "deep").exists()
    World(tmp_path).disk.settle()
    assert os.listdir(tmp_path / "trials") == [kept.name]


def test_node_that_ends_waits_for_no_upload_and_says_where_the_files_are(world):
    world.process()
    world.leave()
    world.files.close()
    assert world.files.unsettled() == set()
    ((_, warned),) = world.events
    assert f"the node ends. They are in {world.path('a')} on node one" in warned.text
    world.finish(0)  # it was fast enough
    assert os.listdir(world.folder / "trials") == []


def test_copies_of_checkpoints_of_a_killed_trial_are_removed_whatever_it_named_files(world):
    begun = world.process()
    for name in ("checkpoint_tmp_1_a", "checkpoint_tmp_1_b", "checkpoint_tmp_2_a", "mine"):
        (world.path("a") / name / "files").mkdir(parents=True)
    for number in range(1, 3_000):
        os.symlink("none", world.path("a") / f"{number:0250}")
    tracemalloc.start()
    try:
        world.files.cut_off(("a", 1), begun)
        world.disk.settle()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    left = {name for name in os.listdir(world.path("a")) if not name.isdigit()}
    assert left == {"checkpoint_tmp_2_a", "mine"}
    assert peak < 2**18


def test_folder_deeper_than_any_path_is_removed(world, tmp_path, make_deep):  # noqa: F811
    world.process()
    deep = make_deep(world.path("a"))

    world.leave()
    world.finish(0)
    world.disk.settle()

    assert not deep.exists()
    assert not [name for name in os.listdir(world.folder / "trials") if name.startswith(".trash")]
