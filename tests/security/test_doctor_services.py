"""`tunemq doctor` finds problems of a farm's Redis and its store; each test causes one problem."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

from tests.support.farms.examined_farm import ExaminedFarm, farm
from tests.support.farms.farm_processes import fail_to_save
from tests.support.farms.secured_redis import shipped_users
from tests.support.proxies.lying_redis import OLDER, LyingRedis
from tests.support.stores.object_servers import MinioServer, minio_program
from tests.support.waiting import eventually, need
from tunemq_scheduler.security.findings import FindingLevel

__all__ = ["farm"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


def store(farm: ExaminedFarm) -> tuple[str, str]:
    """Where its store is, for which the scheduler is asked otherwise."""
    return "--store", farm.store


# --- Redis ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu"])
def test_redis_that_evicts_keys_is_found(farm: ExaminedFarm, policy: str):
    with farm.redis_says("maxmemory-policy", policy):
        finding = farm.has_only("redis-eviction", "maxmemory-policy noeviction")
    assert policy in finding.what
    assert finding.refuses


def test_redis_without_persistence_is_found(farm: ExaminedFarm):
    with farm.redis_says("appendonly", "no"):
        farm.has_only("redis-aof", "appendonly yes")


def test_doctor_full_redis_is_named(farm: ExaminedFarm):
    with farm.redis_says("maxmemory", "500000"):
        finding = farm.has_only("redis-writes", "CONFIG SET maxmemory", more=store(farm))
    assert "is full" in finding.what


def test_doctor_redis_without_a_disk_is_named_and_no_consequence_of_it(farm: ExaminedFarm):
    restore = fail_to_save(farm.redis.client)
    try:
        finding = farm.has_only("redis-writes", "redis-cli CONFIG GET dir", more=store(farm))
    finally:
        restore()
    assert "cannot write to its disk" in finding.what


def test_doctor_redis_that_is_a_replica_is_named(farm: ExaminedFarm):
    farm.redis.client.replicaof("127.0.0.1", 1)
    try:
        finding = farm.has_only("redis", "REPLICAOF NO ONE", more=store(farm))
    finally:
        farm.redis.client.replicaof("NO", "ONE")
    assert "is a read-only replica" in finding.what


def test_a_redis_that_is_too_old_is_found(farm: ExaminedFarm):
    real = str(farm.redis.client.info()["redis_version"])
    older = OLDER[len(real)]
    with contextlib.closing(LyingRedis(("127.0.0.1", farm.redis.port), real, older)) as lying:
        finding = farm.has_only("redis-version", "6.2", more=("--redis", lying.url))
    assert older in finding.what


def test_a_celery_worker_that_takes_remote_control_is_found(farm: ExaminedFarm, tmp_path: Path):
    (tmp_path / "others.py").write_text(
        f"from celery import Celery\napp = Celery('others', broker={farm.redis.url!r})\n"
    )
    line = [sys.executable, "-m", "celery", "-A", "others", "worker", "--pool=solo", "-l", "INFO"]
    environ = farm.environ("head") | {"PYTHONPATH": str(tmp_path)}
    log, client = tmp_path / "celery.log", farm.redis.client
    process = farm.head.start(line, environ, log)
    try:
        eventually(
            lambda: "ready." in log.read_text(), within=60, every=0.05, message=log.read_text
        )
        farm.has_only("celery-remote-control", "worker_enable_remote_control")
    finally:
        process.terminate()
        process.wait()
        farm.head.processes.remove(process)
        for key in client.scan_iter("*celery*"):
            client.delete(key)


@pytest.mark.parametrize("role", ["scheduler", "submitter"])
def test_the_rights_that_tunemq_ships_suffice_for_the_scheduler_s_user(
    farm: ExaminedFarm, role: str
):
    lines = [line.split() for line in shipped_users().splitlines()]
    (rights,) = (line[2:] for line in lines if line[:2] == ["user", role])
    kept = [right for right in rights if not right.startswith(("#", ">"))]
    client = farm.redis.client
    client.execute_command("ACL", "SETUSER", role, "reset", ">password-of-role", *kept)
    url = farm.redis.url.replace("redis://", f"redis://{role}:password-of-role@")
    try:
        found = farm.examined(variables={"TUNEMQ_REDIS": url})
    finally:
        client.execute_command("ACL", "DELUSER", role)
    assert not found.problems, str(found)
    if role == "scheduler":
        assert not found.warnings, str(found)
    else:
        assert "where the scheduler runs" in found.of("nodes")[0].fix, str(found)


# --- the store ------------------------------------------------------------------------------------


def test_a_store_with_the_keys_that_it_was_shipped_with_is_found(
    farm: ExaminedFarm, tmp_path: Path
):
    need("minio (`make minio` builds it)", minio_program())
    server = MinioServer(tmp_path / "minio")
    server.access_key = server.secret_key = "minioadmin"
    server.start()
    try:
        bucket = server.create_bucket()
        address = server.address(bucket, "farm")
        roles = farm.roles_on(server, bucket)
        more = ("--store", address)
        finding = farm.has_only("store-keys", "MINIO_ROOT_PASSWORD", more=more, variables=roles)
        assert finding.refuses
        found = farm.examined(*more, variables=server.environ)
        assert found.of("store-keys")[0].level is FindingLevel.PROBLEM
        excused = farm.examined(*more, "--insecure", variables=roles)
        assert (excused.problems, excused.warnings) == (0, 1), str(excused)
        assert excused.of("store-keys")[0].level is FindingLevel.WARNING
    finally:
        server.kill()


def test_a_public_bucket_is_found(farm: ExaminedFarm):
    client = farm.server.client()
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": ["*"]},
        "Action": ["s3:GetObject"],
        "Resource": [f"arn:aws:s3:::{farm.bucket}/*"],
    }
    client.set_bucket_policy(
        farm.bucket, json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    )
    try:
        finding = farm.has_only("store-anonymous", "mc anonymous set none", farm.bucket)
        assert finding.refuses
    finally:
        client.delete_bucket_policy(farm.bucket)


def test_a_store_that_takes_unsigned_uploads_is_found(farm: ExaminedFarm):
    """A MinIO without the policies that TuneMQ ships takes them."""
    finding = farm.has_only("store-unsigned-trailer", "deploy/minio", variables=farm.server.environ)
    assert "forged" in finding.what
