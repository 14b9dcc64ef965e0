"""A farm as shipped: TLS, and a user with the least rights for each role."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search
from tests.support.farms.secured_farm import secured_farm
from tests.support.farms.secured_redis import SecuredRedis, secured_redis
from tests.support.keys import key_folder
from tests.support.stores.object_servers import Certificate, minio_program, running_minio
from tests.support.stores.store_roles import make_roles
from tests.support.waiting import eventually, need

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[SecuredRedis]:
    (tmp_path / "redis").mkdir()
    with secured_redis(tmp_path / "redis") as redis:
        yield redis


@pytest.mark.slow
def test_a_farm_with_keys_tls_users_and_policies_runs_a_search(
    redis: SecuredRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    need("minio (`make minio` builds it)", minio_program())
    keys = key_folder(tmp_path / "keys", "ada").path
    monkeypatch.setenv("TUNEMQ_KEYS", str(keys / "ada.toml"))  # this process looks as she does
    certificate = Certificate(tmp_path / "certificate")
    with running_minio(tmp_path / "minio", certificate=certificate) as server:
        bucket = server.create_bucket()
        files = {"scheduler": "scheduler", "worker": "worker", "submitter": "ada"}
        variables = {
            role: {**environ, "TUNEMQ_KEYS": str(keys / f"{files[role]}.toml")}
            for role, environ in make_roles(server, bucket).items()
        }
        options = ("--store", server.address(bucket, "farm"))
        with secured_farm(tmp_path / "farm", redis, *options, variables=variables) as farm:
            farm.add_worker("one")
            farm.add_worker("two")
            farm.has_nodes("one", "two")
            farm.submit(Search(name="first", trials=6, steps=30, has_gate=True, step_s=0.01))
            farm.open_gate("first", 10)
            farm.wait_for_steps("first", 4, 10)
            farm.kill_scheduler()
            farm.start_scheduler(*options)
            farm.workers["two"].kill()  # its trials resume from the store
            farm.open_gate("first", 30)
            row = farm.wait_for("first", "FINISHED")
            assert row.owner == "ada"
            farm.check_results("first")
            farm.tunemq("rm", "--files", "--yes", "first")
            assert "rejected" not in farm.said()
        assert redis.rejected() == []


def test_s05_search_over_tls_needs_no_rights_beyond_each_role(redis: SecuredRedis, tmp_path: Path):
    with secured_farm(tmp_path / "farm", redis) as farm:
        farm.add_worker("one")
        farm.has_nodes("one")
        farm.submit(Search(name="first", trials=3, steps=30, has_gate=True))
        farm.open_gate("first", 5)
        farm.wait_for_steps("first", 2, 5)
        eventually(lambda: _is_by_roles(redis))
        _ask_for_everything(farm)
        farm.kill_scheduler()  # the next one takes it over
        farm.start_scheduler()
        farm.open_gate("first", 20)
        farm.wait_for_steps("first", 2, 10)
        redis.client.flushall()  # all processes start again
        farm.open_gate("first", 30)
        farm.wait_for("first", "FINISHED")
        farm.check_results("first")
        farm.tunemq("nodes", "drain", "one")
        farm.tunemq("nodes", "resume", "one")
        farm.tunemq("rm", "first")
        worker = farm.workers["one"]
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(90) == 0
        eventually(lambda: "one" not in farm.nodes(), message=lambda: str(farm))
        assert redis.rejected() == []


def test_s05_redis_that_asks_for_client_certificates_gets_them(tmp_path: Path):
    (tmp_path / "redis").mkdir()
    with (
        secured_redis(tmp_path / "redis", ["tls-auth-clients yes"]) as redis,
        secured_farm(tmp_path / "farm", redis, shows_certificate=True) as farm,
    ):
        farm.add_worker("one")
        farm.has_nodes("one")
        farm.submit(Search(name="first"))
        farm.wait_for("first", "FINISHED")
        farm.check_results("first")
        for role, line in (("scheduler", ("scheduler",)), ("submitter", ("ls",))):
            variables = {"TUNEMQ_REDIS": redis.url(role)}  # with a password, without one
            assert farm.run(*line, variables=variables).returncode == 69


def _is_by_roles(redis: SecuredRedis) -> bool:
    # A client is called "default" until it authenticates; every client must have done so.
    connected = {client["user"] for client in redis.client.client_list()}
    return {"scheduler", "worker"} <= connected <= {"scheduler", "worker", "submitter", "admin"}


def _ask_for_everything(farm: FarmService) -> None:
    """Run every command that queries a farm."""
    for line in ("ls", "show first", "logs first", "why first", "nodes", "pause first"):
        farm.tunemq(*line.split())
    farm.wait_for("first", "PAUSED")
    farm.tunemq("resume", "first")
    farm.wait_for("first", "RUNNING")
