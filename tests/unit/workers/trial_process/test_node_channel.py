from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tunemq_shared.base import failpoints
from tunemq_shared.base.errors import CheckpointCorrupt, MetricError, StoreError, TuneError
from tunemq_shared.protocol.messages import (
    CheckpointRef,
    CheckpointWritten,
    ResultReported,
    TrialFailed,
    TrialFinished,
    TrialOrder,
    TrialPaused,
    decode_node_event,
    encode,
)
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_messages import FetchAnswer, FetchCheckpoint, SaveAnswer
from tunemq_workers.runtime import frames
from tunemq_workers.trial_process.node_channel import NodeChannel


@pytest.fixture
def pair():
    process, node = socket.socketpair()
    with process, node:
        yield NodeChannel(process), node


def result(**metrics):
    return ResultReported("t", 1, 1, metrics, 0.0, 0.0, 0.0, 0.0, 1)


def order(bound):
    return TrialOrder("t", 1, (Condition("training_iteration", bound),))


def received(node):
    return frames.FrameDecoder().feed(node.recv(1 << 20))


def test_each_event_is_one_frame_and_those_for_the_node_are_marked(pair):
    channel, node = pair
    written = CheckpointWritten("t", 1, 1, 1, "trial/checkpoint_1-000001", "sha", 3)
    events = [result(loss=1.0), written, TrialFinished("t", 1), TrialPaused("t", 2)]
    for event in events:
        channel.send(event)

    got = received(node)

    assert [kind for kind, _ in got] == [
        frames.EVENT,
        frames.WRITTEN,
        frames.ENDING,
        frames.ENDING,
    ]
    assert [decode_node_event(payload) for _, payload in got] == events


def test_save_that_waits_for_the_store_is_none_meanwhile(pair):
    channel, node = pair
    channel.waits(is_waiting=True)  # a restore
    channel.waits(is_waiting=False)
    channel.saves(is_saving=True)
    channel.waits(is_waiting=True)
    channel.waits(is_waiting=False)
    channel.saves(is_saving=False)
    assert received(node) == [(frames.SAVING, bytes([one])) for one in (1, 0, 1, 0)]


def test_failure_is_remembered(pair):
    channel, _ = pair
    channel.send(TrialFinished("t", 1))
    assert not channel.has_failed
    channel.send(TrialFailed("t", 1, "user", "error", "traceback", 0.0))
    assert channel.has_failed


def test_polling_without_an_order_does_not_wait(pair):
    channel, _ = pair
    assert channel.poll() is None


def test_newest_order_counts_and_is_returned_once(pair):
    channel, node = pair
    node.send(b"".join(frames.frame(frames.ORDER, encode(order(bound))) for bound in (1, 2, 3)))

    assert channel.poll() == order(3)
    assert channel.poll() is None


def test_waiting_returns_an_order_that_came_before(pair):
    channel, node = pair
    node.send(frames.frame(frames.ORDER, encode(order(1))))

    assert channel.wait() == order(1)


def test_waiting_lasts_until_an_order_is_complete(pair):
    channel, node = pair
    data = frames.frame(frames.ORDER, encode(order(1)))
    node.send(data[:7])
    assert channel.poll() is None
    sender = threading.Thread(target=node.send, args=(data[7:],))
    sender.start()

    assert channel.wait() == order(1)
    sender.join()


def test_next_trial_comes_after_the_process_reports_that_it_is_free(pair):
    channel, node = pair
    late = frames.frame(frames.ORDER, encode(order(9)))
    following = TrialOrder("next", 1, ())
    node.send(late + frames.frame(frames.NEXT, encode(following)))

    assert channel.wait_for_next_trial() == following
    assert channel.poll() is None
    assert received(node) == [(frames.IDLE, b"")]


# --- questions about checkpoints ---

REF = CheckpointRef("trial/checkpoint_1-000001", "sha", 3, "written")


def say(node, kind, message):
    encoder = encode if kind == frames.ORDER else checkpoint_messages.encode
    node.send(frames.frame(kind, encoder(message)))


def waits_and_says(channel, node):
    """Return what the channel sends while it waits for an order, which then arrives."""
    waiting = threading.Thread(target=channel.wait)
    waiting.start()
    said = received(node)
    node.send(frames.frame(frames.ORDER, encode(order(2))))
    waiting.join(60)
    assert not waiting.is_alive()
    return said


def test_process_with_a_time_limit_reports_its_wait_and_the_number_of_orders(pair):
    channel, node = pair
    channel.says_that_it_waits = True
    assert waits_and_says(channel, node) == [(frames.AWAIT_ORDER, bytes(4))]
    assert waits_and_says(channel, node) == [(frames.AWAIT_ORDER, b"\0\0\0\1")]
    node.send(frames.frame(frames.NEXT, encode(order(1))))
    channel.wait_for_next_trial()
    assert received(node) == [(frames.IDLE, b"")]
    assert waits_and_says(channel, node) == [(frames.AWAIT_ORDER, bytes(4))]


def test_process_with_an_order_does_not_report_a_wait(pair):
    channel, node = pair
    channel.says_that_it_waits = True
    node.send(frames.frame(frames.ORDER, encode(order(1))))
    assert channel.wait() == order(1)
    channel.send(result(loss=1.0))
    assert [kind for kind, _ in received(node)] == [frames.EVENT]


def test_actions_due_before_the_end_of_a_trial_precede_its_report(pair):
    channel, node = pair
    seen = []
    channel.before_ending = lambda: seen.append(node.recv(1 << 20, socket.MSG_DONTWAIT))
    channel.send(result(loss=1.0))
    channel.send(TrialFinished("t", 1))
    (before,) = seen
    assert [kind for kind, _ in frames.FrameDecoder().feed(before)] == [frames.EVENT]
    assert [kind for kind, _ in received(node)] == [frames.ENDING]


def test_process_that_waits_for_space_keeps_the_orders_that_arrive(pair):
    channel, node = pair
    say(node, frames.ORDER, order(1))
    say(node, frames.ORDER, order(2))
    say(node, frames.SAVE_ANSWER, SaveAnswer("/cache"))
    say(node, frames.ORDER, order(3))

    assert channel.ask_to_save() == Path("/cache")
    assert received(node) == [(frames.ASK_SAVE, b"")]
    assert channel.poll() == order(3)


def test_space_that_is_not_granted_in_time_is_an_error(pair):
    channel, node = pair
    say(node, frames.SAVE_ANSWER, SaveAnswer("", "no room within 1800 s"))

    with pytest.raises(StoreError, match="no room within 1800 s"):
        channel.ask_to_save()


@pytest.mark.parametrize("again", [False, True])
def test_checkpoint_is_fetched_by_its_reference(pair, again):
    channel, node = pair
    say(node, frames.FETCHED, FetchAnswer("/cache"))

    assert channel.fetch(REF, again=again) == (Path("/cache"), REF)
    ((kind, question),) = received(node)
    assert kind == frames.FETCH
    assert checkpoint_messages.decode_fetch(question) == FetchCheckpoint(REF, again)


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_damage_is_distinguished_from_a_store_that_is_away(pair, is_corrupt):
    channel, node = pair
    say(node, frames.FETCHED, FetchAnswer("", "why", is_corrupt=is_corrupt))

    with pytest.raises(StoreError, match="why") as caught:
        channel.fetch(REF)
    assert isinstance(caught.value, CheckpointCorrupt) is is_corrupt


def test_wait_interrupted_by_a_signal_does_not_confuse_the_next_answer(pair):
    channel, node = pair
    node.settimeout(60)
    asked, broken = [], []

    def too_long(*_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not broken:
            broken.append(True)
            raise TimeoutError

    def break_the_wait():
        asked.extend(received(node))
        # The requester may be delayed before it waits.
        eventually(lambda: channel._awaits_answer)
        # Repeated, because the first signal may come just before the wait.
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)

    before = signal.signal(signal.SIGALRM, too_long)
    breaking = threading.Thread(target=break_the_wait)
    breaking.start()
    try:
        with pytest.raises(TimeoutError):
            channel.ask_to_save()
    finally:
        breaking.join()
        signal.signal(signal.SIGALRM, before)
    say(node, frames.SAVE_ANSWER, SaveAnswer("/late"))
    assert asked == [(frames.ASK_SAVE, b"")]

    def answer():
        received(node)
        say(node, frames.FETCHED, FetchAnswer("/cache"))

    answering = threading.Thread(target=answer)
    answering.start()

    assert channel.fetch(REF) == (Path("/cache"), REF)
    answering.join()


def test_child_of_a_trial_cannot_make_requests_and_reads_why(pair, monkeypatch):
    channel, node = pair
    monkeypatch.setattr(os, "getpid", lambda: 1)

    with pytest.raises(TuneError, match="a child of the trial's process"):
        channel.ask_to_save()
    node.setblocking(False)
    with pytest.raises(BlockingIOError):
        node.recv(1)


@pytest.mark.parametrize(("name", "sent"), [("before", []), ("after", [frames.WRITTEN])])
def test_failpoints_around_the_report_of_a_checkpoint_raise(pair, monkeypatch, name, sent):
    channel, node = pair
    monkeypatch.setenv(failpoints.VARIABLE, f"written.{name}_send=error")
    monkeypatch.setattr(failpoints, "_armed", None)

    with pytest.raises(OSError, match=f"written.{name}_send"):
        channel.send(CheckpointWritten("t", 1, 1, 1, "trial/checkpoint_1-000001", "sha", 3))

    monkeypatch.undo()
    channel.send(TrialFinished("t", 1))
    assert [kind for kind, _ in received(node)] == [*sent, frames.ENDING]


def test_result_that_is_too_large_is_an_error_and_the_channel_stays_usable(pair):
    channel, node = pair
    with pytest.raises(MetricError, match="the result has 34,603,075 bytes"):
        channel.send(result(image="x" * (33 << 20)))
    channel.send(TrialFinished("t", 1))

    assert [kind for kind, _ in received(node)] == [frames.ENDING]


@pytest.mark.parametrize(
    "use",
    [
        NodeChannel.poll,
        NodeChannel.wait,
        NodeChannel.ask_to_save,
        lambda channel: channel.fetch(REF),
        lambda channel: channel.send(TrialFinished("t", 1)),
    ],
)
def test_process_ends_with_its_node(use):
    process, node = socket.socketpair()
    node.close()
    pid = os.fork()
    if pid == 0:
        try:
            use(NodeChannel(process))
        finally:
            os._exit(99)
    process.close()

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_forked_child_does_not_keep_the_channel_open(pair):
    channel, node = pair
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)
    channel._sock.close()
    node.settimeout(60)

    assert node.recv(1) == b""
    os.write(writing, b"x")
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
