"""Which events of a trial process the node accepts and rejects; runs no process."""

from __future__ import annotations

import math
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest

from tests.unit.workers.fakes import order, start
from tests.unit.workers.trials.test_trial_supervisor import Node
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointRef,
    LogMatched,
    NodeWarned,
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialPaused,
    TrialProcessDied,
    TrialStarted,
    TrialWaits,
    encode,
)
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_workers.broker.event_validation import EventValidator
from tunemq_workers.runtime import frames
from tunemq_workers.runtime.frame_connection import FrameConnection

STARTED = TrialStarted("t", 1, 100, "h", "10.0.0.1", 1e9, ("GPU-1",), (0, 0))
KEY = "f/checkpoint_1-000001"
SHA256 = "0123456789abcdef" * 4


def result(step=1, metrics=None, *, trial="t", attempt=1, **fields):
    said = ResultReported(trial, attempt, step, metrics or {"loss": 0.5}, 1e9, 0.1, 0.1, 0.1, 1)
    return msgspec.structs.replace(said, **fields)


def odd(event):
    """Encode a result that says its kind in a string of another length type than TuneMQ's."""
    return encode(event).replace(b"\xa6result", b"\xd9\x06result")


ODD_DEEP_RESULT = odd(result(metrics={"a": {"b": {"c": [{}] * 1_000_000}}}))


class Process:
    """A trial process beside another one, on a node."""

    def __init__(self, **how):
        self.node = Node()
        self.node.supervisor.obey([order("t", start(**how)), order("other", start())])
        for name in ("h1", "h2"):
            self.node.supervisor.forked(name, 100)
        self.say(STARTED)

    def say(self, *events):
        for event in events:
            payload = event if isinstance(event, bytes) else encode(event)
            self.node.forkservers.connections["h1"].on_event(payload)

    def end(self, event):
        self.node.supervisor.said("h1", frames.ENDING, encode(event))

    @property
    def events(self):
        return self.node.events[1:]

    def rejected(self):
        """Return the error; check that the node kills the process and ignores later events."""
        assert self.node.done == [("kill", "h1")]
        failed = self.node.events[-1]
        assert isinstance(failed, TrialFailed), failed
        assert (failed.trial, failed.attempt, failed.kind) == ("t", 1, "metric")
        before = len(self.node.events)
        self.say(result(2), STARTED)
        self.end(TrialFinished("t", 1))
        assert len(self.node.events) == before, "later events are ignored"
        self.node.end("h1", signal=9)
        assert self.node.events[before:] == [SlotFreed("t", 1)]
        return failed.error


@pytest.fixture
def process():
    return Process()


def test_node_forwards_valid_events_unchanged(process):
    said = [
        result(1),
        CheckpointCommitted("t", 1, 1, 1, KEY, "a" * 64, 10),
        result(2, {"nested": {"deeper": [{"x": [1.5, None, True, "text", {"y": [[1]]}]}]}}),
        result(3, {"nan": math.nan, "inf": -math.inf, "most": 2**64 - 1, "least": -(2**63)}),
    ]
    process.say(*said)
    process.end(TrialFinished("t", 1))
    assert [encode(event) for event in process.events] == [
        *map(encode, said),
        encode(TrialFinished("t", 1)),
    ]
    assert process.node.done == []


def test_attempt_may_begin_at_any_step_and_counts_from_there(process):
    process.say(result(7), result(8))
    process.say(result(8))
    assert "step (training_iteration) 8, expected 9" in process.rejected()


@pytest.mark.parametrize("step", [1, 3, 6, 2**53])
def test_process_that_skips_a_result_number_has_its_trial_failed(process, step):
    process.say(result(4), result(step))
    assert f"step (training_iteration) {step}, expected 5" in process.rejected()


TEXT = "x" * (2**20 + 1)


@pytest.mark.parametrize("event", [result(), TrialFinished("t", 1)])
def test_event_on_which_the_check_fails_ends_only_its_trial(process, monkeypatch, event):
    def fails(self, event):
        raise ValueError("not foreseen")

    monkeypatch.setattr(EventValidator, "_wrong_attempt", fails)
    monkeypatch.setattr(EventValidator, "_wrong_metrics", fails)
    if isinstance(event, TrialFinished):
        process.end(event)
    else:
        process.say(event)
    assert "cannot be checked (ValueError)" in process.rejected()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", 2**63),
        ("timestamp", 1_795_000_000_000_000_000),
        ("timestamp", math.nan),
        ("timestamp", math.inf),
        ("timestamp", -1.0),
        ("timestamp", "now"),
        ("timestamp", None),
        ("timestamp", b"now"),
        ("time_this_iter_s", -1.0),
        ("time_this_iter_s", math.nan),
        ("time_total_s", math.inf),
        ("time_total_s", "long"),
        ("time_since_restore", [1.0]),
        ("iterations_since_restore", 0),
        ("iterations_since_restore", 2.5),
        ("step", 2**53 + 1),
        ("step", 2**64 - 1),
        ("step", -1),
        ("step", "first"),
        ("timesteps_total", 2**60),
        ("episodes_total", "many"),
        ("done", 1),
        ("metrics", {"x": b"bytes"}),
        ("metrics", {1: 2}),
        ("metrics", {"x": {"y": {"z": {"deep": {b"k": 1}}}}}),
        ("metrics", {"x": [[[[b"bytes"]]]]}),
        ("metrics", {"x": msgspec.msgpack.Ext(5, b"")}),
        ("metrics", [1]),
        ("metrics", None),
    ],
)
def test_result_with_a_field_outside_its_bounds_ends_its_trial_and_names_the_field(
    process, field, value
):
    fields = msgspec.structs.asdict(result()) | {field: value}
    process.say(encode(["result", *fields.values()]))
    assert f"'{field}'" in process.rejected()


@pytest.mark.parametrize("depth", [31, 33, 900, 100_000])
def test_metrics_may_be_nested_as_deeply_as_report_lets_them(process, depth):
    whole = encode(result(metrics={"x": 1}))
    process.say(whole.replace(b"\xa1x\x01", b"\xa1x" + b"\x91" * depth + b"\x01"))
    if depth <= 32:
        assert len(process.events) == 1
    else:
        said = process.rejected()
        assert "nested more than 32 deep" in said or "recursion" in said.lower()


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (STARTED, "TrialStarted of the trial's process comes twice"),
        (result(trial="other"), "names trial 'other', attempt 1, and its process runs trial 't'"),
        (result(attempt=2), "names trial 't', attempt 2"),
        (TrialFinished("t", 1), "'kind': Invalid value 'finished'"),
        (TrialPaused("t", 1), "'kind'"),
        (TrialWaits("t", 1, "code", ""), "'code'"),
        (TrialProcessDied("t", 1, 1, 9, None, 1.0), "'kind'"),
        (SlotFreed("t", 1), "'kind'"),
        (SlotFreed("other", 1), "'kind'"),
        (LogMatched("t", 1, "a", "b", 1.0), "'kind'"),
        (NodeWarned("registration"), "'kind'"),
        (["joined", "inc", "node", "h", "ip", {}], "'kind'"),
        (["` - at `$[" + "1" * 5000 + "]`"], "'kind'"),
        (["x` - at `$[3]`"], "'kind': Invalid value"),
        pytest.param(odd(result()), "in another way", id="result of an odd kind"),
        pytest.param(ODD_DEEP_RESULT, "unusable field", id="deep result of an odd kind"),
        (["result"], "at least length"),
        (["result", *range(40)], "ResultReported"),
        ([], "cannot be read"),
        ({}, "cannot be read"),
        (7, "cannot be read"),
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (b"\x91" * 100_000, "'kind'"),
        (b"\xdc\xff\xff", "cannot be read"),
        (b"\x93\xa6result\xa1\xff", "cannot be read"),
        (
            CheckpointCommitted("t", 1, 1, 1, "u/checkpoint_1-000001", SHA256, 1),
            "is this checkpoint's",
        ),
        (CheckpointCommitted("t", 1, 1, 1, "../../etc/x", SHA256, 1), "is this checkpoint's"),
        (CheckpointCommitted("t", 1, 2, 1, KEY, SHA256, 1), "is this checkpoint's"),
        (CheckpointCommitted("t", 1, 0, 1, KEY, SHA256, 1), "'n'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, SHA256, -1), "'size'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, SHA256, 2**62), "'size'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, "a" * 65, 1), "'sha256'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, "a" * 63, 1), "'sha256'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, "a" * 64 + "\n", 1), "'sha256'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, "A" * 64, 1), "'sha256'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, "\0", 1), "'sha256'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, "", 1), "'sha256'"),
        (CheckpointCommitted("t", 1, 1, 1, KEY, SHA256, 1, ("u/1/x",)), "'shared'"),
        (CheckpointDamaged("t", 1, "u/checkpoint_1-000001", "x", ""), "(key)"),
        (CheckpointDamaged("t", 1, KEY, "x", "u/checkpoint_1-000001"), "(instead)"),
        (CheckpointDamaged("t", 1, KEY, TEXT, ""), "1048576 are possible"),
    ],
)
def test_event_that_its_process_may_not_send_ends_only_its_trial(process, event, said):
    process.say(event if isinstance(event, bytes) else encode(event))
    assert said in process.rejected()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", 0),
        ("pid", 2**40),
        ("hostname", "h" * 300),
        ("node_ip", 7),
        ("at", math.nan),
        ("gpus", ["x" * 300]),
        ("printed", [0, -1]),
        ("printed", [0]),
    ],
)
def test_start_with_a_field_outside_its_bounds_ends_its_trial_and_names_the_field(field, value):
    process = Process.__new__(Process)
    process.node = Node()
    process.node.begin("t")
    fields = msgspec.structs.asdict(STARTED) | {field: value}
    process.say(encode(["started", *fields.values()]))
    assert f"'{field}'" in process.rejected()


def test_result_before_the_start_of_its_trial_is_rejected():
    process = Process.__new__(Process)
    process.node = Node()
    process.node.begin("t")
    process.say(result())
    assert "before the process has said that the trial started" in process.rejected()


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (TrialFailed("t", 1, "start", "e", "", 1e9), "'kind'"),
        (TrialFailed("t", 1, "no such", "e", "", 1e9), "'kind'"),
        (TrialFailed("t", 1, "user", TEXT, "", 1e9), "'error'"),
        (TrialFailed("t", 1, "user", "e", TEXT, 1e9), "'traceback'"),
        (TrialFailed("t", 1, "user", "e", "", math.nan), "'at'"),
        (TrialFailed("t", 1, "user", "e", "", 1e9, "forged output"), "'output'"),
        (TrialFinished("other", 1), "names trial 'other'"),
        (TrialFinished("t", 2), "attempt 2"),
        (TrialPaused("t", 1), "was not told to pause"),
        (SlotFreed("t", 1), "'kind'"),
        (result(), "'kind'"),
    ],
)
def test_impossible_end_of_a_trial_is_rejected(process, ending, said):
    process.end(ending)
    assert said in process.rejected()


def test_paused_trial_may_report_its_pause_even_if_the_order_has_changed_since(process):
    process.node.supervisor.give_up()
    process.node.supervisor.obey([order("t", start()), order("other", start())])
    process.end(TrialPaused("t", 1))
    assert process.events == [TrialPaused("t", 1)]


def test_results_after_the_end_of_a_trial_are_dropped_with_their_process(process):
    process.say(result(1))
    process.end(TrialFinished("t", 1))
    process.say(result(2))
    assert process.node.done == [("kill", "h1")]
    process.say(result(3))
    process.node.end("h1", signal=9)
    assert process.events == [result(1), TrialFinished("t", 1), SlotFreed("t", 1)]


def test_process_may_report_that_its_restored_checkpoint_is_damaged():
    refs = [CheckpointRef("u/checkpoint_3-000002", "", 2), CheckpointRef("u/checkpoint_1-1", "", 1)]
    process = Process(restore=tuple(refs))
    said = CheckpointDamaged("t", 1, refs[0].key, "torn", refs[1].key)
    own = CheckpointDamaged("t", 1, KEY, "torn", "")
    process.say(said, own)
    assert process.events == [said, own]


def test_s15_process_reports_few_damaged_checkpoints(process):
    said = CheckpointDamaged("t", 1, KEY, "torn", "")
    process.say(*[said] * 100)
    assert process.events == [said] * 100
    process.say(said)
    assert "is one of more than 100 that name a damaged checkpoint" in process.rejected()


def test_process_cannot_commit_a_checkpoint_that_the_node_uploads():
    process = Process(store="s3://bucket/x")
    process.say(CheckpointCommitted("t", 1, 1, 1, KEY, SHA256, 1))
    assert "the node uploads this trial's checkpoints" in process.rejected()


def test_checkpoints_of_an_attempt_have_growing_numbers(process):
    process.say(CheckpointCommitted("t", 1, 1, 0, KEY, SHA256, 1))
    process.say(CheckpointCommitted("t", 1, 1, 0, KEY, SHA256, 1))
    assert "has the number (n) 1, and 1 came before" in process.rejected()


def test_reused_process_reports_only_its_new_trial():
    process = Process(reuse=True)
    process.say(result(1))
    process.end(TrialFinished("t", 1))
    process.node.supervisor.said("h1", frames.IDLE, b"")
    process.node.supervisor.obey([order("next", start(reuse=True)), order("other", start())])
    before = len(process.node.events)
    process.say(result(2))
    failed = process.node.events[before]
    assert (failed.trial, failed.kind) == ("next", "metric")
    assert "names trial 't', attempt 1, and its process runs trial 'next'" in failed.error


def test_frames_before_an_invalid_one_are_accepted(process):
    ours, theirs = socket.socketpair()
    said = []
    connection = FrameConnection(
        SimpleNamespace(watch=lambda *_: None, unwatch=lambda *_: None),
        ours,
        on_event=lambda payload: said.append((frames.EVENT, payload)),
        on_other=lambda kind, payload: said.append((kind, payload)),
        on_end=lambda: said.append("end"),
    )
    theirs.sendall(frames.frame(frames.EVENT, b"whole") + b"\xff" * 100)
    connection.drain()
    theirs.close()
    assert said[0] == (frames.EVENT, b"whole")
    assert said[1][0] == frames.UNREADABLE
    assert said[2:] == ["end"]


def test_link_that_another_process_still_writes_to_is_drained():
    ours, theirs = socket.socketpair()
    said = []
    connection = FrameConnection(
        SimpleNamespace(watch=lambda *_: None, unwatch=lambda *_: None),
        ours,
        on_event=said.append,
        on_other=lambda kind, payload: None,
        on_end=lambda: said.append("end"),
    )
    whole = frames.frame(frames.EVENT, b"whole")
    theirs.sendall(whole)

    def write_on():
        with suppress(OSError):
            while True:
                theirs.sendall(whole * 1_000)

    writer = threading.Thread(target=write_on, daemon=True)
    writer.start()
    connection.drain()
    writer.join(10)

    assert not writer.is_alive()
    assert said[0] == b"whole"
    assert said[-1] == "end"
    theirs.close()


@pytest.mark.parametrize("value", ["abc", None, [1], {"a": 1}, math.nan, -math.inf, "missing"])
def test_result_whose_metric_cannot_be_compared_ends_only_its_trial(value):
    process = Process(required_metrics=("loss",), finite_metrics=("loss",))
    metrics = {"other": 1} if value == "missing" else {"loss": value}
    process.say(result(1, {"loss": 1.5}), result(2, metrics))
    assert "'loss'" in process.rejected()


@pytest.mark.parametrize(
    "metrics",
    [
        {"neg_mean_loss": "x", "mean_loss": 1.0},
        {"neg_mean_loss": {"a": 1}, "mean_loss": 1.0},
        {"mean_loss": "x"},
        {"mean_loss": math.nan},
        {"other": 1},
    ],
)
def test_result_whose_derived_metric_cannot_be_compared_ends_only_its_trial(metrics):
    process = Process(required_metrics=("neg_mean_loss",), finite_metrics=("neg_mean_loss",))
    process.say(result(1, {"mean_loss": 1.5}), result(2, metrics))
    assert "'neg_mean_loss'" in process.rejected()


@pytest.mark.parametrize("key", ["timesteps_total", "episodes_total"])
def test_result_without_a_total_that_is_compared_ends_only_its_trial(key):
    process = Process(required_metrics=(key,))
    process.say(result(1, **{key: 5}), result(2, {key: 7}))
    assert f"'{key}'" in process.rejected()


@pytest.mark.parametrize("field", ["stop", "run_until"])
def test_result_that_a_stop_criterion_cannot_compare_ends_only_its_trial(field):
    compared = (Condition("loss", 3.0),)
    process = Process(stop=compared if field == "stop" else ())
    if field == "run_until":
        process.node.supervisor.obey(
            [order("t", start(), run_until=compared), order("other", start())]
        )
    process.say(result(1, {"loss": 1}), result(2, {"other": "x"}), result(3, {"loss": "abc"}))
    assert "'loss'" in process.rejected()


def test_automatic_keys_may_be_the_metric_and_criteria():
    process = Process(
        required_metrics=("training_iteration", "neg_mean_loss"),
        finite_metrics=("time_total_s",),
        stop=(Condition("training_iteration", 9),),
    )
    process.say(result(1, {"mean_loss": 1.0}), result(2, {"mean_loss": 2.0}))
    assert [event.step for event in process.events] == [1, 2]


def test_process_that_asks_and_does_not_read_is_reported_once():
    ours, theirs = socket.socketpair()
    kinds = []

    def answer(kind, payload):
        kinds.append(kind)
        if kind == frames.SAVE_ANSWER:
            connection.send(frames.SAVE_ANSWER, b"granted" * 10)

    connection = FrameConnection(
        SimpleNamespace(watch=lambda *_: None, unwatch=lambda *_: None),
        ours,
        on_event=lambda payload: None,
        on_other=answer,
        on_end=lambda: None,
        most_unsent=100_000,
    )
    question = frames.frame(frames.SAVE_ANSWER, b"")
    theirs.setblocking(False)
    while frames.UNREAD not in kinds:
        with suppress(BlockingIOError):
            theirs.send(question * 1_000)
        connection._receive()
    theirs.send(question)
    connection._receive()

    assert kinds.count(frames.UNREAD) == 1
    assert len(connection._unsent) < 100_200
    connection.close()
    theirs.close()


def test_process_that_does_not_read_ends_only_its_trial(process):
    process.node.supervisor.said("h1", frames.UNREAD, b"")
    assert "does not read" in process.rejected()
