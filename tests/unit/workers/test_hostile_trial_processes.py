"""Trial processes that send frames and events in any order end only their own trials."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.fuzz.decoder import samples_of
from tests.unit.workers.fakes import order, start
from tests.unit.workers.trials.test_trial_supervisor import Node
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.messages import CheckpointRef, encode
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_messages import FetchCheckpoint
from tunemq_workers.runtime import frames

TRIALS = ("a", "b", "c")
KINDS = (
    frames.UNREADABLE,
    frames.UNREAD,
    frames.ENDING,
    frames.IDLE,
    frames.WRITTEN,
    frames.ASK_SAVE,
    frames.AWAIT_ORDER,
    frames.FETCH,
    frames.SAVING,
    frames.ORDER,
    7,
)
REF = CheckpointRef("a/checkpoint_1-000001", "0" * 64, 1)
PAYLOADS = [
    b"",
    b"\xff" * 9,
    (0).to_bytes(4, "big"),
    (1).to_bytes(4, "big"),
    checkpoint_messages.encode(FetchCheckpoint(REF, False)),
    checkpoint_messages.encode(FetchCheckpoint(REF, True)),
    *[encode(kind(trial, 1)) for kind in (m.TrialFinished, m.TrialPaused) for trial in TRIALS],
    *[
        encode(m.CheckpointWritten(t, 1, 1, 1, f"{t}/checkpoint_1-000001", "0" * 64, 1))
        for t in TRIALS
    ],
    *samples_of(m.NodeEvent)[:60],
]

trials = st.sampled_from(TRIALS)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tunemq-test-"))
        self.node = Node()
        self.node.checkpoints.start()
        self.orders = {}
        #: Running processes, and those whose exit was reported.
        self.forking, self.running, self.ended = set(), set(), set()

    def teardown(self):
        self.node.supervisor.obey([])
        self.node.clock.advance(100)
        for name in list(self.forking | self.running):
            self.exits(name)
        for name in list(self.ended):
            self.is_gone(name)
        assert len(self.node.supervisor) == 0
        self.node.checkpoints.close()
        shutil.rmtree(self.folder)

    def see(self):
        known = self.forking | self.running | self.ended | getattr(self, "gone", set())
        self.forking |= self.node.forkservers.started.keys() - known

    def obey(self):
        self.node.supervisor.obey(list(self.orders.values()))
        self.see()

    @rule(
        trial=trials,
        reuse=st.booleans(),
        waiting=st.integers(0, 1),
        has_limits=st.booleans(),
        store=st.sampled_from(["/s", "s3://bucket/e?endpoint=http://127.0.0.1:9"]),
    )
    def is_ordered(self, trial, reuse, waiting, has_limits, store):
        if trial not in self.orders:
            begin = start(
                folder=f"/f/{trial}",
                key="tunemq:events:e",
                reuse=reuse,
                store=store,
                cache=str(self.folder / "cache"),
                uploads_waiting=waiting,
                sync_timeout_s=4.0,
                limits=TrialLimitSpec(step_s=20.0) if has_limits else TrialLimitSpec(),
            )
            self.orders[trial] = order(trial, begin)
            self.obey()

    @rule(trial=trials, how=st.sampled_from(["stop", "pause", "kill"]))
    def is_told(self, trial, how):
        if trial in self.orders:
            before = self.orders[trial]
            self.orders[trial] = order(trial, before.start, **{how: True})
            self.obey()

    @rule(trial=trials)
    def is_ordered_no_more(self, trial):
        if self.orders.pop(trial, None):
            self.obey()

    @precondition(lambda self: self.forking)
    @rule(data=st.data())
    def is_forked(self, data):
        name = data.draw(st.sampled_from(sorted(self.forking)))
        self.forking.discard(name)
        self.running.add(name)
        self.node.supervisor.forked(name, 100)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kind=st.sampled_from(KINDS), payload=st.sampled_from(PAYLOADS))
    def says(self, data, kind, payload):
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.node.supervisor.said(name, kind, payload)
        self.see()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), payload=st.sampled_from(PAYLOADS))
    def sends_an_event(self, data, payload):
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.node.forkservers.connections[name].on_event(payload)
        self.see()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def closes_its_socket(self, data):
        self.node.supervisor.closed(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), lost=st.booleans())
    def a_process_ends(self, data, lost):
        self.exits(data.draw(st.sampled_from(sorted(self.running))), lost)

    def exits(self, name, lost=False):
        if name in self.forking:
            self.node.supervisor.not_started(name, "no more processes")
        elif lost:
            self.node.supervisor.lost(name, "its forkserver died")
        else:
            self.node.supervisor.exited(name, 9, None)
        self.forking.discard(name)
        self.running.discard(name)
        self.ended.add(name)
        self.see()

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def nothing_is_left_of_one(self, data):
        self.is_gone(data.draw(st.sampled_from(sorted(self.ended))))

    def is_gone(self, name):
        self.ended.discard(name)
        self.gone = {*getattr(self, "gone", ()), name}
        self.node.supervisor.gone(name)
        self.see()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
    def time_passes(self, seconds):
        self.node.clock.advance(seconds)
        self.see()

    @rule()
    def the_disk_is_done(self):
        self.node.disk.settle()
        self.see()

    @precondition(lambda self: self.node.transfers.under_way)
    @rule(data=st.data())
    def a_transfer_fails(self, data):
        self.node.transfers.fail(data.draw(st.sampled_from(self.node.transfers.keys())))
        self.see()


LONG = b"\x00" * (8 * 2**20 + 1)


@pytest.mark.parametrize(
    "kind",
    [
        frames.ASK_SAVE,
        frames.AWAIT_ORDER,
        frames.ENDING,
        frames.FETCH,
        frames.IDLE,
        frames.SAVING,
        frames.WRITTEN,
        frames.UNREADABLE,
        frames.EVENT,
        7,
    ],
)
def test_long_frame_of_any_kind_ends_its_trial_with_a_short_message(kind):
    node = Node()
    node.begin()
    if kind == frames.EVENT:
        node.forkservers.connections["h1"].on_event(LONG)
    else:
        node.supervisor.said("h1", kind, LONG)
    (failed,) = node.events
    assert isinstance(failed, m.TrialFailed)
    assert len(failed.error) < 5000
    assert ("kill", "h1") in node.done


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"a": [[[]] * 10**5] * 3}, "nested more than two deep"),
        ({"a": "x" * (4 * 2**20)}, "are possible"),
    ],
)
def test_result_that_takes_long_to_check_ends_its_trial(metrics, why):
    node = Node()
    node.begin()
    connection = node.forkservers.connections["h1"]
    connection.on_event(encode(m.TrialStarted("t", 1, 100, "here", "127.0.0.1", 1.0)))
    connection.on_event(encode(m.ResultReported("t", 1, 1, metrics, 1.0, 1.0, 1.0, 1.0, 1)))
    failed = node.events[-1]
    assert isinstance(failed, m.TrialFailed)
    assert why in failed.error


def test_long_text_in_place_of_a_number_ends_its_trial_with_a_short_message():
    node = Node()
    node.begin(required_metrics=("loss",))
    connection = node.forkservers.connections["h1"]
    connection.on_event(encode(m.TrialStarted("t", 1, 100, "here", "127.0.0.1", 1.0)))
    result = m.ResultReported("t", 1, 1, {"loss": "\0" * 2**19}, 1.0, 1.0, 1.0, 1.0, 1)
    connection.on_event(encode(result))
    failed = node.events[-1]
    assert isinstance(failed, m.TrialFailed)
    assert "loss" in failed.error
    assert len(failed.error) < 5000


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestHostileTrialProcesses = Machine.TestCase
