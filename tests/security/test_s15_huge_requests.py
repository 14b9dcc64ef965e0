"""S15: huge requests that were left while no scheduler read cost it little at its start."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import CODE, served
from tests.support.waiting import eventually
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.farm.service import request_stream
from tunemq_scheduler.farm.service.request_stream import FIELD_BYTES, RequestStream
from tunemq_shared.base.errors import ConfigError, RequestRejected
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r

__all__ = ["server"]

pytestmark = [pytest.mark.integration, pytest.mark.security]

_HUGE = 8 * 2**20
_TIMES = 16


def taken_from(stream: RequestStream, amount: int) -> list[dict[bytes, bytes]]:
    """Read from the stream until it has returned `amount` entries."""
    taken: list[dict[bytes, bytes]] = []
    eventually(lambda: len(taken.extend(stream.take(1)) or taken) >= amount)
    return taken


def test_request_stream_with_huge_entries_holds_one_at_a_time_and_cuts_it_off(
    server: RedisServer,
):
    for number in range(_TIMES):
        server.client.xadd(redis_keys.REQUESTS, {"id": number, "body": b"x" * _HUGE})
    stream = RequestStream(server.url, lambda *_: None)
    tracemalloc.start()
    try:
        taken = taken_from(stream, _TIMES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        stream.close()
    assert [entry[b"id"] for entry in taken] == [b"%d" % number for number in range(_TIMES)]
    assert {len(entry[b"body"]) for entry in taken} == {FIELD_BYTES}
    assert peak < 4 * _HUGE
    assert server.client.xlen(redis_keys.REQUESTS) == 0


def test_request_stream_leaves_out_fields_that_no_request_has(server: RedisServer):
    server.client.xadd(redis_keys.REQUESTS, {f"field{number}": "x" for number in range(1000)})
    stream = RequestStream(server.url, lambda *_: None)
    (entry,) = taken_from(stream, 1)
    stream.close()
    assert len(entry) < 20


def test_request_stream_reads_at_most_its_memory_budget_at_once(server: RedisServer):
    fields = {f"field{number}": b"x" * FIELD_BYTES for number in range(8)}
    for _ in range(40):
        server.client.xadd(redis_keys.REQUESTS, fields)
    stream = RequestStream(server.url, lambda *_: None)
    sizes: list[int] = []
    eventually(
        lambda: sizes.append(sum(map(len, stream.take(1)))) or sum(sizes) >= 40 * len(fields)
    )
    stream.close()
    at_once = max(sizes)
    assert at_once * FIELD_BYTES <= request_stream._BYTES + len(fields) * FIELD_BYTES


def test_requests_that_quote_much_are_remembered_with_short_answers(
    server: RedisServer, tmp_path: Path
):
    folder = tmp_path / "results"
    with served(server.url, server.client, folder), FarmClient(server.url) as client:
        for request in (
            r.StopExperiment(name="\x01" * 200_000),
            r.StopExperiment(name="\x01" * 255, trial="\x01" * 200_000),
            r.DrainNode(node="\x01" * 255),
            r.SubmitExperiment(
                name="exp",
                code=CODE,
                settings=r.ExperimentEnvironment(variables={"\x01" * 200_000 + "=": "x"}),
            ),
            r.SubmitExperiment(
                name="exp",
                code=CODE,
                settings=r.ExperimentEnvironment(preload=("\x01" * 200_000,)),
            ),
        ):
            with pytest.raises((ConfigError, RequestRejected)) as error:
                client.ask(request, a.RequestDone)
            assert len(str(error.value)) < 10_000
    assert (folder / ".farm" / "requests").stat().st_size < 20_000
