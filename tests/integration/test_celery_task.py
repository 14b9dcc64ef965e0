"""The executor sends plain Celery tasks."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_celery_executor import PLAN, START, executor, farm, joined, node
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

__all__ = ["executor", "farm", "joined", "node"]

pytestmark = pytest.mark.integration

CELERY_WORKER = """
import sys
from celery import Celery
from kombu import Exchange, Queue
url, queue, path = sys.argv[1:]
app = Celery("worker", broker=url, set_as_current=False)
name = Queue(queue, exchange=Exchange("", no_declare=True), routing_key=queue, no_declare=True)
app.conf.update(
    task_queues=[name], accept_content=["json"], worker_enable_remote_control=False,
    task_ignore_result=True, broker_connection_retry_on_startup=True,
)

@app.task(name="tunemq.run_steps")
def run_steps(payload):
    with open(path, "a") as heard:
        heard.write(payload + "\\n")

app.worker_main(["worker", "--pool=solo", "--without-mingle", "--without-gossip", "-l", "ERROR"])
"""


def test_any_celery_worker_understands_the_task(executor, joined, farm, tmp_path: Path):
    heard = tmp_path / "heard"
    url = f"redis+socket://{farm.url.removeprefix('unix://')}"
    worker = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            CELERY_WORKER,
            url,
            redis_keys.queue("inc1"),
            str(heard),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        executor.perform([START])
        eventually(lambda: heard.exists() and heard.read_text().endswith("\n"))
    finally:
        worker.kill()
        worker.wait()

    signed_message = base64.b64decode(heard.read_text())
    assignment = m.decode_assignment(joined.keys.orders.open(signed_message, b"command", b"inc1"))
    assert assignment.orders[0].start == PLAN.trial_spec(START)
