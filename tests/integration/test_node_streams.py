"""A node with trials of two experiments at a time: each experiment's stream is complete."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import Node, RedisServer, Scheduler, order
from tests.integration.node_fixtures import server
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import (
    Environment,
    NodeWarned,
    ResultReported,
    SlotFreed,
    TrialFinished,
    TrialStarted,
)
from tunemq_workers.broker import outboxes

__all__ = ["server"]

pytestmark = pytest.mark.integration


def scheduler_of(experiment: str, server: RedisServer, folder: Path) -> Scheduler:
    (folder / experiment).mkdir()
    return Scheduler(server, folder / experiment, experiment)


@pytest.fixture
def one(server: RedisServer, tmp_path: Path) -> Scheduler:
    return scheduler_of("one", server, tmp_path)


@pytest.fixture
def two(one: Scheduler, server: RedisServer, tmp_path: Path) -> Scheduler:
    return scheduler_of("two", server, tmp_path)


@pytest.fixture
def node(server: RedisServer, one: Scheduler, two: Scheduler, tmp_path: Path) -> Iterator[Node]:
    node = Node(server, one, tmp_path / "node")
    yield node
    node.end()


def three_results(config):
    from tunemq_shared.trial.session import report

    for n in range(3):
        report({"loss": n / 10})


def without_end(config):
    import time

    from tunemq_shared.trial.session import report

    while True:
        report({"loss": 0.5})
        time.sleep(0.01)


STORY = [TrialStarted, *[ResultReported] * 3, TrialFinished, SlotFreed]


def story_of(scheduler: Scheduler) -> list[type]:
    return [type(event) for event in scheduler.events()]


def renewed(scheduler: Scheduler, node: Node, times: int = 2) -> None:
    """Return when the node has read the scheduler's reply again."""
    before = scheduler.renewals(node.instance_id)
    eventually(lambda: scheduler.renewals(node.instance_id) >= before + times)


def test_each_experiment_reads_its_own_events_without_a_gap(node, one, two):
    one.assign(
        node.instance_id, order("a", one.start(three_results)), order("b", two.start(three_results))
    )
    eventually(lambda: story_of(one) == STORY and story_of(two) == STORY, message=node.log)
    assert {event.trial for event in one.events()} == {"a"}
    assert {event.trial for event in two.events()} == {"b"}
    assert one.batches()[0][0] == two.batches()[0][0] == 1


def test_an_experiment_whose_stream_is_missing_holds_up_no_other(node, one, two):
    one.client.delete(one.key)
    one.assign(
        node.instance_id, order("a", one.start(three_results)), order("b", two.start(without_end))
    )
    eventually(lambda: f"redis.not_appended stream={one.key}" in node.log(), message=node.log)
    told = len(two.said(ResultReported))
    eventually(lambda: len(two.said(ResultReported)) > told + 20, message=node.log)
    assert not one.client.exists(one.key)
    one.create_generation()
    eventually(lambda: story_of(one) == STORY, message=node.log)


@pytest.mark.faults
def test_after_a_wipe_each_stream_is_sent_again_from_where_it_is_journalled(node, one, two):
    one.assign(
        node.instance_id, order("a", one.start(three_results)), order("b", two.start(three_results))
    )
    eventually(lambda: story_of(one) == STORY and story_of(two) == STORY, message=node.log)
    before = two.events()
    one.journal(node.instance_id, 6)
    renewed(one, node)
    one.client.flushall()
    two.create_generation()
    one.create_generation()
    eventually(lambda: story_of(two) == STORY, message=node.log)
    assert two.events() == before
    assert one.batches() == []


def test_numbers_continue_when_an_experiment_comes_back_to_a_node_that_had_forgotten_it(
    node, one, two
):
    one.assign(node.instance_id, order("a", one.start(three_results)))
    eventually(lambda: story_of(one) == STORY, message=node.log)
    one.assign(node.instance_id)
    one.journal(node.instance_id, 6)
    reply, field = redis_keys.reply(node.instance_id), redis_keys.acknowledged_up_to(one.key)
    eventually(lambda: not one.client.hexists(reply, field), message=node.log)
    one.assign(node.instance_id, order("c", one.start(three_results)))
    eventually(lambda: story_of(one) == 2 * STORY, message=node.log)


def test_experiment_without_readers_leaves_nothing(node, one, two):
    one.assign(node.instance_id, order("a", one.start(without_end)))
    eventually(lambda: one.said(ResultReported), message=node.log)
    one.journal(node.instance_id, redis_keys.EVERYTHING)
    one.assign(node.instance_id)
    reply, field = redis_keys.reply(node.instance_id), redis_keys.acknowledged_up_to(one.key)
    eventually(lambda: not one.client.hexists(reply, field), message=node.log)


def test_events_of_an_experiment_whose_stream_expired_are_dropped_in_the_end(node, one, two):
    one.assign(node.instance_id, order("a", one.start(three_results)))
    eventually(lambda: story_of(one) == STORY, message=node.log)
    one.client.delete(one.key)
    one.assign(node.instance_id)
    dropped = f"outbox.dropped stream={one.key} last=6"
    eventually(lambda: dropped in node.log(), within=outboxes.MISSING_S + 60, message=node.log)
    two.assign(node.instance_id, order("b", two.start(three_results)), version=9)
    eventually(lambda: story_of(two) == STORY, message=node.log)


def test_module_that_cannot_be_preloaded_is_reported_once_to_each_experiment(node, one, two):
    environment = Environment(sys.executable, ("no_such_module",), {"PATH": os.environ["PATH"]}, ())
    starts = {
        trial: scheduler.start(three_results, environment=environment, trial_number=number)
        for number, (trial, scheduler) in enumerate([("a", one), ("c", one), ("b", two)])
    }
    one.assign(node.instance_id, *(order(trial, start) for trial, start in starts.items()))
    eventually(lambda: len(one.said(SlotFreed)) == 2 and two.said(SlotFreed), message=node.log)
    for scheduler in (one, two):
        (warning,) = scheduler.said(NodeWarned)
        assert "no_such_module could not be preloaded" in warning.text
