"""The CPU time of Redis on a farm: for each kind of call by nodes and schedulers.

The farm's own code makes the calls, one after another over a unix socket. The server reports the
CPU time, as one thread handles all calls.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from floors import redis_server
from measured import tell
from redis import Redis

from tests.simulation.large_experiment import metrics, plan_of
from tunemq_scheduler.core.commands import StartTrial
from tunemq_scheduler.transport.redis.celery_publisher import CeleryPublisher
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.broker import redis_keys
from tunemq_shared.broker.redis_address import parse_address
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.registration import BatchHeader
from tunemq_shared.protocol.result_conditions import TO_THE_END
from tunemq_workers.broker.event_publisher import EventPublisher
from tunemq_workers.broker.publisher_messages import AppendBatches

NODES = 1_250
KEY = redis_keys.events("e000")
TIMES = 4_000


class Server:
    """Measures the server's CPU time."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    def cpu_s(self) -> float:
        """CPU seconds of the server since its start."""
        used = self.redis.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    def commands(self) -> int:
        """Number of commands since the server's start; this call adds one."""
        return int(self.redis.info("stats")["total_commands_processed"])

    def spent(self, action: Callable[[int], object], times: int) -> dict[str, float]:
        """Of one action: microseconds of the server, commands, and microseconds of ours."""
        cpu, commands, ours = self.cpu_s(), self.commands(), time.process_time()
        for number in range(times):
            action(number)
        return {
            "server_us": (self.cpu_s() - cpu) / times * 1e6,
            "commands": round((self.commands() - commands - 2) / times, 2),
            "client_us": (time.process_time() - ours) / times * 1e6,
        }


def batch(number: int, results: int) -> tuple[bytes, bytes]:
    """A batch of events of a node, as its outbox encodes it."""
    events = tuple(
        m.ResultReported(
            trial="e000_00000",
            attempt=1,
            step=step,
            metrics=metrics({"lr": 0.001}, step),
            timestamp=1.7e9,
            time_this_iter_s=30.0,
            time_total_s=30.0 * step,
            time_since_restore=30.0 * step,
            iterations_since_restore=step,
            done=False,
        )
        for step in range(1, results + 1)
    )
    header = BatchHeader(m.PROTOCOL_VERSION, "node00000.1", number * results + 1, (1, 1))
    return m.encode(header), m.encode(events)


def start(number: int) -> StartTrial:
    return StartTrial(
        trial=f"e000_{number:05d}",
        attempt=1,
        instance_id="node00000.1",
        number=number,
        config=pack_config({"lr": 0.001, "layers": 4, "width": 256, "dropout": 0.1}),
        resources={"cpu": 4.0, "gpu": 1.0},
        run_until=TO_THE_END,
        last_step=0,
        restore=(),
    )


def assignment() -> str:
    """The assignment of a node that runs eight trials, of which one is new."""
    plan = plan_of("e000")
    orders = [
        m.TrialOrder(
            f"e000_{number:05d}",
            1,
            TO_THE_END,
            False,
            plan.trial_spec(start(number)) if number == 0 else None,
        )
        for number in range(8)
    ]
    told = m.Assignment(m.PROTOCOL_VERSION, "node00000.1", 1, 7, tuple(orders), ())
    return SchedulerSigning().command("node00000.1", m.encode(told))


def reply(field: str, value: str) -> RedisCommand:
    """The command that sets a field of the scheduler's reply to a node."""
    (command,) = SchedulerSigning().replies(
        [("HSET", redis_keys.reply("node00000.1"), field, value)]
    )
    return command


def measure(redis: Redis, url: str) -> dict[str, object]:
    server = Server(redis)
    publishers = [
        EventPublisher(parse_address(url), f"node{n:05d}.1", lambda _fact: None, lambda: b"x" * 120)
        for n in range(64)
    ]
    for event_publisher in publishers:
        event_publisher.is_hurried, event_publisher.keys = False, (KEY,)
    redis.set(redis_keys.GENERATION, "g")
    redis.set(redis_keys.SCHEDULER, "s")
    redis.xadd(KEY, {"h": "", "e": ""})

    # Turns of the pump's thread, without the thread: it would wait for a second between two.
    def renew(number: int) -> None:
        event_publisher = publishers[number % len(publishers)]
        event_publisher._looked_at = event_publisher._node_metrics_due = float("-inf")  # noqa: SLF001  see above
        event_publisher._turn(None)  # noqa: SLF001  see above

    def append(results: int) -> Callable[[int], None]:
        def act(number: int) -> None:
            publishers[0]._looked_at = time.monotonic() + 100  # noqa: SLF001  see above
            order = AppendBatches(KEY, b"g", (batch(number, results),))
            publishers[0]._turn(order)  # noqa: SLF001  see above

        return act

    leases = server.spent(renew, TIMES)
    appended = {size: server.spent(append(size), TIMES // 4) for size in (1, 10, 100)}
    redis.delete(KEY)
    redis.xadd(KEY, {"h": "", "e": ""})
    before = redis.memory_usage(KEY, samples=0)
    one = server.spent(append(1), 1_000)
    in_memory = (redis.memory_usage(KEY, samples=0) - before) / 1_000
    sent = sum(map(len, batch(1, 1)))
    last = [b"0-0"]

    def read(_number: int) -> None:
        for _, entries in redis.xread({KEY: last[0]}, count=1):
            last[0] = entries[-1][0]

    def release(number: int) -> None:
        pipeline = redis.pipeline(transaction=False)
        pipeline.execute_command(*reply(redis_keys.acknowledged_up_to(KEY), str(number)))
        pipeline.execute_command("XTRIM", KEY, "MINID", "0-1")
        pipeline.execute()

    keys = [redis_keys.lease(f"node{n:05d}.1") for n in range(NODES)]
    for key in keys:
        redis.set(key, "12:1:7")
    publisher, payload = CeleryPublisher(url), assignment()

    def publish(number: int) -> None:
        publisher.publish("node00000.1", f"node00000.1/{number}", payload)
        pipeline = redis.pipeline(transaction=False)
        pipeline.expire(redis_keys.queue("node00000.1"), 60)
        pipeline.execute_command(*reply("v", f"1:{number}"))
        pipeline.rpop(redis_keys.queue("node00000.1"))
        pipeline.execute()

    figures: dict[str, object] = {
        "lease": leases,
        "append": appended,
        "append_one": one,
        "stream_bytes": sent,
        "stream_memory": in_memory,
        "read": server.spent(read, 900),
        "release": server.spent(release, TIMES // 4),
        "look": server.spent(lambda _number: redis.mget(keys), 200),
        "publish": server.spent(publish, TIMES // 4),
        "assignment_bytes": len(payload),
    }
    publisher.close()
    return figures


if __name__ == "__main__":
    # A unix socket's path must be short; the caller has created its folder.
    with redis_server(sys.argv[1]) as redis:
        tell(measure(redis, f"unix://{sys.argv[1]}"))
