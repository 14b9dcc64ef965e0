"""A node without a scheduler: it keeps running for a while, then its trials save and end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import Node, RedisServer, Scheduler, is_alive, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import (
    ResultReported,
    SlotFreed,
    TrialPaused,
    TrialProcessDied,
    TrialStarted,
)

__all__ = ["scheduler", "server"]

pytestmark = [pytest.mark.integration, pytest.mark.faults]

LOST_AFTER_S = 1.5
#: For tests of other things: no busy machine is silent for that long.
NEVER_LOST_S = 60.0


def without_end(config):
    import time

    import tunemq as tune

    while True:
        time.sleep(0.01)  # the step's work
        tune.report({"loss": 0.5})


@pytest.fixture
def node(
    server: RedisServer, scheduler: Scheduler, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Node]:
    lost_after_s = getattr(request, "param", LOST_AFTER_S)
    node = Node(server, scheduler, tmp_path / "node", "--lost-after", str(lost_after_s))
    yield node
    node.end()


@pytest.fixture
def process(node: Node, scheduler: Scheduler) -> int:
    """Return the pid of the process of a trial that reports."""
    scheduler.assign(node.instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: len(scheduler.said(ResultReported)) > 5, message=node.log)
    return int(scheduler.said(TrialStarted)[0].pid)


def test_f08_trials_of_a_node_isolated_for_too_long_save_and_end(node, scheduler, server, process):
    server.kill()
    eventually(lambda: not is_alive(process), message=node.log)
    assert "node.given_up" in node.log()
    server.start()
    scheduler.create_generation()
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert scheduler.said(TrialPaused)
    assert not scheduler.said(TrialProcessDied)
    steps = [event.step for event in scheduler.said(ResultReported)]
    assert steps == list(range(1, len(steps) + 1)), "what it reported meanwhile is not lost"

    scheduler.assign(node.instance_id, order("t2", scheduler.start(without_end)), version=9)
    eventually(lambda: len(scheduler.said(TrialStarted)) == 2, message=node.log)


@pytest.mark.parametrize("node", [NEVER_LOST_S], indirect=True)
def test_f08_a_short_silence_ends_nothing(node, scheduler, server, process):
    server.kill()
    time.sleep(LOST_AFTER_S / 3)  # the test is about the length of the outage
    server.start()
    scheduler.create_generation()
    reported = len(scheduler.said(ResultReported))
    eventually(lambda: len(scheduler.said(ResultReported)) > reported + 200)
    assert is_alive(process)
    assert "node.given_up" not in node.log()


@pytest.mark.parametrize("node", [NEVER_LOST_S], indirect=True)
def test_f05_redis_that_answers_and_gives_no_messages_is_waited_for(node, server, process):
    server.client.replicaof("127.0.0.1", 1)  # no server listens there
    ends = "consumer.died"
    eventually(lambda: node.log().count(ends) > 12, within=60, message=node.log)
    server.client.replicaof("NO", "ONE")
    eventually(lambda: node.consumer() is not None, message=node.log)
    assert is_alive(process)
    assert "node.stop" not in node.log()


def test_f03_trials_of_a_farm_without_scheduler_for_too_long_save_and_end(node, scheduler, process):
    scheduler.client.set(redis_keys.SCHEDULER, "1:host:somebody")
    renewals = scheduler.renewals(node.instance_id)
    eventually(lambda: scheduler.renewals(node.instance_id) > renewals + 2)
    assert is_alive(process)
    scheduler.client.delete(redis_keys.SCHEDULER)
    eventually(lambda: not is_alive(process), message=node.log)
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert scheduler.said(TrialPaused)

    scheduler.client.set(redis_keys.SCHEDULER, "2:host:another")
    scheduler.assign(node.instance_id, order("t2", scheduler.start(without_end)))
    eventually(lambda: len(scheduler.said(TrialStarted)) == 2, message=node.log)


@pytest.mark.parametrize("node", [NEVER_LOST_S], indirect=True)
def test_kill_order_frees_the_slot_of_a_trial_that_never_started(node, scheduler, process):
    kill = [
        order(trial, scheduler.start(without_end), kill=True) for trial in ("t1", "never there")
    ]
    scheduler.assign(node.instance_id, *kill)
    eventually(lambda: len(scheduler.said(SlotFreed)) == 2, message=node.log)
    assert {one.trial for one in scheduler.said(SlotFreed)} == {"t1", "never there"}
    assert not is_alive(process)
    assert len(scheduler.said(TrialStarted)) == 1
