"""S04: a failure is data: no process raises it, and none reads a result backend."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer, order
from tests.integration.node_fixtures import server
from tests.security.signed_farm import KEY, SignedTransport, SignedWorker
from tests.support.waiting import eventually
from tunemq_scheduler.transport.redis.celery_publisher import CeleryPublisher
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.protocol import messages as m
from tunemq_workers.broker.celery_consumer import make_app

__all__ = ["server"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def transport(server: RedisServer, tmp_path: Path) -> Iterator[SignedTransport]:
    transport = SignedTransport(server, tmp_path)
    yield transport
    transport.close()


def gadget(path: Path) -> dict[str, object]:
    """As Celery's result backend keeps a failure: the class is looked up, and called."""
    return {
        "status": "FAILURE",
        "result": {
            "exc_type": "touch",
            "exc_module": "pathlib.Path",
            "exc_message": [str(path)],
        },
        "traceback": "forged",
        "children": [],
    }


def one_step(config):
    from tunemq_shared.trial.session import report

    report({"loss": 0.5})


def test_s04_scheduler_and_worker_have_no_result_backend(server):
    consumers = make_app(server.url, "queue", lambda _: None)
    publishers = CeleryPublisher(server.url)
    for app in (consumers, publishers._app):
        assert type(app.backend).__name__ == "DisabledBackend"
        assert app.conf.task_ignore_result
        assert app.conf.accept_content == ["json"]
        assert not app.conf.worker_send_task_events
    assert not consumers.conf.worker_enable_remote_control
    publishers.close()


def test_s04_forged_failure_in_a_result_backend_is_not_read(server, tmp_path):
    worker = SignedWorker(server, tmp_path)
    try:
        scheduler, instance_id = worker.scheduler, worker.registered()
        touched = tmp_path / "touched"
        key = f"celery-task-meta-{instance_id}/1:1"
        forged = json.dumps(gadget(touched))
        scheduler.client.set(key, forged)
        scheduler.assign(instance_id, order("t", scheduler.start(one_step)))
        eventually(lambda: scheduler.said(m.SlotFreed), within=60, message=lambda: worker.said)
        assert not scheduler.said(m.TrialFailed)
        assert scheduler.client.get(key).decode() == forged
        assert scheduler.client.keys("celery*") == [key.encode()]
        assert not touched.exists()
    finally:
        worker.kill()


def test_s04_failure_of_a_trial_is_kept_as_text_and_loads_nothing(transport, server, tmp_path):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    before = set(sys.modules)
    kind, error = "antigravity.Error", json.dumps(gadget(tmp_path / "touched"))
    said = m.TrialFailed("t1", 1, kind, error, "no traceback", 1.0)
    transport.stranger("inc1").send(KEY, said)
    node.send(KEY, said)
    transport.until(lambda: transport.said(m.TrialFailed))
    assert transport.said(m.TrialFailed) == [said]
    assert transport.counted() == {("events", "unknown_key"): 1}
    assert "antigravity" not in set(sys.modules) - before
    assert not (tmp_path / "touched").exists()
    assert not server.client.keys("celery*")
    assert not server.client.exists(names.queue("inc1"))
