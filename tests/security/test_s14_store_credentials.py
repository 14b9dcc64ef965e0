"""S14: credentials belong to addresses; the farm's own are sent to none that a submitter names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import Search, farm_service
from tests.support.proxies.counted_proxy import counted
from tests.support.stores.object_servers import ObjectServer, minio_program, running_minio
from tests.support.waiting import need

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server that records received data, then disconnects."""
    heard: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                guest, _ = listening.accept()
            except OSError:
                return
            with guest:
                heard.append(guest.recv(2**16))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
        listening.shutdown(socket.SHUT_RDWR)


def test_s14_submitted_search_that_names_a_strange_store_fails_and_nothing_is_sent(
    tmp_path: Path, stranger: tuple[str, list[bytes]]
):
    place, heard = stranger
    secrets = {
        "AWS_ACCESS_KEY_ID": "canary-key",
        "AWS_SECRET_ACCESS_KEY": "canary-secret",
    }
    with farm_service(tmp_path, starts=False) as farm:
        farm.of_home["head"] = farm.of_home["one"] = secrets
        farm.start_scheduler()
        farm.add_worker("one")
        farm.has_nodes("one")
        for name, field, settings in (
            (
                "other",
                "RunConfig(storage_path)",
                f"storage_path='s3://bucket/x?endpoint=http://{place}',",
            ),
            (
                "bucket",
                "RunConfig(storage_path)",
                f"storage_path='s3://bucket/x?endpoint=http://{place}&profile=farm',",
            ),
            (
                "synced",
                "SyncConfig(upload_dir)",
                f"sync_config=tune.SyncConfig(upload_dir='s3://bucket/x?endpoint=http://{place}'),",
            ),
        ):
            farm.submit(Search(name=name, steps=2, run=settings))
            farm.wait_for(name, "FAILED")
            said = farm.tunemq("show", name)
            assert f"{field} names the store" in said, said
            assert "which this search may not use" in said, said
            assert "stores = " in said
        farm.submit(Search(name="fine", steps=2))
        farm.wait_for("fine", "FINISHED")
    assert heard == []


def _profile(server: ObjectServer, name: str) -> str:
    return (
        f"[{name}]\naws_access_key_id = {server.access_key}\n"
        f"aws_secret_access_key = {server.secret_key}\n"
    )


@pytest.mark.timeout(180)
def test_s14_submitted_search_uses_an_allowed_store_with_the_keys_of_its_profile_alone(
    tmp_path: Path,
):
    need("minio (`make minio` builds it)", minio_program())
    (tmp_path / "farm").mkdir()
    with (
        running_minio(tmp_path / "farms") as farms,
        running_minio(tmp_path / "adas") as adas,
        counted(farms.port) as to_farms,
        counted(adas.port) as to_adas,
        farm_service(tmp_path / "farm", starts=False) as farm,
    ):
        bucket = farms.create_bucket()
        place = f"s3://{adas.create_bucket('adas')}/x?endpoint=http://127.0.0.1:{to_adas.port}"
        for home in ("head", "one", "laptop"):
            folder = farm.folder / home / ".aws"
            folder.mkdir(parents=True)
            (folder / "credentials").write_text(_profile(adas, "ada"))
            farm.of_home[home] = {
                **farms.environ,
                "TUNEMQ_S3_ENDPOINT": f"http://127.0.0.1:{to_farms.port}",
                "LOGNAME": "ada",
            }
        settings = farm.folder / "head" / "farm.toml"
        allowed = f"{{address = '{place}&profile=ada', owners = ['ada']}}"
        settings.write_text(f"stores = [{allowed}, '{place}&profile=nobody']")
        farm.start_scheduler("--store", f"s3://{bucket}/farm")
        farm.add_worker("one")
        farm.has_nodes("one")
        told = (farm.folder / "head" / "scheduler.log").read_text()
        assert "No search can use s3://adas/x: " in told, told
        assert "for the profile 'nobody'" in told, told
        to_farms.signers.clear()  # the scheduler has tried the keys of each profile

        def submit(name: str, address: str, owner: str = "ada") -> None:
            run, policy = f"storage_path={address!r},", "max_storage_failures=0"
            search = Search(name=name, steps=4, run=run, policy=policy)
            script = str(farm.write(search))
            done = farm.run(
                "submit", script, "--name", name, "--detach", variables={"LOGNAME": owner}
            )
            assert done.returncode == 0, done.stderr

        for name, address, owner in (
            ("of-ben", f"{place}&profile=ada", "ben"),
            ("without", place, "ada"),
            ("another", f"{place}&profile=default-2", "ada"),
            ("above", f"{place}&profile=ada".replace("/x?", "?"), "ada"),
        ):
            submit(name, address, owner)
            farm.wait_for(name, "FAILED")
            said = farm.tunemq("show", name)
            assert "RunConfig(storage_path) names the store" in said, said
            assert "which this search may not use" in said, said
            assert ("with profile=ada" in said.partition("may use:")[2]) == (owner == "ada"), said
        assert to_adas.signers == set()

        submit("first", f"{place}&profile=ada")
        farm.wait_for("first", "FINISHED")
        farm.check_results("first")
        kept = f"{place}&profile=ada".replace("/x?", "/x/first?")
        assert " are whole" in farm.tunemq("checkpoints", "verify", kept)
        names = {one.object_name for one in adas.client().list_objects("adas", recursive=True)}
        assert any(name.endswith("manifest.json") for name in names), names
        assert to_adas.signers == {adas.access_key}
        assert to_farms.signers == {farms.access_key}

        (farm.folder / "one" / ".aws" / "credentials").write_text("")
        submit("no-keys", f"{place}&profile=ada")
        farm.wait_for("no-keys", "FINISHED")
        assert "for the profile 'ada'; add them there, or correct profile=" in farm.said()
        assert to_adas.signers == {adas.access_key}
        assert to_farms.signers == {farms.access_key}
