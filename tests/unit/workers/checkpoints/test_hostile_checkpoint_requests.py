"""Trial processes that request checkpoints and space in any order and ignore the answers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.unit.workers.fake_checkpoint_node import (
    KEY,
    World,
    committed_ref,
    elsewhere,
    written_ref,
)
from tunemq_shared.base.errors import StoreError, TransportError
from tunemq_shared.checkpoints.store import check_key
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointRef,
)
from tunemq_workers.checkpoints import cache_disk, checkpoint_messages
from tunemq_workers.checkpoints.cache_disk import CountedBytes
from tunemq_workers.checkpoints.checkpoint_messages import FetchCheckpoint
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.trial_process_state import TrialKey

TRIALS = ("a", "b")
OTHER = "tunemq:events:other"
LARGE = 2 * 2**20

trials = st.sampled_from(TRIALS)


class Machine(RuleBasedStateMachine):
    """The only error is the rejection of a message, which ends the process that sent it."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tunemq-test-"))
        self.world = World(self.folder, cache_bytes=60_000, uploads_bytes=20)
        self.processes = {}
        self.attempts = dict.fromkeys(TRIALS, 0)
        self.refs = [
            elsewhere(self.world),
            elsewhere(self.world, "s/checkpoint_1-000008"),
            CheckpointRef("s/checkpoint_1-000009", "0" * 64, 9),
            CheckpointRef("s/checkpoint_1-000010", "", 10),
        ]

    def teardown(self):
        for trial in TRIALS:
            self.ends(trial)
        self.world.disk.settle()
        self.world.checkpoints.close()
        shutil.rmtree(self.folder)

    def process(self, trial):
        if trial not in self.processes:
            self.attempts[trial] += 1
            self.processes[trial] = self.world.process(
                trial, self.attempts[trial], restore=self.all_refs(), sync_timeout_s=4.0
            )
        return self.processes[trial]

    def all_refs(self):
        committed = (
            committed_ref(self.world, key)
            for trial in TRIALS
            for key in self.world.keys(CheckpointCommitted, trial)
        )
        return (*self.refs, *committed)

    def says(self, trial, kind, payload=b""):
        process = self.process(trial)
        try:
            self.world.checkpoints.said(process.process, kind, payload)
        except TransportError:
            self.ends(trial)

    @rule(trial=trials)
    def asks_to_save(self, trial):
        self.says(trial, frames.ASK_SAVE)

    @rule(trial=trials, data=st.data(), again=st.booleans())
    def asks_for_a_checkpoint(self, trial, data, again):
        ref = data.draw(st.sampled_from(self.all_refs()))
        self.says(trial, frames.FETCH, checkpoint_messages.encode(FetchCheckpoint(ref, again)))

    @rule(trial=trials)
    def writes_if_it_may(self, trial):
        process = self.process(trial)
        answered = bool(process.answers) and getattr(process.answers[-1], "cache", "")
        if answered and self.world.checkpoints._backpressure.is_writing(process.process.name):
            try:
                process.write()
            except TransportError:
                self.ends(trial)

    @rule(trial=trials)
    def ends(self, trial):
        if trial in self.processes:
            self.processes.pop(trial).die()

    @rule(trial=trials, how=st.sampled_from(["stop", "pause"]))
    def is_told_to_end(self, trial, how):
        self.process(trial).told(**{how: True})

    @rule()
    def the_disk_is_done(self):
        self.world.disk.settle()

    @precondition(lambda self: self.world.transfers.under_way)
    @rule(data=st.data(), is_done=st.booleans())
    def a_transfer_ends(self, data, is_done):
        key = data.draw(st.sampled_from(self.world.transfers.keys()))
        known = key in self.world.transfers.store or not key.startswith("s/")
        if is_done and known:
            self.world.finish(key)
        else:
            self.world.fail(key)

    @rule()
    def time_passes(self):
        self.world.clock.advance(5)


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHostileCheckpointQuestions = Machine.TestCase


@pytest.mark.parametrize("claim", [0, 10**7, 2**53])
def test_trial_with_a_false_size_ends_and_its_claim_is_ignored(claim, tmp_path):
    world = World(tmp_path, uploads_bytes=2 * LARGE)
    process = world.process("a")
    process.ask()
    key = process.write(b"x" * LARGE, said_size=claim)
    reason = f"checkpoint {key} has {LARGE} bytes, and its trial's process said {claim}."
    assert world.given_up == [(TrialKey(KEY, "a"), reason)]
    assert world.checkpoints.uploads.size == LARGE
    assert world.process("b").ask()  # its search has room for others
    world.finish(key)
    assert world.checkpoints.uploads.size == 0


def test_size_measured_after_the_end_of_its_process_ends_no_later_attempt(tmp_path):
    world = World(tmp_path)
    process = world.process()
    process.ask()
    process.write(said_size=10**7, settle=False)
    process.die()
    assert world.given_up == []
    assert world.checkpoints.uploads.size == 10


def test_size_of_a_checkpoint_whose_metadata_changed_is_corrected(tmp_path):
    world = World(tmp_path)
    process = world.process()
    process.ask()
    process.write(said_size=7)
    assert world.given_up == []
    assert world.checkpoints.uploads.size == 10


@pytest.mark.parametrize(("claim", "counts"), [(0, 7), (2**40, 2**40)])
def test_checkpoint_that_cannot_be_counted_in_time_has_the_greater_size(
    claim, counts, tmp_path, monkeypatch
):
    monkeypatch.setattr(cache_disk, "count_bytes", lambda *_: CountedBytes(7, False))
    world = World(tmp_path)
    process = world.process()
    process.ask()
    process.write(said_size=claim)
    assert world.given_up == []
    assert world.checkpoints.uploads.size == counts


def test_disk_counts_one_checkpoint_of_a_trial_at_a_time_then_the_newest(tmp_path, monkeypatch):
    counted, measured = [], []
    count_bytes, measure = cache_disk.count_bytes, cache_disk.measure

    def count(root, key):
        counted.append(key)
        return count_bytes(root, key)

    def noted_measure(root, key):
        measured.append(key)
        return measure(root, key)

    monkeypatch.setattr(cache_disk, "count_bytes", count)
    monkeypatch.setattr(cache_disk, "measure", noted_measure)
    world = World(tmp_path)
    process, other = world.process("a"), world.process("b")
    process.ask()
    keys = []
    for _ in range(9):
        keys.append(process.write(settle=False))
        world.transfers.finish(keys[-1])
        world.checkpoints.said(process.process, frames.ASK_SAVE, b"")
    assert counted == measured == keys[:1]  # the disk is slow
    world.disk.settle()
    assert counted == [keys[0], keys[-1]]
    assert set(measured) == {keys[0], *keys[-2:]}
    other.ask()
    assert other.write() in counted


def test_checkpoint_that_is_removed_before_its_count_fails_no_trial(tmp_path):
    world = World(tmp_path, uploads_bytes=9 * LARGE)
    process = world.process()
    process.ask()
    first = process.write(b"x" * LARGE, settle=False)
    world.checkpoints.said(process.process, frames.ASK_SAVE, b"")
    second = process.write(b"y" * LARGE, settle=False)
    world.transfers.finish(first)
    world.transfers.finish(second)
    other = FetchCheckpoint(CheckpointRef(second, "0" * 64, 2), False)  # it makes way for this one
    world.checkpoints.said(process.process, frames.FETCH, checkpoint_messages.encode(other))
    world.disk.settle()
    assert second not in world.on_disk()
    assert world.given_up == []


def test_process_that_uses_no_permission_takes_no_space_after_its_upload(tmp_path):
    world = World(tmp_path, uploads_bytes=100)
    one, other = world.process("a"), world.process("b")
    world.finish(one.save())
    assert one.ask()  # and writes nothing
    assert other.ask()


@pytest.mark.parametrize("first", [100, 1000])
def test_search_whose_uploads_fill_the_space_waits_alone(first, tmp_path):
    world = World(tmp_path, uploads_bytes=100)
    large, waiting = world.process("a", waiting=9), world.process("b")
    key = large.save(b"x" * first)
    assert not large.ask()
    assert not waiting.ask()
    other = world.process("a", key=OTHER, waiting=9)
    other.save(b"x" * 25)
    other.save(b"x" * 25)
    assert not other.ask()  # it has its half
    third = world.process("a", key="tunemq:events:third")
    third.save(b"x" * 80)  # a checkpoint that is alone may be larger than a part
    world.finish(key)
    assert large.answers[-1].cache


def test_searches_use_space_that_others_leave(tmp_path):
    world = World(tmp_path, uploads_bytes=100)
    one, other = world.process("a", waiting=9), world.process("a", key=OTHER)
    other.save(b"x" * 10)
    one.save(b"x" * 45)
    one.save(b"x" * 45)
    assert not one.ask()


def test_key_of_megabytes_is_rejected_with_a_short_message(tmp_path):
    world = World(tmp_path)
    ref = CheckpointRef("\1" * 2**20, "0" * 64, 1)
    question = checkpoint_messages.encode(FetchCheckpoint(ref, False))
    with pytest.raises(TransportError, match="is not the key of a checkpoint") as rejected:
        world.checkpoints.said(world.process().process, frames.FETCH, question)
    assert len(str(rejected.value)) < 2000
    with pytest.raises(StoreError, match="at most 512 characters"):
        check_key("t/" + "c" * 511)


@pytest.mark.parametrize("key", ["other/checkpoint_1-000001", "t/checkpoint_1-000002"])
def test_process_gets_no_checkpoint_but_its_newest_and_those_to_restore(key, tmp_path):
    """The store denies a request for one that does not exist, as if it refused the keys."""
    world = World(tmp_path)
    process = world.process(restore=(CheckpointRef("other/checkpoint_1-000002", "0" * 64, 2),))
    written = process.save()
    assert not process.fetch(written_ref(world, written)).error
    with pytest.raises(TransportError, match=f"{key}, which is neither one to restore nor"):
        process.fetch(CheckpointRef(key, "0" * 64, 1))
    assert [transfer.key for transfer in world.transfers.waited_for] == [written]


@pytest.mark.parametrize("first", [frames.ASK_SAVE, frames.FETCH])
@pytest.mark.parametrize("second", [frames.ASK_SAVE, frames.FETCH])
def test_second_request_before_the_answer_to_the_first_is_rejected(first, second, tmp_path):
    world = World(tmp_path)
    ref = elsewhere(world)
    process = world.process(waiting=0, restore=(ref,))
    process.save()
    payloads = {
        frames.ASK_SAVE: b"",
        frames.FETCH: checkpoint_messages.encode(FetchCheckpoint(ref, False)),
    }
    world.checkpoints.said(process.process, first, payloads[first])
    with pytest.raises(TransportError, match="asked again before it was answered"):
        world.checkpoints.said(process.process, second, payloads[second])
