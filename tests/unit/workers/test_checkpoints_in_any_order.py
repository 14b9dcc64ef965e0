"""Invariants of checkpoints under any order of trial processes, uploads and time."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.workers.fake_checkpoint_node import World, committed_ref
from tunemq_shared.protocol.messages import CheckpointCommitted, CheckpointLost, CheckpointWritten

TRIALS = ("a", "b", "c")
WAITING = 1
UPLOADS_BYTES = 100

trials = st.sampled_from(TRIALS)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tunemq-test-"))
        self.world = World(self.folder, cache_bytes=60_000, uploads_bytes=UPLOADS_BYTES)
        self.processes = {}
        self.attempts = dict.fromkeys(TRIALS, 0)
        self.leaving = set()
        #: Trial processes that wait for an answer, and those that were granted space.
        self.asked = set()
        self.granted = set()

    def teardown(self):
        while self.granted or self.world.transfers.under_way:
            for trial in list(self.granted):
                self.a_process_writes(trial, 1)
            self.world.finish(self.world.transfers.keys()[0])
            self.note_answers()
        assert self.asked == set(), "every request is answered once all is uploaded"
        for process in self.processes.values():
            process.die()
        for trial in TRIALS:
            settled = self.world.keys(CheckpointCommitted | CheckpointLost, trial)
            assert settled == self.world.keys(CheckpointWritten, trial), "nothing is forgotten"
        assert self.world.checkpoints.unsettled() == set()
        assert self.world.cache.size <= self.world.cache_bytes
        assert not self.world.checkpoints.uploads._queues
        shutil.rmtree(self.folder)

    def note_answers(self):
        for trial in list(self.asked):
            if len(self.processes[trial].answers) > self.processes[trial].answered:
                self.asked.discard(trial)
                if self.processes[trial].answers[-1].cache:
                    self.granted.add(trial)

    @rule(trial=trials)
    def a_process_begins(self, trial):
        if trial not in self.processes:
            self.attempts[trial] += 1
            committed = self.world.keys(CheckpointCommitted, trial)
            restore = tuple(committed_ref(self.world, key) for key in committed[-1:])
            process = self.world.process(
                trial, self.attempts[trial], restore=restore, waiting=WAITING
            )
            process.answered = 0
            self.processes[trial] = process
            for ref in restore:
                process.fetch(ref)
                if not process.answers:  # the copy was evicted
                    self.world.finish(ref.key)

    @rule(trial=trials)
    def a_process_asks(self, trial):
        self.a_process_begins(trial)
        if trial not in self.asked | self.granted:
            self.asked.add(trial)
            self.processes[trial].answered = len(self.processes[trial].answers)
            self.processes[trial].ask()
            self.note_answers()

    @rule(trial=trials, size=st.integers(1, 80))
    def a_process_writes(self, trial, size):
        if trial in self.granted:
            self.granted.discard(trial)
            self.processes[trial].write(b"x" * size)
            self.note_answers()

    @rule(trial=trials, how=st.sampled_from(["stop", "pause"]))
    def a_process_is_told_to_end(self, trial, how):
        if trial in self.processes:
            self.leaving.add(trial)
            self.processes[trial].told(**{how: True})
            self.note_answers()
            assert trial not in self.asked

    @rule(trial=trials)
    def a_process_ends(self, trial):
        if trial in self.processes:
            self.processes.pop(trial).die()
            for some in (self.leaving, self.asked, self.granted):
                some.discard(trial)
            self.note_answers()

    @precondition(lambda self: self.world.transfers.under_way)
    @rule(data=st.data())
    def an_upload_is_done(self, data):
        self.world.finish(data.draw(st.sampled_from(self.world.transfers.keys())))
        self.note_answers()

    @precondition(lambda self: self.world.transfers.under_way)
    @rule(data=st.data())
    def an_upload_is_given_up(self, data):
        given_up = len(self.world.given_up)
        key = data.draw(st.sampled_from(self.world.transfers.keys()))
        self.world.fail(key)
        assert len(self.world.given_up) == given_up + 1
        self.note_answers()
        trial = key.partition("/")[0]
        if trial in self.processes:  # the node kills it
            self.a_process_ends(trial)

    @precondition(lambda self: self.world.transfers.under_way)
    @rule(data=st.data(), reason=st.sampled_from(["", "away", "slow"]))
    def an_upload_has_trouble(self, data, reason):
        self.world.transfers.trouble(
            data.draw(st.sampled_from(self.world.transfers.keys())), reason
        )

    @rule()
    def time_passes(self):
        self.world.clock.advance(61)
        self.note_answers()
        assert self.asked == set(), "no process waits longer than sync_timeout"

    @invariant()
    def a_trial_has_one_upload_under_way_and_few_behind_it(self):
        keys = self.world.transfers.keys()
        for trial in TRIALS:
            written = self.world.keys(CheckpointWritten, trial)
            settled = self.world.keys(CheckpointCommitted | CheckpointLost, trial)
            assert settled == written[: len(settled)], "in the order in which they were written"
            waiting = written[len(settled) :]
            assert [key for key in keys if key.startswith(f"{trial}/")] == waiting[:1]
            if trial in self.processes and trial not in self.leaving and trial in self.granted:
                # An older attempt that was ending may have more.
                of_attempt = [key for key in waiting if f"_{self.attempts[trial]}-" in key]
                assert len(of_attempt) <= WAITING

    @invariant()
    def what_is_not_committed_is_on_the_disk(self):
        root = self.folder / "node"
        for trial in TRIALS:
            written = self.world.keys(CheckpointWritten, trial)
            settled = self.world.keys(CheckpointCommitted | CheckpointLost, trial)
            for key in written[len(settled) :]:
                assert next(root.glob(f"*/{key}/manifest.json"))


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCheckpointsInAnyOrder = Machine.TestCase
