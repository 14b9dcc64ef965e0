from __future__ import annotations

import os
import socket
import threading

import pytest

from tunemq_shared.conditions import Condition
from tunemq_shared.errors import MetricError
from tunemq_shared.messages import (
    HostOrder,
    ResultReported,
    TrialFailed,
    TrialFinished,
    decode_node_event,
    encode,
)
from tunemq_workers import frames
from tunemq_workers.host_channel import HostChannel


@pytest.fixture
def pair():
    host, node = socket.socketpair()
    with host, node:
        yield HostChannel(host), node


def result(**metrics):
    return ResultReported("t", 1, 1, metrics, 0.0, 0.0, 0.0, 0.0, 1)


def order(bound):
    return HostOrder("t", 1, (Condition("training_iteration", bound),))


def received(node):
    return frames.FrameDecoder().feed(node.recv(1 << 20))


def test_each_event_is_one_frame_and_the_last_of_a_trial_is_marked(pair):
    channel, node = pair
    events = [result(loss=1.0), TrialFinished("t", 1)]
    for event in events:
        channel.send(event)

    got = received(node)

    assert [kind for kind, _ in got] == [frames.EVENT, frames.ENDING]
    assert [decode_node_event(payload) for _, payload in got] == events


def test_a_failure_is_remembered(pair):
    channel, _ = pair
    channel.send(TrialFinished("t", 1))
    assert not channel.has_failed
    channel.send(TrialFailed("t", 1, "user", "error", "traceback", 0.0))
    assert channel.has_failed


def test_polling_without_an_order_does_not_wait(pair):
    channel, _ = pair
    assert channel.poll() is None


def test_the_newest_order_counts_and_is_given_once(pair):
    channel, node = pair
    node.send(b"".join(frames.frame(frames.ORDER, encode(order(bound))) for bound in (1, 2, 3)))

    assert channel.poll() == order(3)
    assert channel.poll() is None


def test_waiting_returns_what_has_come_before(pair):
    channel, node = pair
    node.send(frames.frame(frames.ORDER, encode(order(1))))

    assert channel.wait() == order(1)


def test_waiting_lasts_until_an_order_is_whole(pair):
    channel, node = pair
    data = frames.frame(frames.ORDER, encode(order(1)))
    node.send(data[:7])
    assert channel.poll() is None
    sender = threading.Thread(target=node.send, args=(data[7:],))
    sender.start()

    assert channel.wait() == order(1)
    sender.join()


def test_the_next_trial_comes_after_the_host_said_that_it_is_free(pair):
    channel, node = pair
    late = frames.frame(frames.ORDER, encode(order(9)))
    following = HostOrder("next", 1, ())
    node.send(late + frames.frame(frames.NEXT, encode(following)))

    assert channel.wait_for_next_trial() == following
    assert channel.poll() is None
    assert received(node) == [(frames.IDLE, b"")]


def test_a_result_that_is_too_large_is_an_error_and_the_line_stays_usable(pair):
    channel, node = pair
    with pytest.raises(MetricError, match="the result has 33 MiB"):
        channel.send(result(image="x" * (33 << 20)))
    channel.send(TrialFinished("t", 1))

    assert [kind for kind, _ in received(node)] == [frames.ENDING]


@pytest.mark.parametrize(
    "use",
    [HostChannel.poll, HostChannel.wait, lambda channel: channel.send(TrialFinished("t", 1))],
)
def test_the_process_ends_when_the_node_is_gone(use):
    host, node = socket.socketpair()
    node.close()
    pid = os.fork()
    if pid == 0:
        try:
            use(HostChannel(host))
        finally:
            os._exit(99)
    host.close()

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_forked_child_does_not_hold_the_line(pair):
    channel, node = pair
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)
    channel._line.close()
    node.settimeout(5)

    assert node.recv(1) == b""
    os.write(writing, b"x")
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
