"""S16: a key of the farm with the wrong type blocks no process for long.

An attacker with a role's password may delete a key of the farm and write it again. When Redis
answers with an error about one key, Redis is still there: the farm deletes the key, as after a wipe
(F06).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain

import pytest
import redis as redis_py

from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import served
from tests.support.farms.own_farm import ChainRun, OwnFarm, made_to_search_on
from tests.support.farms.secured_redis import shipped_users
from tests.support.waiting import eventually
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.common.scheduler_lease import SchedulerLease
from tunemq_scheduler.farm.output.trial_output_collector import OutputReader
from tunemq_scheduler.security.signing_downgrade import refuse_unsigned
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.output_chunks import OutputChunk, encode
from tunemq_shared.signing.live_keys import LiveKeys

__all__ = ["server"]

pytestmark = [pytest.mark.integration, pytest.mark.security]

BACK_S = 30.0
WRITES = {
    "string": ("SET", "{}", "x"),
    "stream": ("XADD", "{}", "*", "a", "b"),
    "hash": ("HSET", "{}", "a", "b"),
    "list": ("LPUSH", "{}", "a"),
}
#: Keys of a scheduler and its nodes during a search, and their types.
OF_NODES = {
    redis_keys.NODES: "stream",
    redis_keys.events("*"): "stream",
    redis_keys.GENERATION: "string",
    redis_keys.SIGNS: "string",
    redis_keys.CHALLENGE: "string",
    redis_keys.SCHEDULER: "string",
    redis_keys.lease("*"): "string",
    redis_keys.node_metrics("*"): "string",
    redis_keys.reply("*"): "hash",
    redis_keys.queue("*"): "list",
}
#: Keys of a farm's scheduler only.
OF_FARMS = {
    redis_keys.TERM: "string",
    redis_keys.STREAMS: "string",
    redis_keys.SCHEDULER: "string",
    redis_keys.SIGNS: "string",
}


def put(client: redis_py.Redis, key: str, kind: str) -> None:
    """Give a key this type, before its owner can create it again."""
    with client.pipeline(transaction=True) as both:
        both.delete(key)
        both.execute_command(*(part.format(key) for part in WRITES[kind]))
        both.execute()


def wrong_for(right: str) -> list[str]:
    return [kind for kind in WRITES if kind != right]


class FarmWithRoles(OwnFarm):
    """A farm whose Redis has the shipped users, with their rights."""

    def __init__(self) -> None:
        super().__init__(nodes=0)
        for line in shipped_users().splitlines()[1:]:
            _, name, *rules = line.split()
            given = [">secret" if rule.startswith("#") else rule for rule in rules]
            self.server.client.execute_command("ACL", "SETUSER", name, *given)
        self._node_url = self.url_of("worker")
        self.url = self.url_of("scheduler")
        self.add_node()
        self.add_node()

    def url_of(self, role: str) -> str:
        return self.server.url.replace("unix://", f"unix://{role}:secret@")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[FarmWithRoles]:
    with made_to_search_on(FarmWithRoles, monkeypatch) as make:
        yield make()


@pytest.mark.parametrize("pattern", OF_NODES)
def test_s16_search_whose_key_gets_another_type_continues_and_loses_nothing(own, tmp_path, pattern):
    run = ChainRun(own, tmp_path, steps=100, gate=20)
    run.wait_for_step(3)
    client = own.server.client
    for count, kind in enumerate(wrong_for(OF_NODES[pattern])):
        keys = client.keys(pattern) if "*" in pattern else [pattern.encode()]
        for key in keys or [redis_keys.queue(registration(client)).encode()]:
            put(client, key.decode(), kind)
        run.open_gate(40 + 20 * count)
        print(pattern, kind, run.continues(time.monotonic(), within=BACK_S))
    run.open_gate(100)
    run.ends()
    rejected = {entry["object"] for entry in client.acl_log()}
    assert rejected <= {"client"}  # a library gives its name


def registration(client: redis_py.Redis) -> str:
    """The instance of a node; while its queue is empty there is no key of it."""
    return client.keys(redis_keys.reply("*"))[0].decode().removeprefix(redis_keys.reply(""))


def test_s16_scheduler_with_a_key_of_another_type_counts_it_and_says_so(own, tmp_path):
    run = ChainRun(own, tmp_path, steps=60, gate=20)
    run.wait_for_step(3)
    worker = redis_py.Redis.from_url(own.url_of("worker"), protocol=2, driver_info=None)
    (key,) = own.server.client.keys(redis_keys.events("*"))
    for one, gate in ((key, 35), (redis_keys.NODES, 50)):
        worker.delete(one)
        worker.set(one, "x")
        run.open_gate(gate)
        run.continues(time.monotonic(), within=BACK_S)
    run.open_gate(60)
    run.ends()
    worker.close()
    for one in (key.decode(), redis_keys.NODES):
        assert any(f"{one} in Redis" in line for line in run.told), run.told


@pytest.mark.parametrize(
    ("key", "kind"), [(k, w) for k, r in OF_FARMS.items() for w in wrong_for(r)]
)
def test_s16_farm_whose_keys_had_other_types_gets_its_scheduler(server, key, kind):
    put(server.client, key, kind)
    refuse_unsigned(server.url, LiveKeys.none(), is_insecure=False, tell=print)
    lease = SchedulerLease(server.url, LeaseHolder.this_process())
    try:
        lease.claim(5, print)
        put(server.client, key, kind)
        time.sleep(1.5)
        lease.check_known()
        assert server.client.eval(*lease.guarded([("SET", "tunemq:x", "1")])[1:]) == 1
        assert server.client.eval(*lease.taking(["tunemq:events:one"])[1:]) == 1
    finally:
        lease.close()
    assert server.client.get(redis_keys.STREAMS) == b"tunemq:events:one"


@pytest.mark.parametrize(
    "key", [redis_keys.REQUESTS, redis_keys.TERM, redis_keys.FARM, redis_keys.SCHEDULER]
)
def test_s16_requests_are_answered_after_a_key_of_another_type(server, tmp_path, key):
    with served(server.url, server.client, tmp_path) as api, FarmClient(server.url) as client:
        assert client.farm().store
        kind = "list" if key != redis_keys.REQUESTS else "string"
        put(server.client, key, kind)
        api.announce(server.client)
        if key == redis_keys.REQUESTS:
            eventually(lambda: server.client.type(key) != b"string")
            assert [one[:2] for one in api.rejected] == [("key", "wrong_type")]
        assert client.farm().store


def test_s16_output_is_written_down_after_its_stream_had_another_type(server, tmp_path):
    notices: list[str] = []
    signing = SchedulerSigning()
    reader = OutputReader(server.url, notices.append, signing.output, signing.rejected.add)
    key = redis_keys.events("one")
    put(server.client, redis_keys.output(key), "string")
    (tmp_path / "train_t1").mkdir()
    reader.follow({"one": (tmp_path, key)})
    reader.start()
    try:
        eventually(lambda: not server.client.exists(redis_keys.output(key)))
        piece = OutputChunk("t1", 1, "train_t1", "stdout", 0, b"hello\n")
        server.client.xadd(redis_keys.output(key), {redis_keys.CHUNK: b"\0" + encode(piece)})
        eventually((tmp_path / "train_t1" / "stdout").exists)
    finally:
        reader.close()
    assert signing.rejected.counts() == (("key", "wrong_type", 1),)
    assert redis_keys.output(key) in "".join(signing.rejected.notices())
    assert notices == []


def test_every_redis_key_of_the_farm_is_listed():
    names = {
        value
        for value in vars(redis_keys).values()
        if isinstance(value, str) and value.startswith("tunemq:")
    }
    tried = {*chain(OF_NODES, OF_FARMS), redis_keys.REQUESTS, redis_keys.FARM}
    assert names <= tried, names - tried
