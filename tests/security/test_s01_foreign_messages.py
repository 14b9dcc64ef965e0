"""S01: a worker does not decode foreign messages in its queue, and they block nothing."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
from pathlib import Path

import pytest

from tests.integration.farm_support import order
from tests.integration.node_fixtures import server
from tests.security.signed_farm import worker
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import TrialFinished

__all__ = ["server", "worker"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


def one_step(config):
    from tunemq_shared.trial.session import report

    report({"loss": 0.5})


class Gadget:
    """An object that touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def message(body: bytes, content_type: str, encoding: str, **headers: object) -> str:
    properties = {
        "body_encoding": "base64",
        "delivery_tag": "tag",
        "delivery_info": {"exchange": "", "routing_key": "q"},
    }
    return json.dumps({
        "body": base64.b64encode(body).decode(),
        "content-type": content_type,
        "content-encoding": encoding,
        "headers": {"task": redis_keys.TASK, "id": "1", **headers},
        "properties": properties,
    })  # fmt: skip


def foreign_messages(gadget: Gadget) -> list[str]:
    pickled = pickle.dumps(((gadget,), {}, {}))
    task = json.dumps([["payload"], {}, {}]).encode()
    chained = {
        "chain": [{"task": redis_keys.TASK, "args": ["payload"], "options": {"queue": "stolen"}}]
    }
    yaml = f"!!python/object/apply:pathlib.Path.touch [{gadget.path}]".encode()
    return [
        message(pickled, "application/x-python-serialize", "binary"),
        message(pickled, "application/data", "binary", serializer="pickle"),
        message(pickled, "application/json", "utf-8"),
        message(yaml, "application/x-yaml", "utf-8"),
        message(gzip.compress(bytes(2**20)), "application/json", "utf-8", compression="gzip"),
        message(task, "application/json", "utf-8", eta="2099-01-01T00:00:00"),
        message(task, "application/json", "utf-8", task="celery.backend_cleanup"),
        message(json.dumps([["payload"], {}, chained]).encode(), "application/json", "utf-8"),
        "[" * 200_000,
        '{"body": 1}',
        "nonsense",
    ]


def test_s01_foreign_messages_and_pickles_are_rejected_and_delay_nothing(worker, tmp_path):
    scheduler, instance_id = worker.scheduler, worker.registered()
    gadget = Gadget(tmp_path / "unpickled")
    foreign = foreign_messages(gadget)
    scheduler.client.lpush(redis_keys.queue(instance_id), *foreign)
    scheduler.assign(instance_id, order("t", scheduler.start(one_step)))

    eventually(lambda: scheduler.said(TrialFinished), within=60, message=lambda: worker.said)
    worker.rejected(command__unreadable=len(foreign))
    assert not gadget.path.exists()
    assert not scheduler.client.exists("stolen")
    assert "consumer.died" not in (tmp_path / "work" / "logs" / "node.log").read_text()
    worker.says("is no task of ours")  # after the message to Redis
    assert worker.said.count("is no task of ours") == 1


def test_s15_message_longer_than_any_assignment_is_rejected_unread(worker):
    scheduler, instance_id = worker.scheduler, worker.registered()
    scheduler.client.lpush(redis_keys.queue(instance_id), b"[" * (50 * 2**20))
    scheduler.assign(instance_id, order("t", scheduler.start(one_step)))

    eventually(lambda: scheduler.said(TrialFinished), within=60, message=lambda: worker.said)
    worker.rejected(command__oversized=1)
