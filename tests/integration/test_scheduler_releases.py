"""What a farm's scheduler holds back until the copy of its journal has the reason for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.farm_processes import TcpRedis
from tests.integration.fake_node import FakeNode
from tests.support import eventually
from tests.unit.scheduler.loops import PLAN
from tunemq_scheduler.farm.executor import FarmExecutor
from tunemq_scheduler.farm.holder import Holder
from tunemq_scheduler.farm.lease import SchedulerLease
from tunemq_shared import messages as m
from tunemq_shared import wire

pytestmark = pytest.mark.integration


@dataclass
class Place:
    """How far a journal is, or the copy of one."""

    turn: int = 0

    def news(self) -> list[str]:
        return []

    def close(self) -> None:
        """It has nothing open."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[TcpRedis]:
    redis = TcpRedis(tmp_path)
    yield redis
    redis.end()


@pytest.fixture
def executor(redis) -> Iterator[FarmExecutor]:
    lease = SchedulerLease(redis.url, Holder.this_process("search"))
    lease.claim(1, lambda _text: None)
    executor = FarmExecutor(redis.url, lease, address=redis.url)
    executor.open(PLAN)
    yield executor
    executor.close(now=True)
    lease.close()


def test_however_long_the_store_is_away_two_releases_are_held_and_the_newest_is_one(
    redis, executor
):
    node = FakeNode(redis.url, "inc1")
    node.say_hello()
    eventually(lambda: any(isinstance(fact, m.NodeJoined) for fact in executor.poll(0.05)))

    def told() -> int:
        node.renew()  # however long this takes
        executor.poll(0.0)
        return int(node.reply(wire.journalled(PLAN.events_key)) or 0)

    journal, copy = Place(), Place()
    executor.follow(journal, copy, releases=True)
    for turn in range(1, 1001):
        journal.turn = turn
        executor.release({"inc1": 10 * turn})
    assert [turn for turn, _ in executor._releases] == [1, 1000]
    assert told() == 0
    # One that is a few turns behind for ever must not wait for a turn that moves on.
    copy.turn = 1
    eventually(lambda: told() == 10)
    journal.turn = 1001
    executor.release({"inc1": 10_010})
    executor.release({"inc1": 10_020})
    copy.turn = 1000
    eventually(lambda: told() == 10_000)
    copy.turn = 1001
    eventually(lambda: told() == 10_020)
    assert not executor._releases
    node.close()
