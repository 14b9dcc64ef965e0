"""The scheduler does not execute a replayed request, neither soon nor later."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import CODE, ServedApi, served
from tests.support.keys import key_folder, of_scheduler, of_submitter
from tests.support.waiting import eventually
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api import farm_client as client_module
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.api.request_signing import close_request, open_answer
from tunemq_scheduler.security.key_folder import KeyFolder
from tunemq_shared.base.errors import RequestRejected
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r

__all__ = ["server"]

pytestmark = [pytest.mark.security, pytest.mark.integration]


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return key_folder(tmp_path / "keys", "ada")


@pytest.fixture
def api(server: RedisServer, tmp_path: Path, keys: KeyFolder) -> Iterator[ServedApi]:
    with served(server.url, server.client, tmp_path / "results", keys=of_scheduler(keys)) as api:
        yield api


def sent_by_ada(api: ServedApi, ago_s: float = 0.0) -> dict[str, str | bytes]:
    """A captured request that ada sent `ago_s` seconds ago."""
    request, sent = os.urandom(16).hex(), str(int((time.time() - ago_s) * 1000))
    body = msgspec.msgpack.encode(r.SubmitExperiment(name="exp", code=CODE, is_made_up=True))
    signed_message = close_request(
        api.keys.submitter("ada"), body, request=request, kind="submit", sent=sent
    )
    return {
        "v": str(r.REQUESTS_VERSION),
        "id": request,
        "owner": "ada",
        "kind": "submit",
        "sent": sent,
        "body": signed_message,
    }


def answer_to(server: RedisServer, api: ServedApi, fields) -> a.FarmReply:
    """Send the request and return the answer."""
    key = redis_keys.answer(fields["id"])
    server.client.delete(key)
    server.client.xadd(redis_keys.REQUESTS, fields)
    eventually(lambda: server.client.exists(key))
    reply = open_answer(api.keys.submitter("ada"), server.client.get(key), fields["id"])
    return msgspec.msgpack.decode(reply, type=a.FarmReply)


def test_s03_replayed_request_is_answered_again_and_done_once(api, server):
    kept = sent_by_ada(api)
    first = answer_to(server, api, kept)
    assert first.rejection is None
    assert all(answer_to(server, api, kept) == first for _ in range(5))
    assert len(api.queue.all()) == 1


def test_s03_replayed_request_is_not_done_by_the_next_scheduler(server, tmp_path, keys):
    with served(server.url, server.client, tmp_path / "r", keys=of_scheduler(keys)) as api:
        kept = sent_by_ada(api)
        first = answer_to(server, api, kept)
    with served(server.url, server.client, tmp_path / "r", term=8, keys=api.keys) as api:
        assert answer_to(server, api, kept) == first
        assert len(api.queue.all()) == 1


def test_s03_replayed_request_that_expired_is_not_done(api, server):
    """The scheduler has forgotten this request, but the request itself has expired."""
    kept = sent_by_ada(api, ago_s=redis_keys.REQUEST_TTL_S + 1)
    reply = answer_to(server, api, kept)
    assert f"{redis_keys.REQUEST_TTL_S} s is the limit" in reply.rejection.text
    assert api.queue.all() == []
    assert [told[:2] for told in api.rejected] == [("request", "expired")]
    assert answer_to(server, api, sent_by_ada(api, ago_s=60)).rejection is None


def test_s03_request_from_the_future_is_not_done(api, server):
    kept = sent_by_ada(api, ago_s=-redis_keys.CLOCK_TOLERANCE_S - 60)
    assert "ahead" in answer_to(server, api, kept).rejection.text
    assert api.queue.all() == []
    assert [told[:2] for told in api.rejected] == [("request", "early")]


@pytest.mark.parametrize(("off_s", "said"), [(-3600, "36.. s behind"), (3600, "3[56].. s ahead")])
def test_s03_client_with_a_wrong_clock_gets_the_difference(
    api, server, keys, monkeypatch, off_s, said
):
    class Clock:
        """The clock of a machine that is off by an hour."""

        monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

        @staticmethod
        def time() -> float:
            return time.time() + off_s

    monkeypatch.setattr(client_module, "time", Clock)
    with (
        FarmClient(server.url, keys=of_submitter(keys, "ada")) as client,
        pytest.raises(RequestRejected, match=f"{said}.*Set the clock"),
    ):
        client.ask(r.ListExperiments(), a.ExperimentList)


def test_s03_a_request_that_waited_for_its_scheduler_is_done(server, tmp_path, keys, monkeypatch):
    """The client signs the request again at each attempt, so that it does not expire."""
    monkeypatch.setattr(client_module, "_AGAIN_S", 0.2)
    api = ServedApi(server.url, tmp_path / "results", keys=of_scheduler(keys))
    api.announce(server.client)
    with FarmClient(server.url, keys=of_submitter(keys, "ada")) as client:
        found: list[a.ExperimentSubmitted] = []
        submit = r.SubmitExperiment(name="exp", code=CODE)
        thread = threading.Thread(
            target=lambda: found.append(client.ask(submit, a.ExperimentSubmitted))
        )
        thread.start()

        def times() -> set[bytes]:
            return {fields[b"sent"] for _, fields in server.client.xrange(redis_keys.REQUESTS)}

        eventually(lambda: len(times()) > 2)
        with api:
            thread.join(60)
    assert [answer.name for answer in found] == ["exp"]
    assert len(api.queue.all()) == 1
