"""The cost of each part alone, on this machine, now; prints it as a line of JSON."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import celery_worker
from measured import tell
from redis import Redis
from redis.exceptions import ConnectionError as RedisIsAway

from tunemq_scheduler.embedded.redis_command import find_redis_server, redis_command

PAYLOAD = "x" * 300


@contextmanager
def redis_server(socket: str) -> Iterator[Redis]:
    with subprocess.Popen(
        redis_command(find_redis_server(), socket), stdout=subprocess.DEVNULL
    ) as process:
        client = Redis(unix_socket_path=socket, socket_timeout=30)
        while True:
            try:
                client.ping()
                break
            except RedisIsAway:
                time.sleep(0.01)
        try:
            yield client
        finally:
            process.terminate()


def celery_round_trip(redis: Redis, trips: int) -> float:
    """Milliseconds for a task there and an entry of a stream back, one after another."""
    worker = str(Path(__file__).with_name("celery_worker.py"))
    with subprocess.Popen([sys.executable, worker, celery_worker.SOCKET]) as process:
        last = b"0-0"

        def trip() -> None:
            nonlocal last
            celery_worker.answer.delay(PAYLOAD)
            answer: Any = redis.xread({celery_worker.ANSWERS: last}, block=20_000)
            last = answer[0][1][0][0]

        try:
            trip()
            return milliseconds(trip, trips)
        finally:
            process.terminate()


def redis_round_trip(redis: Redis) -> float:
    return milliseconds(redis.ping, 2_000)


def xadds_a_second(redis: Redis) -> float:
    """Entries a second, sent in pipelines of 1,000."""
    rounds = 10

    def add() -> None:
        pipeline = redis.pipeline(transaction=False)
        for _ in range(1_000):
            pipeline.xadd("floor", {"p": PAYLOAD}, maxlen=10_000)
        pipeline.execute()

    return 1e6 / milliseconds(add, rounds)


def fork_and_exit() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def durable_write(folder: str) -> float:
    """Milliseconds to append 4 KiB to a file and have them on the disk."""
    descriptor = os.open(os.path.join(folder, "file"), os.O_CREAT | os.O_WRONLY)

    def write() -> None:
        os.write(descriptor, b"x" * 4096)
        os.fdatasync(descriptor)

    try:
        return milliseconds(write, 200)
    finally:
        os.close(descriptor)


def milliseconds(action: Any, times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return median(taken) * 1_000


def measure(folder: str, trips: int) -> dict[str, float]:
    with redis_server(celery_worker.SOCKET) as redis:
        return {
            "celery_round_trip_ms": celery_round_trip(redis, trips),
            "redis_round_trip_ms": redis_round_trip(redis),
            "xadds_per_s": xadds_a_second(redis),
            "fork_ms": milliseconds(fork_and_exit, 200),
            "durable_write_ms": durable_write(folder),
        }


if __name__ == "__main__":
    # A unix socket's path must be short; the caller has created its folder.
    tell(measure(os.path.dirname(celery_worker.SOCKET), trips=int(sys.argv[2])))
