"""Requests through a real Redis: each is done once, answered, and bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import CODE, ServedApi, detail, served
from tests.support.farms.farm_processes import fail_to_save
from tests.support.waiting import eventually
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api import farm_client as client_module
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.api.request_signing import open_answer
from tunemq_scheduler.farm.monitoring.farm_announcement import announcing
from tunemq_shared.base.errors import (
    ConfigError,
    NoScheduler,
    RedisUnavailable,
    RequestRejected,
    SchedulerSuperseded,
)
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.signing.message_signing import MessageSigner

__all__ = ["server"]

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send each request once: a machine that sleeps for two seconds would leave a second one."""
    monkeypatch.setattr(client_module, "_AGAIN_S", 600.0)


@pytest.fixture
def api(server: RedisServer, tmp_path: Path) -> Iterator[ServedApi]:
    with served(server.url, server.client, tmp_path) as api:
        yield api


@pytest.fixture
def client(server: RedisServer) -> Iterator[FarmClient]:
    with FarmClient(server.url, owner="ann", timeout_s=60) as client:
        yield client


def submit(name="exp", **fields):
    return r.SubmitExperiment(name=name, code=CODE, **fields)


def send(server: RedisServer, request_id: str = "0" * 32, **changes):
    fields = {
        "v": str(r.REQUESTS_VERSION),
        "id": request_id,
        "owner": "ann",
        "kind": "ls",
        "body": msgspec.msgpack.encode(r.ListExperiments()),
        **changes,
    }
    fields["body"] = MessageSigner("").close(fields["body"])
    server.client.xadd(redis_keys.REQUESTS, fields)
    found = []
    eventually(lambda: found.append(server.client.get(redis_keys.answer(request_id))) or found[-1])
    return msgspec.msgpack.decode(
        open_answer(MessageSigner(""), found[-1], request_id), type=a.FarmReply
    )


def test_an_experiment_is_queued_and_listed(api, client):
    submitted = client.ask(submit(priority=3), a.ExperimentSubmitted)
    (row,) = client.ask(r.ListExperiments(), a.ExperimentList).experiments

    assert (submitted.name, submitted.ahead) == ("exp", 0)
    assert (row.name, row.owner, row.priority, row.state) == ("exp", "ann", 3, State.QUEUED)
    assert row.id == submitted.id


def test_answered_request_leaves_no_keys_in_redis(api, client, server):
    client.ask(submit(), a.ExperimentSubmitted)
    client.ask(r.ListExperiments(), a.ExperimentList)

    eventually(lambda: not server.client.keys("tunemq:answer:*"))
    assert server.client.xlen(redis_keys.REQUESTS) == 0


def test_request_sent_twice_is_done_once_and_answered_again(api, server):
    body = msgspec.msgpack.encode(submit(is_made_up=True))
    first = send(server, kind="submit", body=body)
    server.client.delete(redis_keys.answer("0" * 32))
    again = send(server, kind="submit", body=body)

    assert again == first
    assert [entry.name for entry in api.queue.all()] == ["exp"]


def test_request_done_by_the_previous_scheduler_is_not_repeated(server, tmp_path):
    body = msgspec.msgpack.encode(submit(is_made_up=True))
    with served(server.url, server.client, tmp_path):
        first = send(server, kind="submit", body=body)
    server.client.delete(redis_keys.answer("0" * 32))
    with served(server.url, server.client, tmp_path, term=8) as api:
        assert send(server, kind="submit", body=body) == first
        assert len(api.queue.all()) == 1


def test_forgotten_submission_is_recognized_by_its_request(server, tmp_path):
    body = msgspec.msgpack.encode(submit(is_made_up=True))
    with served(server.url, server.client, tmp_path):
        send(server, kind="submit", body=body)
    server.client.delete(redis_keys.answer("0" * 32))
    (tmp_path / ".farm" / "requests").unlink()
    with served(server.url, server.client, tmp_path, term=8) as api:
        send(server, kind="submit", body=body)
        assert len(api.queue.all()) == 1


def test_an_answer_that_comes_later_is_waited_for(api, client):
    client.ask(submit(), a.ExperimentSubmitted)
    api.run("exp")
    api.experiments.answers_later = True
    found = []
    asking = threading.Thread(
        target=lambda: found.append(client.ask(r.ShowExperiment(name="exp"), a.ExperimentDetail))
    )
    asking.start()
    eventually(lambda: api.experiments.owed)
    with api.lock:
        api.experiments.owed[0].resolve(detail("exp", ("aaaaa_00000",)))
    asking.join(60)

    (detail_found,) = found
    assert detail_found.experiment.owner == "ann"
    assert detail_found.experiment.state is State.RUNNING
    assert detail_found.folder == str(api.folder / "exp")


def test_unresponsive_experiment_is_reported(api, client, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.farm.service.request_server._TIMEOUT_S", 0.05)
    client.ask(submit(), a.ExperimentSubmitted)
    api.run("exp")
    api.experiments.answers_later = True
    with pytest.raises(RequestRejected, match="does not answer"):
        client.ask(r.ShowExperiment(name="exp"), a.ExperimentDetail)


def test_unknown_name_is_wrong_use_and_similar_names_are_listed(api, client):
    client.ask(submit("digits"), a.ExperimentSubmitted)
    with pytest.raises(
        ConfigError, match="the experiment 'digit' does not exist; did you mean digits"
    ):
        client.ask(r.ShowExperiment(name="digit"), a.ExperimentDetail)
    with pytest.raises(
        ConfigError, match="the node 'gamma' does not exist; it can be: alpha, beta"
    ):
        client.ask(r.DrainNode(node="gamma"), a.RequestDone)


def test_taken_name_is_refused_and_generated_name_gets_a_number(api, client):
    client.ask(submit(), a.ExperimentSubmitted)
    with pytest.raises(ConfigError, match="the experiment exp exists already, and is QUEUED"):
        client.ask(submit(), a.ExperimentSubmitted)
    assert client.ask(submit(is_made_up=True), a.ExperimentSubmitted).name == "exp_2"
    (api.folder / "old").mkdir()
    with pytest.raises(ConfigError, match="this farm does not know"):
        client.ask(submit("old"), a.ExperimentSubmitted)


def test_requests_pause_resume_stop_and_remove_an_experiment(api, client):
    client.ask(submit(), a.ExperimentSubmitted)

    def ask(request):
        return client.ask(request, a.RequestDone)

    assert ask(r.PauseExperiment(name="exp")).state is State.PAUSED
    assert ask(r.ResumeExperiment(name="exp")).state is State.QUEUED
    api.run("exp")
    assert ask(r.PauseExperiment(name="exp")).state is State.PAUSED
    assert ask(r.ResumeExperiment(name="exp")).state is State.RUNNING
    assert ask(r.StopExperiment(name="exp", trial="aaaaa_00001")).state is None
    with pytest.raises(RequestRejected, match="stop it first"):
        ask(r.RemoveExperiment(name="exp"))
    assert ask(r.StopExperiment(name="exp")).state is State.STOPPING
    assert "already" in ask(r.StopExperiment(name="exp")).text
    with pytest.raises(RequestRejected, match="is STOPPING and cannot be paused"):
        ask(r.PauseExperiment(name="exp"))
    api.end("exp", State.STOPPED, "stopped by ann")
    assert ask(r.RetryTrials(name="exp")).state is State.QUEUED
    assert api.queue.get("exp").retry == "*"
    assert ask(r.StopExperiment(name="exp")).state is State.STOPPED
    ask(r.RemoveExperiment(name="exp", with_files=True))

    assert api.queue.all() == []
    assert [told[0] for told in api.experiments.told] == [
        *("pause", "resume", "stop_trial", "stop", "stop_again", "remove_files", "forget"),
    ]
    assert api.experiments.told[3] == ("stop", "exp", "stopped by ann")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "dance"}, "does not know the request 'dance'"),
        ({"body": b"\xc1"}, "the request 'ls' cannot be read"),
        ({"kind": "show"}, "the request 'show' cannot be read"),
        (
            {"body": b"x" * (r.MAX_REQUEST_BYTES + 1)},
            f"more than the limit of {r.MAX_REQUEST_BYTES} bytes",
        ),
        ({"owner": "../x\n"}, "the owner"),
    ],
)
def test_malformed_request_is_answered_with_the_reason(api, server, changes, told):
    reply = send(server, **changes)
    assert told in reply.rejection.text
    assert send(server, "1" * 32).rejection is None


def test_request_of_another_version_is_answered_in_a_form_all_versions_read(api, server):
    server.client.xadd(
        redis_keys.REQUESTS, {"v": "9", "tunemq": "8.8", "id": "3" * 32, "kind": "ls"}
    )
    eventually(lambda: server.client.get(redis_keys.answer("3" * 32)))
    reply = msgspec.msgpack.decode(server.client.get(redis_keys.answer("3" * 32)), type=a.FarmReply)
    assert reply.version == r.REQUESTS_VERSION
    assert "version 2, and this is one of version 9 (TuneMQ 8.8)" in reply.rejection.text


def test_malformed_entries_in_the_request_stream_are_removed(api, client, server):
    server.client.xadd(redis_keys.REQUESTS, {"x": "y"})
    server.client.xadd(redis_keys.REQUESTS, {"id": "../../x"})
    client.ask(submit(), a.ExperimentSubmitted)
    assert server.client.xlen(redis_keys.REQUESTS) == 0


def test_handler_bug_is_reported_and_the_next_request_is_done(api, client, capfd):
    api.nodes.rows = lambda: 1 / 0
    with pytest.raises(RequestRejected, match="ZeroDivisionError"):
        client.ask(r.ListNodes(), a.NodeList)
    client.ask(submit(), a.ExperimentSubmitted)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_answer_that_cannot_be_written_is_refused_and_the_next_request_is_done(api, client, capfd):
    (row, *_others) = api.nodes.rows()
    api.nodes.rows = lambda: (msgspec.structs.replace(row, rejected=2**70),)
    with pytest.raises(RequestRejected, match="OverflowError"):
        client.ask(r.ListNodes(), a.NodeList)
    client.ask(submit(), a.ExperimentSubmitted)
    assert "Traceback" in capfd.readouterr().err


def test_farm_without_scheduler_is_an_error_that_names_the_start_command(server, client):
    with pytest.raises(NoScheduler, match="tunemq scheduler --redis"):
        client.ask(submit(), a.ExperimentSubmitted)
    assert server.client.xlen(redis_keys.REQUESTS) == 0


def test_scheduler_without_announcement_takes_no_requests(server, client, tmp_path):
    server.client.set(redis_keys.SCHEDULER, "8:token:0:{}")
    server.client.execute_command(*announcing(7))
    with pytest.raises(NoScheduler, match="no scheduler runs"):
        client.farm()


def test_request_without_answer_is_withdrawn(server, tmp_path):
    served_api = ServedApi(server.url, tmp_path)
    served_api.announce(server.client)
    with (
        FarmClient(server.url, owner="ann", timeout_s=0.2) as client,
        pytest.raises(NoScheduler, match="withdrawn, so nothing changed"),
    ):
        client.ask(submit(), a.ExperimentSubmitted)

    assert server.client.xlen(redis_keys.REQUESTS) == 0


def test_expired_request_is_not_done(server, tmp_path):
    seconds, _ = server.client.time()
    body = MessageSigner("").close(msgspec.msgpack.encode(submit()))
    fields = {
        "v": str(r.REQUESTS_VERSION),
        "id": "2" * 32,
        "owner": "ann",
        "kind": "submit",
        "body": body,
    }
    server.client.xadd(redis_keys.REQUESTS, fields, id=f"{(seconds - 3600) * 1000}-0")
    with served(server.url, server.client, tmp_path) as api:
        eventually(lambda: server.client.xlen(redis_keys.REQUESTS) == 0)
        turns = api.turns
        eventually(lambda: api.turns > turns + 3)
        assert api.queue.all() == []


def test_superseded_scheduler_takes_no_requests(server, tmp_path):
    api = ServedApi(server.url, tmp_path, term=7)
    server.client.set(redis_keys.TERM, 8)
    server.client.xadd(redis_keys.REQUESTS, {"x": "y"})

    def is_superseded():
        try:
            api.server.turn()
        except SchedulerSuperseded:
            return True
        return False

    eventually(is_superseded)
    api.server.close()
    assert server.client.xlen(redis_keys.REQUESTS) == 1


def test_a_client_waits_for_a_redis_that_was_killed_and_a_scheduler_that_reconnects(
    api, client, server, monkeypatch
):
    client.ask(submit(), a.ExperimentSubmitted)
    server.kill()
    with pytest.raises(RedisUnavailable):
        client.ask(r.ListExperiments(), a.ExperimentList)
    server.start()
    api.announce(server.client)
    eventually(lambda: api.server.fileno() is not None)

    assert len(client.ask(r.ListExperiments(), a.ExperimentList).experiments) == 1


def test_a_redis_that_refuses_is_asked_again_later(server, tmp_path, client, capfd):
    server.client.execute_command("ACL", "SETUSER", "default", "-xread")
    with served(server.url, server.client, tmp_path) as api:
        said = ""

        def is_reported() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "requests wait" in said

        eventually(is_reported)
        server.client.execute_command("ACL", "SETUSER", "default", "+xread")
        eventually(lambda: api.server.fileno() is not None)
        reading: list[str] = []

        def is_read() -> bool:
            reading[:] = [one["id"] for one in server.client.client_list() if one["cmd"] == "xread"]
            return bool(reading)

        eventually(is_read)  # it was sent, but may not have arrived yet
        server.client.client_unblock(reading[0], error=True)

        assert client.ask(submit(), a.ExperimentSubmitted).name == "exp"
    assert said.count("no permission") == 1


def test_a_request_is_sent_again_after_redis_lost_it(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_AGAIN_S", 0.1)
    api = ServedApi(server.url, tmp_path)
    api.announce(server.client)
    found = []

    def ask():
        with FarmClient(server.url, owner="ann") as client:
            found.append(client.ask(submit(), a.ExperimentSubmitted))

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: server.client.xlen(redis_keys.REQUESTS))
    server.client.flushall()
    api.announce(server.client)
    with api:
        asking.join(60)
    assert [answer.name for answer in found] == ["exp"]


def test_another_version_of_the_scheduler_is_named(api, client, server):
    server.client.execute_command(*announcing(api.term))
    found = msgspec.json.decode(server.client.get(redis_keys.FARM))
    server.client.set(
        redis_keys.FARM, msgspec.json.encode({**found, "version": 5, "tunemq": "9.9"})
    )
    with pytest.raises(RequestRejected, match=r"TuneMQ 9\.9\) speaks version 5"):
        client.farm()


def test_farm_announces_the_address_of_its_store(api, client):
    assert client.farm().store == str(api.folder / "store")


def test_a_hundred_requests_at_once_are_all_answered(api, server):
    found = []

    def ask(number):
        with FarmClient(server.url, owner=f"user{number}") as client:
            found.extend(
                client.ask(submit(f"e{number}-{index}"), a.ExperimentSubmitted)
                for index in range(10)
            )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(api.queue.all()) == 100
    assert len({answer.id for answer in found}) == 100
    assert time.monotonic() - begun < 60


@pytest.fixture(params=["full", "without a disk"])
def refusing(server: RedisServer, request: pytest.FixtureRequest) -> str:
    """Return the pattern of the error message for a Redis that rejects writes."""
    if request.param == "full":
        server.client.config_set("maxmemory", "500000")
        return r"is full.*CONFIG SET maxmemory"
    fail_to_save(server.client)
    return r"cannot write to its disk.*MISCONF.*make room on the disk"


def test_client_of_a_redis_that_refuses_writes_reports_that_and_no_missing_scheduler(
    client, server, refusing
):
    with pytest.raises(RedisUnavailable, match=refusing):  # no lease can be renewed there
        client.farm()
    assert not server.client.exists(redis_keys.REQUESTS)


def test_client_reports_at_once_that_redis_refuses_writes_while_a_lease_exists(
    api, client, server, refusing
):
    began = time.monotonic()
    with pytest.raises(RedisUnavailable, match=refusing):
        client.ask(submit(), a.ExperimentSubmitted)
    assert time.monotonic() < began + 20
    assert api.queue.all() == []
