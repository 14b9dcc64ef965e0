"""`tunemq doctor` tries the farm's own store with the keys of each role that it is given."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.farms.examined_farm import ExaminedFarm, farm
from tests.support.stores import store_roles
from tests.support.stores.object_servers import ObjectServer
from tests.support.stores.store_roles import make_roles
from tests.support.waiting import eventually
from tunemq_scheduler.security.doctor import examination
from tunemq_scheduler.security.doctor.examination import DoctorTarget
from tunemq_scheduler.security.findings import FindingLevel
from tunemq_scheduler.security.store_role_probes import StoreKeys, StoreRole, try_store

__all__ = ["farm"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


def test_doctor_with_a_wrong_secret_reports_wrong_keys(farm: ExaminedFarm):
    wrong = {"AWS_SECRET_ACCESS_KEY": "not-the-secret"}
    finding = farm.has_only("store-access", "AWS_SECRET_ACCESS_KEY", variables=wrong)
    assert "wrong keys" in finding.what
    assert "scheduler" in finding.what
    assert "not-the-secret" not in finding.what + finding.fix


def test_doctor_with_a_missing_bucket_reports_no_such_bucket(farm: ExaminedFarm):
    address = farm.server.address("nowhere-here", "farm")
    finding = farm.has_only(
        "store", "mc mb", "nowhere-here", more=("--store", address), variables=farm.server.environ
    )
    assert "no such bucket" in finding.what


def test_doctor_with_keys_that_may_not_write_reports_no_right(farm: ExaminedFarm):
    finding = farm.has_only(
        "store-access", "scheduler-policy.json", variables=farm.role_environ("submitter")
    )
    assert "no right to write" in finding.what


def test_doctor_with_each_role_s_keys_tries_what_that_role_may_do(farm: ExaminedFarm):
    more = [f"--store-keys={role}={farm.store_keys(role)}" for role in ("worker", "submitter")]
    found = farm.examined(*more)
    assert (found.problems, found.warnings) == (0, 0), str(found)
    said = {
        one.what.split("'")[0]: one.what for one in found.findings if one.check == "store-access"
    }
    assert said.keys() == {"the scheduler", "the worker", "the submitter"}
    assert "may not remove" in said["the worker"]
    assert "may not remove" in said["the submitter"]
    assert "remove" in said["the scheduler"]
    assert "may not" not in said["the scheduler"]
    left = farm.server.client().list_objects(farm.bucket, recursive=True)
    assert not [one.object_name for one in left if "tunemq-probe" in str(one.object_name)]


def test_s07_doctor_with_a_policy_of_an_earlier_version_names_the_journals_that_it_lets_forge(
    minio, bucket, monkeypatch
):
    shipped = store_roles.policy

    def of_an_earlier_version(role: str, *where: str) -> dict[str, Any]:
        found = shipped(role, *where)
        if role == "worker":
            allowed, denied = found["Statement"][1:3]
            place = denied["Resource"][0].removesuffix("/blobs/*")
            allowed["Resource"] = [f"{place}/*/*/*"]
            denied["Resource"] = [f"{place}/*/journal/??????/*", f"{place}/*/journal/*.turns"]
        return found

    address, every = minio.address(bucket, "farm"), (StoreRole.SCHEDULER, StoreRole.WORKER)
    monkeypatch.setattr(store_roles, "policy", of_an_earlier_version)
    roles = make_roles(minio, bucket)
    found = try_store(address, [StoreKeys(role, roles[role]) for role in every])
    (finding,) = [one for one in found if one.level is not FindingLevel.OK]
    assert finding.level is FindingLevel.PROBLEM
    taken = finding.what.partition("as its own: ")[2].split(", ")
    assert taken == [
        *("search/journal/0000009/ready", "search/journal/1000000/ready"),
        *("search/journal/9/ready", "search/journal/other", "search/tuner.pkl"),
        *("team/search/tuner.pkl", "parts/tuner.pkl/part"),
        *("search/trial/result.json", "search/trial/progress.csv"),
    ]
    assert "worker-policy.json" in finding.fix
    assert not list(minio.client().list_objects(bucket, recursive=True))
    monkeypatch.undo()
    roles = make_roles(minio, bucket)
    found = try_store(address, [StoreKeys(role, roles[role]) for role in every])
    assert {one.level for one in found} == {FindingLevel.OK}


@pytest.mark.parametrize("role", ["worker", "submitter"])
def test_doctor_with_a_wrong_secret_of_another_role_names_that_role(farm: ExaminedFarm, role: str):
    file = farm.store_keys(role, secret="not-the-secret")
    finding = farm.has_only("store-access", str(file), more=(f"--store-keys={role}={file}",))
    assert "wrong keys" in finding.what
    assert role in finding.what


def test_doctor_with_a_file_without_keys_of_another_role_names_the_file(
    farm: ExaminedFarm, tmp_path: Path
):
    file = tmp_path / "empty.credentials"
    file.write_text("")
    finding = farm.has_only("store-access", str(file), more=(f"--store-keys=worker={file}",))
    assert "no keys: the worker's" in finding.what


@pytest.mark.parametrize("role", ["worker", "submitter"])
@pytest.mark.parametrize("user", ["scheduler", "root"])
def test_doctor_with_a_role_s_keys_that_may_do_everything_reports_forged_journals(
    farm: ExaminedFarm, role: str, user: str
):
    """All roles have the scheduler's keys, or the server's own."""
    of_root = farm.server.environ if user == "root" else None
    file = farm.store_keys("scheduler", keys=of_root)
    found = farm.examined(f"--store-keys={role}={file}")
    removes, forges = found.of("store-access")
    assert (removes.level, forges.level) == (FindingLevel.WARNING, FindingLevel.PROBLEM), str(found)
    assert f"the {role}'s keys may remove" in removes.what
    assert "search/journal/000001/ready" in forges.what
    assert "search/tuner.pkl" in forges.what
    assert f"{role}-policy.json" in forges.fix
    left = farm.server.client().list_objects(farm.bucket, recursive=True)
    assert not [one.object_name for one in left if "tunemq-probe" in str(one.object_name)]


@pytest.mark.parametrize("given", ["worker", "cook=/tmp/x", "worker=/nowhere/credentials"])
def test_doctor_with_store_keys_that_name_no_role_or_file_ends_with_2(
    farm: ExaminedFarm, given: str
):
    done = farm.doctor(f"--store-keys={given}")
    assert done.returncode == 2, done
    assert "--store-keys" in done.stderr


def test_doctor_without_the_scheduler_takes_the_store_from_its_options(farm: ExaminedFarm):
    """A head whose scheduler ended because its store is down."""
    variables = {
        "TUNEMQ_SCHEDULER_OPTIONS": "--metrics 127.0.0.1:0 --store s3://a-b/c?endpoint=http://127.0.0.1:1"
    }
    found = farm.examined("--redis", f"{farm.redis.url[:-1]}5", variables=variables)
    (store,) = found.of("store")
    assert store.level is FindingLevel.PROBLEM
    assert "store unreachable" in store.what
    (scheduler,) = found.of("scheduler")
    assert scheduler.level is FindingLevel.PROBLEM


def test_doctor_with_a_folder_that_cannot_be_written_reports_it(farm: ExaminedFarm, tmp_path: Path):
    store = tmp_path / "store"
    store.write_text("a file, where a folder has to be")
    found = farm.examined("--store", str(store / "farm"))
    (finding,) = found.of("store")
    assert finding.level is FindingLevel.PROBLEM
    assert [one.check for one in found.findings if one.fix] == ["store", "results-disk"]
    assert "cannot be written: Not a directory" in finding.what
    assert str(store) in finding.what


def test_doctor_with_a_folder_as_store_writes_reads_and_removes_there(
    farm: ExaminedFarm, tmp_path: Path
):
    found = farm.examined("--store", str(tmp_path))
    assert not found.problems, str(found)
    (store,) = (one.what for one in found.findings if one.check == "store")
    assert "a test file was written there and removed" in store
    assert not list(tmp_path.iterdir())


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of a server that accepts, and sends a byte a second of an answer without an end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        is_over = threading.Event()

        def answer(guest: socket.socket) -> None:
            with guest:
                try:
                    guest.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
                    while not is_over.wait(1.0):
                        guest.sendall(b"x")
                except OSError:
                    pass  # it has hung up

        def serve() -> None:
            while True:
                try:
                    guest, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(guest,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        is_over.set()
        listening.shutdown(socket.SHUT_RDWR)


def test_doctor_with_a_store_that_never_ends_its_answer_reports_it_in_time(
    mute: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(examination, "_STORE_S", 3.0)
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    farm = DoctorTarget(
        url="redis://127.0.0.1:1",
        keys="",
        store="",
        results=str(tmp_path),
        results_if_unknown="",
        environ=keys,
    )
    (finding,) = examination.check_store(f"s3://tunemq/farm?endpoint=http://127.0.0.1:{mute}", farm)
    assert (finding.check, finding.level) == ("store", FindingLevel.PROBLEM)
    assert "store unreachable" in finding.what


def test_doctor_with_a_silent_node_reports_it(farm: ExaminedFarm):
    with farm.worker("frozen") as process:
        farm.has_nodes("frozen", "one")
        process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: farm.nodes()["frozen"].state == "silent", within=120)
            found = farm.examined()
        finally:
            process.send_signal(signal.SIGCONT)
    silent = [one for one in found.of("nodes") if "frozen" in one.what]
    assert [one.level for one in silent] == [FindingLevel.PROBLEM], str(found)
    assert "tunemq worker" in silent[0].fix


def test_a_served_folder_is_tried_with_its_keys(shared_served: ObjectServer):
    bucket = shared_served.create_bucket()
    address = shared_served.address(bucket, "farm")
    keys = StoreKeys(StoreRole.SCHEDULER, shared_served.environ)
    (finding,) = try_store(address, [keys])
    assert finding.level is FindingLevel.OK, finding
    wrong = StoreKeys(
        StoreRole.SCHEDULER, {**shared_served.environ, "AWS_SECRET_ACCESS_KEY": "another"}
    )
    (finding,) = try_store(address, [wrong])
    assert (finding.check, finding.level) == ("store-access", FindingLevel.PROBLEM)
    assert "wrong keys" in finding.what
    with shared_served.objects(bucket) as objects:
        assert not list(objects.list())


def test_keys_of_a_served_folder_given_to_workers_are_reported_as_unrestricted(
    shared_served: ObjectServer,
):
    address = shared_served.address(shared_served.create_bucket(), "farm")
    every = [StoreKeys(role, shared_served.environ) for role in StoreRole]
    found = [one for one in try_store(address, every) if one.level is not FindingLevel.OK]
    told = " ".join(one.what for one in found)
    assert "the worker's keys may remove objects" in told
    assert "the worker's keys may write" in told
    assert "the submitter's keys may write" in told
