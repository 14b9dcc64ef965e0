"""S07: the probes find a store that others can use, and leave it as it was; none starts on it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.farms.farm_service import farm_service
from tests.support.proxies.late_proxy import late_proxy
from tests.support.stores.object_servers import (
    Certificate,
    MinioServer,
    ObjectServer,
    minio_program,
    running_minio,
)
from tests.support.stores.store_roles import make_roles
from tests.support.waiting import eventually, need
from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_scheduler.security.store_probes import clock_finding, probe_store
from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import StoreUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.security]

CHECKS = ["store-tls", "store-keys", "store-anonymous", "store-unsigned-trailer", "store-clock"]


@pytest.fixture(autouse=True)
def _probes_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of a machine that does other things, too, may take longer to answer."""
    monkeypatch.setattr("tunemq_scheduler.security.store_probes.PROBE_ANSWER_S", 60.0)


def wrong(address: str, environ: Mapping[str, str]) -> list[Finding]:
    found = probe_store(address, environ)
    assert [finding.check for finding in found] == CHECKS
    return [finding for finding in found if finding.level is not FindingLevel.OK]


def names(server: ObjectServer, bucket: str) -> list[str]:
    listed = server.client().list_objects(bucket, recursive=True)
    return [str(one.object_name) for one in listed]


@pytest.fixture(scope="module")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A MinIO started as its first page describes."""
    need("minio (`make minio` builds it)", minio_program())
    server = MinioServer(tmp_path_factory.mktemp("default") / "server")
    server.access_key = server.secret_key = "minioadmin"
    server.start()
    yield server
    server.kill()


def publish(server: ObjectServer, bucket: str, *actions: str, names: str = "*") -> None:
    statements = [
        {
            "Effect": "Allow",
            "Principal": {"AWS": ["*"]},
            "Action": [f"s3:{action}"],
            "Resource": [f"arn:aws:s3:::{bucket}{'' if action == 'ListBucket' else f'/{names}'}"],
        }
        for action in actions
    ]
    policy = {"Version": "2012-10-17", "Statement": statements}
    server.client().set_bucket_policy(bucket, json.dumps(policy))


def test_s07_store_probe_with_the_shipped_policies_finds_and_leaves_nothing(minio, bucket):
    roles = make_roles(minio, bucket)
    minio.client().put_object(bucket, "farm/kept", io.BytesIO(b"x"), 1)
    for role in ("scheduler", "worker", "submitter"):
        assert wrong(minio.address(bucket, "farm"), roles[role]) == []
    assert names(minio, bucket) == ["farm/kept"]


def test_s07_store_probe_over_tls_finds_nothing_wrong(tmp_path):
    certificate = Certificate(tmp_path / "certificate")
    need("minio (`make minio` builds it)", minio_program())
    with running_minio(tmp_path / "minio", certificate=certificate) as server:
        bucket = server.create_bucket()
        roles = make_roles(server, bucket)
        address = server.address(bucket, "farm")
        assert wrong(address, roles["scheduler"]) == []
        untrusting = {**roles["scheduler"], "AWS_CA_BUNDLE": ""}
        with pytest.raises(StoreError, match="certificate"):
            probe_store(f"s3://{bucket}/farm?endpoint={server.url}", untrusting)


@pytest.mark.parametrize("prefix", ["", "farm", "deep/er"])
def test_s07_a_server_that_takes_forged_uploads_is_found(minio, bucket, prefix):
    """Every MinIO that can be built has this weakness; here nothing forbids it to the owner."""
    need("minio (`make minio` builds it)", isinstance(minio, MinioServer))
    (finding,) = wrong(minio.address(bucket, prefix), minio.environ)
    assert (finding.check, finding.level) == ("store-unsigned-trailer", FindingLevel.PROBLEM)
    assert "CVE-2026-40344" in finding.what
    assert "CVE-2026-41145" in finding.what
    assert "deploy/minio" in finding.fix
    assert minio.secret_key not in str(finding)
    assert names(minio, bucket) == []


def test_s07_a_server_without_the_weakness_is_said_to_have_none(shared_served):
    bucket = shared_served.create_bucket()
    assert wrong(shared_served.address(bucket, "farm"), shared_served.environ) == []
    assert names(shared_served, bucket) == []


def test_s07_default_store_keys_are_found_whether_ours_or_not(default_server):
    bucket = default_server.create_bucket()
    address = default_server.address(bucket, "farm")
    roles = make_roles(default_server, bucket)
    for environ, said in (
        (default_server.environ, "The keys for"),
        (roles["scheduler"], "takes the keys that it was shipped with"),
    ):
        (finding,) = [one for one in wrong(address, environ) if one.check == "store-keys"]
        assert finding.level is FindingLevel.PROBLEM
        assert finding.refuses
        assert said in finding.what
        assert "MINIO_ROOT_PASSWORD" in finding.fix


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        (["ListBucket"], "list"),
        (["GetObject"], "read"),
        (["PutObject"], "write"),
        (["DeleteObject"], "remove"),
        (["ListBucket", "GetObject", "PutObject"], "list and write and read"),
    ],
)
def test_s07_public_bucket_is_found_by_anonymous_requests(minio, bucket, actions, said):
    roles = make_roles(minio, bucket)
    publish(minio, bucket, *actions)
    found = wrong(minio.address(bucket, "farm"), roles["scheduler"])
    (finding,) = [one for one in found if one.check == "store-anonymous"]
    assert finding.refuses
    assert f"one may {said} objects there" in finding.what
    assert "mc anonymous set none" in finding.fix
    assert names(minio, bucket) == []


@pytest.mark.parametrize(
    ("action", "public", "said"),
    [
        (
            "PutObject",
            "farm/*/tuner.pkl",
            "*/search/tuner.pkl, write */team/search/tuner.pkl",
        ),
        (
            "PutObject",
            "farm/*/journal/*",
            "*/search/journal/other, write */search/journal/000",
        ),
        ("PutObject", "farm/*/checkpoint_*", "write */search/trial/checkpoint_000000/file"),
        ("PutObject", "farm/*/result.json", "write */search/trial/result.json"),
        ("PutObject", "farm/blobs/*", "write blobs/*"),
        ("GetObject", "farm/blobs/*", "read blobs/*"),
        ("GetObject", "farm/*/checkpoint_*", "read */search/trial/checkpoint_000000/file"),
        ("DeleteObject", "farm/*/journal/*", "remove */search/journal/other"),
    ],
)
def test_anonymous_requests_find_a_bucket_of_which_a_part_is_public(
    minio, bucket, action, public, said
):
    roles = make_roles(minio, bucket)
    publish(minio, bucket, action, names=public)
    found = wrong(minio.address(bucket, "farm"), roles["scheduler"])
    (finding,) = [one for one in found if one.check == "store-anonymous"]
    assert finding.refuses
    assert said in finding.what
    assert "mc anonymous set none" in finding.fix
    assert names(minio, bucket) == []


@pytest.mark.parametrize("hours", [1, -1])
def test_s07_a_clock_that_is_off_by_an_hour_is_found(minio, bucket, hours):
    roles = make_roles(minio, bucket)
    with late_proxy(minio.port, 3600 * hours) as proxy:
        address = minio.address(bucket, "farm", endpoint=proxy.url)
        (finding,) = wrong(address, roles["scheduler"])
    assert (finding.check, finding.level) == ("store-clock", FindingLevel.PROBLEM)
    assert f"{'behind' if hours > 0 else 'ahead of'} that of the server" in finding.what
    assert "NTP" in finding.fix


def test_s07_clocks_that_are_off_by_minutes_are_worth_a_warning():
    two_minutes_ago = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() - 120))
    assert clock_finding("there", two_minutes_ago).level is FindingLevel.WARNING
    assert clock_finding("there", "").level is FindingLevel.OK


def test_s07_missing_store_is_reported(tmp_path, minio, bucket):
    address = minio.address(bucket, "farm", endpoint="http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        probe_store(address, minio.environ)
    assert probe_store(str(tmp_path), {}) == []


@pytest.mark.parametrize("plant", ["default keys", "public"])
def test_s07_no_scheduler_starts_on_a_store_that_others_can_use(
    tmp_path: Path, minio, bucket, default_server, plant
):
    server, environ, said = minio, make_roles(minio, bucket)["scheduler"], "is public"
    if plant == "default keys":
        server, environ, said = default_server, default_server.environ, "everybody knows"
        bucket = server.create_bucket()
    else:
        publish(minio, bucket, "GetObject")
    store = ("--store", server.address(bucket, "farm"))
    with farm_service(tmp_path, starts=False) as farm:
        scheduler = farm.start_scheduler(*store, variables=environ)
        assert scheduler.wait(60) == 64, farm.said()
        assert said in farm.said()
        assert "To fix it" in farm.said()
        assert "Serving the farm" not in farm.said()
        assert environ["AWS_SECRET_ACCESS_KEY"] not in farm.said() or plant == "default keys"
        farm.start_scheduler(*store, "--insecure", variables=environ)
        eventually(lambda: "Serving the farm" in farm.said(), within=60, message=farm.said)


def test_s07_worker_with_default_store_keys_does_not_start(tmp_path: Path, default_server):
    with farm_service(tmp_path, starts=False) as farm:
        farm.of_home["one"] = default_server.environ
        worker = farm.add_worker("one")
        assert worker.wait(60) == 64
        said = (tmp_path / "one" / "worker.log").read_text()
        assert "default keys, which are public" in said
        assert "--insecure" in said
