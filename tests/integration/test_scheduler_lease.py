"""A farm's lease and terms, on a real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.farms.farm_processes import TcpRedis
from tests.support.waiting import eventually
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.common import scheduler_lease as lease_module
from tunemq_scheduler.farm.common.scheduler_lease import SchedulerLease
from tunemq_scheduler.transport.redis.redis_connection import RedisConnection
from tunemq_shared.base.errors import RedisUnavailable, SchedulerSuperseded
from tunemq_shared.broker import redis_keys

pytestmark = pytest.mark.integration


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[TcpRedis]:
    redis = TcpRedis(tmp_path)
    yield redis
    redis.end()


#: No scheduler takes that long to renew a lease, even on a busy machine.
LONG_S = 30.0


@pytest.fixture
def claim(redis, monkeypatch):
    """A function that claims the lease for this process, or for the one that `holder` describes."""
    monkeypatch.setattr(lease_module, "TTL_S", LONG_S)
    monkeypatch.setattr(lease_module, "PERIOD_S", 0.1)
    leases = []

    def claim(
        at_least: int = 1,
        holder: LeaseHolder | None = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> SchedulerLease:
        lease = SchedulerLease(redis.url, holder or LeaseHolder.this_process())
        leases.append(lease)
        lease.claim(at_least, tell)
        return lease

    yield claim
    for lease in leases:
        lease.close()


def elsewhere(holder: LeaseHolder, host: str = "elsewhere") -> LeaseHolder:
    return msgspec.structs.replace(holder, host=host, place="another kernel")


LEASE_OF_ANOTHER = b"1:abcd:1:" + msgspec.json.encode(elsewhere(LeaseHolder.this_process()))


def freeze(lease: SchedulerLease, monkeypatch) -> None:
    """Stop renewing a lease, as if its process were stopped; the lease expires at once."""
    is_frozen = threading.Event()
    monkeypatch.setattr(lease, "_look", is_frozen.set)
    assert is_frozen.wait(60), "its last check has ended"
    line = RedisConnection(lease._url)
    line.connect()
    line.ask([("PEXPIRE", redis_keys.SCHEDULER, "100")])
    line.close()


def test_each_start_gets_a_greater_term(claim):
    terms = []
    for _ in range(3):
        lease = claim()
        terms.append(lease.term)
        lease.close()
    assert terms == sorted(set(terms))
    assert terms[0] >= int(time.time()) - 60


def test_a_term_is_never_below_that_of_the_journal(claim):
    far = int(time.time()) + 10_000
    assert claim(far).term == far


def test_wiped_redis_does_not_lower_the_term(claim, redis):
    first = claim()
    first.close()
    redis.client.flushall()
    assert claim(first.term + 1).term > first.term


@pytest.mark.parametrize(
    "written", ["2199023255552", "549755813889", "inf", "nan", "1e300", "-1e300", "1.5", "x", ""]
)
def test_term_that_no_scheduler_has_written_does_not_raise_the_next_one(
    claim, redis, written: str
) -> None:
    now = int(time.time())
    redis.client.set(redis_keys.TERM, written)
    lease = claim()
    assert now <= lease.term < now + 60
    redis.client.set(redis_keys.TERM, written)
    eventually(lambda: redis.client.get(redis_keys.TERM) == str(lease.term).encode())
    lease.check_known()


def test_living_lease_holder_is_named_to_a_second_scheduler(claim):
    claim(holder=elsewhere(LeaseHolder.this_process()))
    with pytest.raises(SchedulerSuperseded, match=rf"process {os.getpid()} on elsewhere"):
        claim()


def test_the_lease_of_a_dead_process_of_this_machine_is_free_at_once(claim, redis):
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = int(Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()[19])
    holder = msgspec.structs.replace(LeaseHolder.this_process(), pid=dead.pid, born=born)
    lease = SchedulerLease(redis.url, holder)
    lease.claim(1, lambda _text: None)
    assert not holder.is_gone
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert holder.is_gone
    # Stop renewing the lease, as if its process had ended.
    lease._closed.set()
    lease._thread.join()
    monotonic = time.monotonic()
    assert claim().term > lease.term
    assert time.monotonic() - monotonic < LONG_S / 2
    lease._connection.close()


@pytest.mark.parametrize(
    ("value", "lasts_ms"),
    [
        (b"1:abcd:1:{}", 1000 * LONG_S),
        (b"9" * 5000, 1000 * LONG_S),
        (LEASE_OF_ANOTHER.replace(b'"since":', b'"since":1e300,"was":'), 1000 * LONG_S),
        (LEASE_OF_ANOTHER.replace(b'"pid":', b'"pid":-1,"was":'), 1000 * LONG_S),
        (LEASE_OF_ANOTHER, None),
        (LEASE_OF_ANOTHER, 10_000 * LONG_S),
    ],
    ids=["no holder", "long", "no time", "no process", "no expiry", "long expiry"],
)
def test_lease_that_no_scheduler_has_written_is_removed_with_a_notice(
    claim, redis, value, lasts_ms
):
    redis.client.set(redis_keys.SCHEDULER, value, px=lasts_ms and int(lasts_ms))
    told: list[str] = []
    started = time.monotonic()
    assert claim(tell=told.append).term > 1
    assert time.monotonic() - started < LONG_S / 2
    (line,) = told
    assert "tunemq:scheduler" in line
    assert 0 < redis.client.pttl(redis_keys.SCHEDULER) <= 1000 * LONG_S


def test_the_lease_of_a_silent_process_elsewhere_is_free_when_it_has_run_out(
    claim, redis, monkeypatch
):
    silent = claim(holder=elsewhere(LeaseHolder.this_process()))
    assert 0 < redis.client.pttl(redis_keys.SCHEDULER) <= 1000 * LONG_S
    freeze(silent, monkeypatch)
    successor = claim()
    assert successor.term > silent.term


def test_replaced_scheduler_notices_at_its_next_lease_check(claim, monkeypatch):
    zombie = claim(holder=elsewhere(LeaseHolder.this_process(), "zombie"))
    look = zombie._look
    freeze(zombie, monkeypatch)
    successor = claim(holder=elsewhere(LeaseHolder.this_process(), "successor"))
    zombie.check_known()
    proven_at = zombie.proven_at
    look()
    assert zombie.proven_at == proven_at
    with pytest.raises(SchedulerSuperseded, match="on successor"):
        zombie.check_known()
    zombie._thread.join()  # the thread does not check the lease any more
    successor.check_known()


def test_replaced_scheduler_cannot_write_to_redis(claim, redis, monkeypatch):
    zombie = claim(holder=elsewhere(LeaseHolder.this_process(), "zombie"))
    line = RedisConnection(redis.url)
    line.connect()
    commands = [("HSET", "reply", "f", 1), ("EXPIRE", b"reply", "60")]
    assert line.ask([zombie.guarded(commands)]) == [1]
    assert redis.client.hget("reply", "f") == b"1"
    assert redis.client.ttl("reply") > 0
    freeze(zombie, monkeypatch)
    successor = claim()
    assert line.ask([zombie.guarded([("HSET", "reply", "f", "2")])]) == [0]
    assert redis.client.hget("reply", "f") == b"1"
    assert line.ask([successor.guarded([("DEL", "reply")])]) == [1]
    assert not redis.client.exists("reply")
    line.close()


def test_scheduler_with_a_new_stream_deletes_the_previous_one(claim, redis):
    line = RedisConnection(redis.url)
    line.connect()
    first = claim()
    for key in ("one", "another"):
        redis.client.xadd(key, {"h": "x"})
    assert line.ask([first.taking(["one"])]) == [1]
    first.close()
    second = claim()
    assert line.ask([second.taking(["one"])]) == [1]
    assert redis.client.exists("one", "another") == 2
    second.close()
    third = claim()
    assert line.ask([third.taking(["another"])]) == [1]
    assert (redis.client.exists("one"), redis.client.exists("another")) == (0, 1)
    assert redis.client.get(redis_keys.STREAMS) == b"another"
    assert line.ask([second.taking(["one"])]) == [0]  # it woke too late
    assert redis.client.exists("another") == 1
    line.close()


def test_scheduler_with_new_streams_deletes_those_it_does_not_keep(claim, redis):
    line = RedisConnection(redis.url)
    line.connect()
    lease = claim()
    for key in ("one", "another", "third"):
        redis.client.xadd(key, {"h": "x"})
    line.ask([lease.taking(["one", "another", "third"])])
    line.ask([lease.taking(["another", "new"])])
    assert [redis.client.exists(key) for key in ("one", "another", "third")] == [0, 1, 0]
    assert redis_keys.unlisted(redis.client.get(redis_keys.STREAMS).decode()) == ["another", "new"]
    line.ask([lease.taking([])])
    assert not redis.client.exists("another")
    line.close()


def test_wiped_redis_does_not_reinstate_a_replaced_scheduler(claim, redis, monkeypatch):
    zombie = claim(holder=elsewhere(LeaseHolder.this_process(), "zombie"))
    look = zombie._look
    freeze(zombie, monkeypatch)
    successor = claim(holder=elsewhere(LeaseHolder.this_process(), "successor"))
    redis.client.flushall()
    monkeypatch.setattr(zombie, "_look", look)
    eventually(lambda: redis.client.get(redis_keys.TERM) == str(successor.term).encode())
    eventually(lambda: zombie._successor is not None)
    with pytest.raises(SchedulerSuperseded):
        zombie.check_known()
    successor.check_known()


def test_lease_holder_continues_while_redis_is_away(claim, redis):
    lease = claim()
    redis.process.kill()
    redis.process.wait()
    away_at = time.monotonic()
    eventually(lambda: lease.proven_at > away_at)
    lease.check_known()


def test_without_redis_there_is_no_lease(redis):
    redis.end()
    lease = SchedulerLease(redis.url, LeaseHolder.this_process())
    with pytest.raises(RedisUnavailable):
        lease.claim(1, lambda _text: None)
    lease.close()


def test_returned_lease_is_free_at_once(claim, redis):
    lease = claim(holder=elsewhere(LeaseHolder.this_process()))
    lease.close()
    assert redis.client.get(redis_keys.SCHEDULER) is None
    started = time.monotonic()
    claim()
    assert time.monotonic() - started < LONG_S / 2


def test_term_of_a_file_is_read_only_if_a_scheduler_wrote_it(tmp_path):
    file = tmp_path / "farm" / "term"
    assert lease_module.read_term(file) == 0
    lease_module.keep_term(file, 1795663530)
    assert lease_module.read_term(file) == 1795663530
    for other in (b"", b"-1", b"nan", b"9" * 50, b"\xff"):
        file.write_bytes(other)
        assert lease_module.read_term(file) == 0
