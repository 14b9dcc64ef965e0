"""A bare Celery worker: each task appends one entry to a stream as its answer to the sender."""

from __future__ import annotations

import sys

from celery import Celery
from redis import Redis

SOCKET, ANSWERS = sys.argv[1], "answers"

app = Celery("bare", broker=f"redis+socket://{SOCKET}")
app.conf.update(
    task_ignore_result=True,
    accept_content=["json"],
    task_default_queue="bare",
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=False,
)
redis = Redis(unix_socket_path=SOCKET)


@app.task(name="answer")
def answer(payload: str) -> None:
    redis.xadd(ANSWERS, {"p": payload})


if __name__ == "__main__":
    app.Worker(
        pool="solo",
        loglevel="ERROR",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    ).start()
