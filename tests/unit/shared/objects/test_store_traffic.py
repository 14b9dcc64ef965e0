"""A process's report about its requests to stores, without secrets."""

from __future__ import annotations

import contextlib
import math

import msgspec
import pytest

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.health.node_metrics import GpuMetrics, NodeMetrics, decode_node_metrics
from tunemq_shared.objects import store_traffic
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.object_store import NoSuchObject
from tunemq_shared.objects.store_traffic import CountedClient, StoreTraffic, TrafficCount
from tunemq_shared.protocol.messages import encode


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(store_traffic.time, "monotonic", lambda: now[0])
    return now


def test_traffic_of_a_failing_store_reports_since_when_until_it_answers(clock: list[float]):
    count = TrafficCount()
    count.answered("a")
    assert count.so_far() == StoreTraffic(1, 0)
    count.failed("a", "first")
    clock[0] += 30.0
    count.failed("a", "refused" * 100)
    said = count.so_far()
    assert (said.requests, said.failures, said.failing_s) == (3, 2, 30.0)
    assert said.problem.startswith("refused")
    assert said.is_possible
    assert "for 30 s: refused" in said.shown("node one")
    count.answered("b")  # another store
    assert count.so_far().failing_s == 30.0
    count.answered("a")
    assert count.so_far() == StoreTraffic(5, 2)
    assert not count.so_far().shown("node one")


def test_traffic_of_an_unused_store_does_not_fail_for_ever(clock: list[float]):
    count = TrafficCount()
    count.failed("a", "away")
    clock[0] += 130.0
    assert count.so_far() == StoreTraffic(1, 1)
    count.failed("a", "away again")
    assert count.so_far().failing_s == 0.0


def test_counted_client_takes_a_missing_object_for_an_answer(monkeypatch: pytest.MonkeyPatch):
    count = TrafficCount()
    monkeypatch.setattr(store_traffic, "TRAFFIC", count)

    class Answers:
        error: Exception | None = None

        def remove(self, _name: str, _doing: str) -> None:
            if self.error is not None:
                raise self.error

    answers = Answers()
    client = CountedClient(lambda: answers, "s3://a/b")  # type: ignore[arg-type]
    for error in (
        None,
        NoSuchObject("gone"),
        StoreUnavailable("away"),
        StoreRequestDenied("no", "NoKey"),
    ):
        answers.error = error
        with contextlib.suppress(StoreError):
            client.remove("x", "it cannot be removed")
    said = count.so_far()
    assert (said.requests, said.failures, said.problem) == (4, 2, "no")


def test_counted_client_with_failing_large_uploads_stays_failing_after_a_small_one(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
):
    count = TrafficCount()
    monkeypatch.setattr(store_traffic, "TRAFFIC", count)

    class NearlyFull:
        room = 2**20 - 1

        def put(self, _name: str, data: bytes, _doing: str) -> None:
            if len(data) > self.room:
                raise StoreUnavailable("no space left")

    server = NearlyFull()
    client = CountedClient(lambda: server, "s3://a/b")  # type: ignore[arg-type]
    for _ in range(2):
        with contextlib.suppress(StoreError):
            client.put("large", bytes(2**20), "it cannot be written")
        client.put("small", b"x", "it cannot be written")
        clock[0] += 30.0
    assert "failing for 60 s: no space left" in count.so_far().shown("node one")
    server.room = 2**20
    client.put("large", bytes(2**20), "it cannot be written")
    assert count.so_far() == StoreTraffic(5, 2)


@pytest.mark.parametrize(
    "traffic",
    [
        StoreTraffic(-1),
        StoreTraffic(1, 2),
        StoreTraffic(2**63, 0),
        StoreTraffic(queue_bytes=-1),
        StoreTraffic(failing_s=math.nan),
        StoreTraffic(failing_s=math.inf),
        StoreTraffic(failing_s=-1.0),
        StoreTraffic(problem="x" * 501),
    ],
)
def test_impossible_traffic_is_rejected_in_node_metrics(traffic: StoreTraffic):
    assert not traffic.is_possible
    with pytest.raises(msgspec.ValidationError):
        decode_node_metrics(encode(NodeMetrics(store=traffic)))


@pytest.mark.parametrize(
    "node_metrics",
    [
        NodeMetrics(load=math.nan),
        NodeMetrics(rejected={f"request:{n}": 2**53 for n in range(1000)}),
        NodeMetrics(memory_free=-1.0),
        NodeMetrics(disk_free=math.inf),
        NodeMetrics(disk_size=1e300),
        NodeMetrics(trial_processes=-1),
        NodeMetrics(outbox=-(2**40)),
        NodeMetrics(cache=2**63),
        NodeMetrics(clock=math.nan),
        NodeMetrics(rejected={"command:altered": -5}),
        NodeMetrics(gpus=(GpuMetrics("G", busy=math.nan),)),
        NodeMetrics(gpus=(GpuMetrics("G", memory_used=-1.0),)),
        NodeMetrics(number=-1),
    ],
)
def test_node_metrics_with_an_impossible_amount_are_rejected(node_metrics: NodeMetrics):
    with pytest.raises(msgspec.ValidationError, match="negative, infinite or too large"):
        decode_node_metrics(encode(node_metrics))


def test_node_metrics_without_store_traffic_are_read():
    """A node of the previous version sends such metrics."""
    older = msgspec.msgpack.encode(
        msgspec.msgpack.decode(encode(NodeMetrics("1", trial_processes=3)))[:-1]
    )
    assert decode_node_metrics(older) == NodeMetrics("1", trial_processes=3)


def test_traffic_error_that_is_long_is_cut_between_words():
    count = TrafficCount()
    count.failed("s", "set AWS_SECRET_ACCESS_KEY " * 40)
    said = count.so_far()
    assert said.is_possible
    assert said.problem.endswith(" ...")
    assert set(said.problem.split()) == {"set", "AWS_SECRET_ACCESS_KEY", "..."}
