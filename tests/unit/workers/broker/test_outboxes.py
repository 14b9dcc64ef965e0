"""Outboxes of several experiments in one node: each stream is numbered and dropped separately."""

from __future__ import annotations

import pytest

from tunemq_shared.broker.redis_keys import EVERYTHING, SENT_BYTES
from tunemq_shared.protocol.messages import SlotFreed, encode
from tunemq_workers.broker import outbox as outbox_module
from tunemq_workers.broker.outbox import BLOCK_BYTES, BLOCK_EVENTS, MemoryBudget
from tunemq_workers.broker.outbox_spool import Spool
from tunemq_workers.broker.outboxes import MISSING_S, Outboxes
from tunemq_workers.broker.publisher_messages import AppendBatches, ForgetStream

GENERATION = b"g"


class Publisher:
    """Outboxes with a fake event publisher, clock and scheduler, which a test controls."""

    def __init__(self, folder):
        self.now = 0.0
        self.timers = []
        self.orders = []
        self.outboxes = Outboxes(
            MemoryBudget(Spool(str(folder))),
            self,
            order=self.orders.append,
            header=lambda first: first,
            now=lambda: self.now,
        )

    def after(self, delay_s, call):
        timer = Timer(self.now + delay_s, call)
        self.timers.append(timer)
        return timer

    def advance(self, seconds):
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.at <= self.now]:
            self.timers.remove(timer)
            if timer.call is not None:
                timer.call()

    def add(self, key, count=1):
        for _ in range(count):
            self.outboxes.add(key, encode(SlotFreed("t", 1)))

    def sent(self):
        """Return streams, and first numbers of batches, published since the last call."""
        self.outboxes.send(GENERATION)
        orders, self.orders[:] = list(self.orders), []
        return [
            (order.key, [first for first, _ in order.batches])
            for order in orders
            if isinstance(order, AppendBatches)
        ]

    def forgotten(self, *used):
        """Return the streams that are dropped when only ``used`` are in use."""
        self.outboxes.forget_all_but(used)
        return [order.key for order in self.orders if isinstance(order, ForgetStream)]


class Timer:
    def __init__(self, at, call):
        self.at, self.call = at, call

    def cancel(self):
        self.call = None


@pytest.fixture
def stream_state(tmp_path):
    return Publisher(tmp_path)


def test_each_stream_is_numbered_from_one(stream_state):
    stream_state.add("a", 3)
    stream_state.add("b", 2)
    assert stream_state.sent() == [("a", [1]), ("b", [1])]
    stream_state.outboxes.appended("b")
    stream_state.add("a")
    stream_state.add("b")
    assert stream_state.sent() == [("b", [3])]


def test_flood_of_one_stream_does_not_starve_another(stream_state):
    stream_state.add("a", 6 * BLOCK_EVENTS)
    stream_state.add("b")
    assert [key for key, _ in stream_state.sent()] == ["a", "b"]
    stream_state.outboxes.appended("a")
    stream_state.outboxes.appended("b")
    stream_state.add("b")
    assert [key for key, _ in stream_state.sent()] == ["a", "b"]


def test_failed_stream_is_retried_later_and_delays_no_other(stream_state):
    stream_state.add("a")
    stream_state.add("b")
    stream_state.sent()
    stream_state.outboxes.not_appended("a", "the stream is missing")
    stream_state.outboxes.appended("b")
    stream_state.add("b")
    assert stream_state.sent() == [("b", [2])]
    stream_state.advance(0.05)
    assert stream_state.sent() == [("a", [1])]


def test_reset_of_the_connection_resends_each_stream_from_its_journalled_event(
    stream_state,
):
    stream_state.add("a", BLOCK_EVENTS + 1)
    stream_state.add("b", 2)
    stream_state.sent()
    stream_state.outboxes.acknowledge({"a": BLOCK_EVENTS, "b": 0}, ())
    stream_state.outboxes.rewind()
    stream_state.outboxes.appended("a")
    stream_state.outboxes.not_appended("b", "Redis was reset")
    stream_state.advance(1)
    assert stream_state.sent() == [("a", [BLOCK_EVENTS + 1]), ("b", [1])]


def test_events_sent_and_not_journalled_are_resent_after_a_reset_of_the_connection(stream_state):
    stream_state.add("a", 3)
    assert stream_state.sent() == [("a", [1])]
    stream_state.outboxes.appended("a")
    stream_state.outboxes.rewind()
    assert stream_state.sent() == [("a", [1])]


def test_reset_ends_the_pause_after_a_failure(stream_state):
    stream_state.add("a")
    stream_state.sent()
    stream_state.outboxes.not_appended("a", "Redis was reset")
    assert stream_state.sent() == []
    stream_state.outboxes.rewind()
    assert stream_state.sent() == [("a", [1])]


def test_experiment_without_remaining_events_is_forgotten(stream_state):
    stream_state.add("a")
    stream_state.sent()
    stream_state.outboxes.appended("a")
    assert stream_state.forgotten() == []
    stream_state.outboxes.acknowledge({"a": 1}, ())
    assert stream_state.forgotten("a") == []
    assert stream_state.forgotten() == ["a"]
    assert stream_state.outboxes.keys == ()


def test_numbers_continue_when_a_forgotten_experiment_returns(stream_state):
    stream_state.add("a", 5)
    stream_state.sent()
    stream_state.outboxes.appended("a")
    stream_state.outboxes.acknowledge({"a": 5}, ())
    stream_state.forgotten()
    stream_state.add("a")
    assert stream_state.sent() == [("a", [6])]


def test_rest_of_an_ended_experiment_makes_room_for_the_next(stream_state):
    stream_state.add("a", 100)
    stream_state.outboxes.acknowledge({"a": EVERYTHING}, ())
    assert stream_state.outboxes.size == 0
    assert stream_state.forgotten() == ["a"]


def test_unused_stream_that_stays_missing_is_dropped(stream_state):
    stream_state.add("a")
    stream_state.outboxes.acknowledge({"a": 0}, {"a"})
    stream_state.advance(MISSING_S - 0.1)
    assert stream_state.forgotten() == []
    stream_state.advance(0.2)
    stream_state.outboxes.acknowledge({"a": 0}, {"a"})
    assert stream_state.forgotten("a") == []
    assert stream_state.forgotten() == ["a"]
    assert stream_state.outboxes.size == 0


@pytest.mark.parametrize("event", ["made", "Redis reset"])
def test_stream_that_is_missing_briefly_is_not_dropped(stream_state, event):
    stream_state.add("a")
    stream_state.outboxes.acknowledge({"a": 0}, {"a"})
    stream_state.advance(MISSING_S)
    if event == "made":
        stream_state.outboxes.acknowledge({"a": 0}, ())
    else:
        stream_state.outboxes.rewind()
    assert stream_state.forgotten() == []
    assert stream_state.sent() == [("a", [1])]


def test_events_in_flight_are_not_forgotten(stream_state):
    stream_state.add("a")
    stream_state.sent()
    stream_state.outboxes.acknowledge({"a": 1}, ())
    assert stream_state.forgotten() == []
    stream_state.outboxes.appended("a")
    assert stream_state.forgotten() == ["a"]


def test_outboxes_are_settled_when_the_remaining_events_have_no_stream(stream_state):
    stream_state.add("a")
    stream_state.add("b")
    assert not stream_state.outboxes.is_settled
    stream_state.sent()
    assert not stream_state.outboxes.is_settled
    stream_state.outboxes.appended("a")
    stream_state.outboxes.not_appended("b", "the stream is missing")
    assert not stream_state.outboxes.is_settled
    stream_state.outboxes.acknowledge({"a": 0, "b": 0}, {"b"})
    assert stream_state.outboxes.is_settled


def test_node_that_ends_sends_more_than_usual_and_counts_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_module, "LAST_SENT_BYTES", 2 * SENT_BYTES)
    publisher = Publisher(tmp_path)
    while publisher.outboxes.size < 3 * SENT_BYTES:
        publisher.outboxes.add("one", b"x" * BLOCK_BYTES)
    publisher.outboxes.send_last()
    publisher.outboxes.add("two", b"x" * BLOCK_BYTES)
    while publisher.sent():
        for key in publisher.outboxes.keys:
            publisher.outboxes.appended(key)
    assert SENT_BYTES - BLOCK_BYTES <= publisher.outboxes.left <= SENT_BYTES + BLOCK_BYTES
    assert not publisher.outboxes.is_settled


def test_s02_events_that_another_sent_as_this_node_are_noticed(tmp_path):
    publisher = Publisher(tmp_path)
    publisher.add("one", 3)
    publisher.add("two", 3)
    assert publisher.outboxes.acknowledge({"one": 2, "unknown": 9}, ()) is None
    assert publisher.outboxes.acknowledge({"one": 3, "two": EVERYTHING}, ()) is None
    assert publisher.outboxes.acknowledge({"two": 4}, ()) == "two"
