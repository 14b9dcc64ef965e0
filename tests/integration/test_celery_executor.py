from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import redis

from tests.integration.fake_node import FakeNode
from tests.support.waiting import eventually
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import (
    ContinueTrial,
    ReattachTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.embedded.embedded_farm import EmbeddedFarm
from tunemq_scheduler.transport import node_transport
from tunemq_scheduler.transport.celery_executor import CeleryTrialExecutor
from tunemq_scheduler.transport.nodes import lease_watch
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import TO_THE_END, next_result

pytestmark = pytest.mark.integration

KEY = redis_keys.events("exp1")
PLAN = ExperimentPlan(
    experiment="e",
    experiment_id="exp1",
    events_key=KEY,
    folder="/results/e",
    trainable_name="train",
    code=m.BlobRef("0", 1, "/code"),
    environment=m.Environment("python", (), {}, ()),
)
START = StartTrial("t1", 1, "inc1", 0, b"", {"cpu": 1.0}, next_result(0), 0, ())


def result(step: int) -> m.ResultReported:
    return m.ResultReported("t1", 1, step, {"loss": float("nan")}, 1.0, 0.1, 0.1, 0.1, step)


@pytest.fixture
def farm() -> Iterator[EmbeddedFarm]:
    """A farm with a Redis, and a sleeping process as its node."""
    farm = EmbeddedFarm(make_node_command=lambda *_: ["/bin/sleep", "600"])
    farm.wait_until_ready()
    yield farm
    farm.stop()


@pytest.fixture
def executor(farm: EmbeddedFarm) -> Iterator[CeleryTrialExecutor]:
    executor = CeleryTrialExecutor(farm.url, term=1, backing=farm)
    executor.open(PLAN)
    yield executor
    executor.close(now=True)


@pytest.fixture
def node(farm: EmbeddedFarm) -> Iterator[FakeNode]:
    node = FakeNode(farm.url, "inc1")
    yield node
    node.close()


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every 20 ms, to keep the tests short."""
    monkeypatch.setattr(node_transport, "_POLL_INTERVAL_S", 0.02)


@pytest.fixture
def short_leases(quick_polls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.2)


def poll_until(executor: CeleryTrialExecutor, kind: type[m.Message], within: float = 60.0) -> list:
    """Poll until an event of ``kind`` has come; return all events until then."""
    facts: list[m.Event] = []
    deadline = time.monotonic() + within
    while not any(isinstance(fact, kind) for fact in facts):
        assert time.monotonic() < deadline, f"no {kind.__name__} in {facts}; {executor.notices()}"
        facts += executor.poll(0.05)
    return facts


def turn_until(executor: CeleryTrialExecutor, condition: Callable[[], object]) -> None:
    """Poll and drop events until the condition holds."""
    eventually(lambda: (executor.poll(0.02), condition())[1])


@pytest.fixture
def joined(executor: CeleryTrialExecutor, node: FakeNode) -> FakeNode:
    node.send_registration()
    poll_until(executor, m.NodeJoined)
    return node


def test_node_that_registers_joins_with_its_resources(executor, node):
    node.send_registration()

    assert poll_until(executor, m.NodeJoined) == [
        m.NodeJoined("inc1", "local", "host", "127.0.0.1", {"cpu": 2.0})
    ]


def test_node_registered_before_experiment_joins_too(farm, node):
    first = CeleryTrialExecutor(farm.url, term=1)
    first.open(PLAN)
    node.send_registration()
    first.close()
    second = CeleryTrialExecutor(farm.url, term=2)
    second.open(PLAN)

    poll_until(second, m.NodeJoined)
    second.close()


def test_orders_of_a_turn_are_one_message_with_start_details_until_confirmed(executor, joined):
    second = StartTrial("t2", 1, "inc1", 1, b"", {"cpu": 1.0}, TO_THE_END, 0, ())
    executor.perform([START, second])
    send_assignment = joined.read_commands()
    assert joined.redis.llen(redis_keys.queue("inc1")) == 0
    assert [(order.trial, order.start is not None) for order in send_assignment.orders] == [
        ("t1", True),
        ("t2", True),
    ]
    assert send_assignment.orders[0].start == PLAN.trial_spec(START)

    joined.send(KEY, result(1))
    poll_until(executor, m.BatchRead)
    executor.perform([ContinueTrial("t1", 1, "inc1", next_result(1)), StopTrial("t2", 1, "inc1")])
    assert joined.read_commands().orders == (
        m.TrialOrder("t1", 1, next_result(1)),
        m.TrialOrder("t2", 1, TO_THE_END, stop=True),
    )


def test_a_lease_confirms_orders_as_well_as_a_batch(executor, joined, quick_polls):
    executor.perform([START])
    joined.read_commands()
    joined.renew()
    turn_until(
        executor, lambda: executor._transport._registry.nodes["inc1"].desired_state.is_confirmed
    )
    executor.perform([ContinueTrial("t1", 1, "inc1", next_result(1))])

    assert joined.read_commands().orders[0].start is None


def test_the_reply_announces_the_newest_orders(executor, joined):
    executor.perform([START])
    executor.poll(0.0)

    eventually(lambda: joined.reply("v") == "1:1")


def test_unconfirmed_orders_are_sent_again(executor, joined, quick_polls):
    executor.perform([START])
    lost = joined.read_commands()
    joined.confirmed = (0, 0)  # as if it had never come
    again = None
    while again is None:
        joined.renew()
        executor.poll(0.03)
        if joined.redis.llen(redis_keys.queue("inc1")):
            again = joined.read_commands()

    assert again == lost


def test_a_released_trial_is_no_longer_listed(executor, joined, quick_polls):
    executor.perform([START])
    joined.read_commands()
    executor.perform([ReleaseTrial("t1", 1, "inc1")])
    assert joined.redis.llen(redis_keys.queue("inc1")) == 0
    turn_until(executor, lambda: joined.redis.llen(redis_keys.queue("inc1")))

    assert joined.read_commands().orders == ()


@pytest.mark.parity(64, 179)
def test_batches_are_kept_until_journalled(executor, joined):
    joined.send(KEY, result(1), result(2))
    joined.send(KEY, m.TrialFinished("t1", 1))
    facts = poll_until(executor, m.TrialFinished)
    assert [(fact.first, fact.last) for fact in facts if isinstance(fact, m.BatchRead)] == [
        (1, 2),
        (3, 3),
    ]
    assert [fact.step for fact in facts if isinstance(fact, m.ResultReported)] == [1, 2]
    assert joined.redis.xlen(KEY) == 2

    executor.acknowledge({"inc1": 2})
    eventually(lambda: joined.acknowledged_up_to() == 2 and joined.redis.xlen(KEY) == 1)
    executor.acknowledge({"inc1": 3})
    eventually(lambda: joined.acknowledged_up_to() == 3 and joined.redis.xlen(KEY) == 0)
    assert joined.send(KEY, result(3)), "the empty stream must stay"


def test_flood_of_events_is_read_completely_and_in_order(executor, joined):
    sender = threading.Thread(
        target=lambda: [
            joined.send(KEY, *(result(step) for step in range(1 + 100 * n, 101 + 100 * n)))
            for n in range(100)
        ]
    )
    sender.start()
    steps: list[int] = []
    while len(steps) < 10_000:
        facts = poll_until(executor, m.BatchRead)
        steps += [fact.step for fact in facts if isinstance(fact, m.ResultReported)]
        executor.acknowledge({"inc1": len(steps)})
    sender.join()

    assert steps == list(range(1, 10_001))


def test_restarted_node_joins_after_last_events_of_its_predecessor(executor, joined, farm):
    joined.send(KEY, result(1))
    successor = FakeNode(farm.url, "inc2")
    successor.send_registration()
    facts = poll_until(executor, m.NodeJoined)
    successor.close()

    kinds = [type(fact) for fact in facts]
    assert kinds == [m.BatchRead, m.ResultReported, m.NodeLost, m.NodeJoined]
    assert facts[2].instance_id == "inc1"


class CountedExcuses:
    """Backing that counts how often the executor excuses a node's death."""

    def __init__(self) -> None:
        self.excuses = 0

    def trouble(self) -> str | None:
        return None

    def notices(self) -> list[str]:
        return []

    def excuse_node(self) -> None:
        self.excuses += 1


def test_f22_node_that_died_with_trials_is_excused_and_idle_node_is_not(farm):
    backing = CountedExcuses()
    nodes = [FakeNode(farm.url, f"inc{number}") for number in (1, 2, 3)]
    with closing(CeleryTrialExecutor(farm.url, term=1, backing=backing)) as executor:
        executor.open(PLAN)
        nodes[0].send_registration()
        poll_until(executor, m.NodeJoined)
        executor.perform([START])
        for successor in nodes[1:]:  # on the second, nothing was to run
            successor.send_registration()
            poll_until(executor, m.NodeJoined)
            assert backing.excuses == 1
    for node in nodes:
        node.close()


def test_silent_node_is_lost_gets_no_messages_and_is_not_fenced(executor, joined, short_leases):
    executor.perform([START])
    facts = poll_until(executor, m.NodeLost)
    executor.poll(0.0)

    assert facts[-1] == m.NodeLost("inc1", "its lease was not renewed for 6 s")
    turn_until(executor, lambda: not joined.redis.exists(redis_keys.queue("inc1")))
    assert not joined.redis.hget(redis_keys.reply("inc1"), "f")
    executor.perform([StopTrial("t1", 1, "inc1")])  # the runner may not have read it yet
    assert not joined.redis.exists(redis_keys.queue("inc1"))


def test_returned_node_gets_current_assignments_and_no_older_ones(
    executor, joined, short_leases, monkeypatch
):
    executor.perform([START])
    poll_until(executor, m.NodeLost)
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 60.0)  # another loss does not count
    executor.acknowledge({})
    joined.renew()
    assert poll_until(executor, m.NodeReturned) == [m.NodeReturned("inc1")]
    for _ in range(5):
        joined.renew()
        executor.poll(0.03)  # checks leases, and would send waiting orders
    assert not joined.redis.exists(redis_keys.queue("inc1")), (
        "an empty assignment would kill its trial processes"
    )

    other = StartTrial("t2", 3, "inc1", 1, b"", {"cpu": 1.0}, TO_THE_END, 0, ())
    executor.perform([
        ReattachTrial(START, pause=True, stop=False, is_wanted=True),
        ReattachTrial(other, pause=False, stop=False, is_wanted=False),
    ])  # fmt: skip
    executor.acknowledge({})
    wanted, unwanted = joined.read_commands().orders
    assert (wanted.trial, wanted.attempt, wanted.pause, wanted.kill) == ("t1", 1, True, False)
    assert wanted.start == PLAN.trial_spec(START), "it may have missed it"
    assert (unwanted.trial, unwanted.attempt, unwanted.kill) == ("t2", 3, True)

    executor.perform([ReleaseTrial("t2", 3, "inc1")])
    turn_until(executor, lambda: (joined.renew(), joined.redis.llen(redis_keys.queue("inc1")))[1])
    while (send_assignment := joined.read_commands(within=1)) is not None:
        last = send_assignment
    assert [order.trial for order in last.orders] == ["t1"]


def test_node_that_deregisters_is_dead_at_once_and_leaves_no_keys(executor, joined):
    executor.perform([START])
    joined.send(KEY, result(1))
    joined.send_deregistration()
    facts = poll_until(executor, m.NodeLost)

    assert [type(fact) for fact in facts] == [m.BatchRead, m.ResultReported, m.NodeLost]
    assert facts[-1].is_dead
    turn_until(executor, lambda: joined.redis.xlen(redis_keys.NODES) == 0)
    assert not joined.redis.exists(redis_keys.queue("inc1"))
    assert joined.redis.hget(redis_keys.reply("inc1"), "f")


@pytest.mark.parametrize("ending", ["deregistration", "restart"])
def test_node_counts_as_dead_only_after_its_last_event_is_read(executor, joined, farm, ending):
    for step in range(1, 101):
        joined.send(KEY, result(step))
    if ending == "deregistration":
        joined.send_deregistration()
    else:
        successor = FakeNode(farm.url, "inc2")
        successor.send_registration()
        successor.close()
    facts = poll_until(executor, m.NodeLost)

    steps = [fact.step for fact in facts if isinstance(fact, m.ResultReported)]
    assert steps == list(range(1, 101))


def test_f03_next_scheduler_keeps_running_trials_and_reads_nothing_twice(farm, node):
    first = CeleryTrialExecutor(farm.url, term=1)
    first.open(PLAN)
    node.send_registration()
    poll_until(first, m.NodeJoined)
    first.perform([START])
    node.read_commands()
    node.send(KEY, result(1))
    poll_until(first, m.ResultReported)
    first.acknowledge({"inc1": 1})
    eventually(lambda: node.acknowledged_up_to() == 1)
    node.send(KEY, result(2))  # the first farm dies here

    second = CeleryTrialExecutor(farm.url, term=2)
    second.open(PLAN)
    second.reattach([m.NodeJoined("inc1", "local", "host", "127.0.0.1", {})], [], {"inc1": 1})
    second.perform([ReattachTrial(START, pause=False, stop=False, is_wanted=True)])
    facts = poll_until(second, m.BatchRead)
    assert not any(isinstance(fact, m.NodeJoined | m.NodeLost) for fact in facts)
    assert [fact.step for fact in facts if isinstance(fact, m.ResultReported)] == [2]
    turn_until(second, lambda: (node.renew(), node.redis.llen(redis_keys.queue("inc1")))[1])
    send_assignment = node.read_commands()
    assert send_assignment.term == 2
    assert [order.start for order in send_assignment.orders] == [PLAN.trial_spec(START)]
    first.close(now=True)
    second.close(now=True)


def test_killed_redis_comes_back_with_nothing_lost(executor, joined, farm):
    executor.perform([START])
    joined.read_commands()
    joined.send(KEY, result(1))
    poll_until(executor, m.BatchRead)
    executor.acknowledge({"inc1": 1})
    generation = joined.redis.get(redis_keys.GENERATION)

    eventually(lambda: farm.trouble() is None and "redis" in farm.pids)  # reads the pids
    os.kill(farm.pids["redis"], signal.SIGKILL)
    turn_until(executor, lambda: _is_new_generation(joined, generation))
    executor.perform([ContinueTrial("t1", 1, "inc1", next_result(1))])
    joined.send_registration()
    turn_until(executor, lambda: joined.redis.llen(redis_keys.queue("inc1")))
    send_assignment = joined.read_commands()

    assert send_assignment.orders[0].start is not None, (
        "what the node had confirmed may be forgotten"
    )
    assert joined.acknowledged_up_to() == 1
    assert joined.send(KEY, result(1), first=1)
    assert poll_until(executor, m.BatchRead)[0].first == 1
    assert executor.notices()[-1].startswith("The embedded redis ended")


def _is_new_generation(node: FakeNode, old: bytes) -> bool:
    try:
        return node.redis.get(redis_keys.GENERATION) not in {None, old}
    except redis.ConnectionError:
        return False


def test_wiped_redis_is_noticed_and_read_from_the_start(executor, joined, quick_polls):
    executor.perform([START])
    joined.read_commands()
    joined.send(KEY, result(1), result(2))
    poll_until(executor, m.BatchRead)
    joined.redis.flushall()
    assert not joined.send(KEY, result(3)), "without the stream nothing is appended"
    turn_until(executor, lambda: joined.redis.exists(KEY))
    joined.send_registration()
    joined.send(KEY, result(1), result(2), result(3), first=1)

    facts = poll_until(executor, m.BatchRead)
    assert (facts[0].first, facts[0].last) == (1, 3)
    assert not any(isinstance(fact, m.NodeJoined) for fact in facts)


def test_unreachable_redis_is_named_with_the_time_tried():
    executor = CeleryTrialExecutor("redis://:secret@127.0.0.1:1/0", term=1, connect_within=0.3)

    with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1.*for (0\.[3-9]|[1-9])") as raised:
        executor.open(PLAN)
    assert "secret" not in str(raised.value)
    executor.close()


@pytest.mark.parity(134)
def test_missing_redis_is_reported_and_the_loop_continues(farm):
    executor = CeleryTrialExecutor(farm.url, term=1)
    executor.open(PLAN)
    farm.stop()

    turn_until(executor, executor.notes)
    assert "Redis has been away for" in executor.notes()[0]
    executor.perform([START])
    executor.acknowledge({"inc1": 1})
    executor.close()


def test_embedded_farm_that_does_not_come_back_is_an_error(farm, executor):
    farm.stop()

    with pytest.raises(RedisUnavailable, match="watchdog process ended"):
        turn_until(executor, lambda: False)


@pytest.mark.parity(179)
def test_a_wake_up_ends_a_poll_at_once(executor):
    timer = threading.Timer(0.05, executor.wake)
    timer.start()
    started = time.monotonic()

    assert executor.poll(30.0) == []
    assert time.monotonic() - started < 20.0
    timer.join()


def test_executor_that_waits_uses_almost_no_cpu(executor, joined):
    executor.poll(0.1)

    def is_cheap() -> bool:
        used = time.thread_time()
        executor.poll(2.0)
        return time.thread_time() - used < 0.02  # 1 %; a twentieth of that on an idle machine

    assert any(is_cheap() for _ in range(3))  # other tests' garbage may be collected now


def test_keys_left_by_an_experiment_expire(executor, joined):
    executor.perform([START])
    joined.read_commands()
    joined.send(KEY, result(1))
    poll_until(executor, m.BatchRead)
    send_assignment: list[m.Assignment | None] = []
    reader = threading.Thread(target=lambda: send_assignment.append(joined.read_commands()))
    reader.start()
    executor.close()
    reader.join()

    assert send_assignment[0].orders == (), "what still runs must end"
    assert joined.acknowledged_up_to() == redis_keys.EVERYTHING, "its later events are not needed"
    owned = {
        redis_keys.GENERATION,
        redis_keys.NODES,
        redis_keys.reply("inc1"),
        redis_keys.lease("inc1"),
    }
    left = {key.decode() for key in joined.redis.keys("*")} - owned
    assert all(joined.redis.ttl(key) > 0 for key in left), left
    assert not [key for key in left if "kombu" in key]
    executor.close()  # again is allowed


def test_node_registry_does_not_grow_with_dead_nodes(executor, farm, quick_polls):
    for number in range(3):
        node = FakeNode(farm.url, f"inc{number}")
        node.send_registration()
        poll_until(executor, m.NodeJoined)
        node.close()

    assert list(executor._transport._registry.nodes) == ["inc2"]
