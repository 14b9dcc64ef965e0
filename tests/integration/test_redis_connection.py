"""A connection to a real Redis gives each command its own reply, or is closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_processes import fail_to_save
from tunemq_scheduler.transport.redis.redis_connection import (
    RedisConnection,
    RedisFull,
    RedisRefusesWrites,
)
from tunemq_shared.base.errors import RedisUnavailable, TransportError

__all__ = ["server"]

pytestmark = pytest.mark.integration


@pytest.fixture
def line(server: RedisServer) -> Iterator[RedisConnection]:
    with closing(RedisConnection(server.url)) as line:
        line.connect()
        yield line


def test_closed_line_sends_nothing_and_reads_no_old_reply_after_it_is_opened(line: RedisConnection):
    line.close()
    with pytest.raises(RedisUnavailable, match="closed"):
        line.post([("INCR", "key")])
    line.connect()
    assert line.ask([("ECHO", "own")]) == [b"own"]


def test_script_on_a_redis_that_cannot_save_is_refused_with_what_to_do(
    line: RedisConnection, server: RedisServer
):
    fail_to_save(server.client)
    write = ("EVAL", "return redis.call('SET', KEYS[1], '')", "1", "key")
    with pytest.raises(
        RedisRefusesWrites, match=r"refuses orders and results \(MISCONF.*make room"
    ):
        line.ask([write])


def test_write_on_a_redis_without_its_replicas_is_refused_with_what_to_do(
    line: RedisConnection, server: RedisServer
):
    server.client.config_set("min-replicas-to-write", 1)
    with pytest.raises(RedisRefusesWrites, match=r"too few replicas.*start its replicas"):
        line.ask([("SET", "key", "")])


def test_line_closed_with_a_reply_due_has_no_reply_to_receive(line: RedisConnection):
    line.post([("BLPOP", "nothing", "10")])
    line.close()
    with pytest.raises(RedisUnavailable, match="closed"):
        line.receive()


def test_line_whose_reading_was_interrupted_is_closed(line: RedisConnection):
    class Interrupted(Exception):
        pass

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupted):
            line.ask([("ECHO", "first"), ("BLPOP", "nothing", "10")])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not line.is_open
    line.connect()
    assert line.ask([("ECHO", "own")]) == [b"own"]


def test_line_with_a_refused_command_among_others_stays_in_step(line: RedisConnection):
    line.post([("SET", "text", "x"), ("LPUSH", "text", "x"), ("ECHO", "late")])
    with pytest.raises(TransportError, match="WRONGTYPE"):
        line.ask([("ECHO", "own")])
    assert line.ask([("ECHO", "own")]) == [b"own"]


def test_command_that_a_full_redis_refuses_is_the_reason_and_not_its_consequence(
    line: RedisConnection, server: RedisServer
):
    line.ask([("SET", "text", "x")])
    server.client.config_set("maxmemory", "500000")
    with pytest.raises(RedisFull, match="is full"):
        line.ask([("LPUSH", "list", "x"), ("LPOP", "text")])
    assert line.ask([("ECHO", "own")]) == [b"own"]
