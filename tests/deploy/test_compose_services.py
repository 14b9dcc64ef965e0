"""The services of `docker compose up` as plain processes: MinIO, its proxy, Redis."""

from __future__ import annotations

import hashlib
import http.client
import io
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import urllib3
import yaml
from minio import Minio
from minio.error import S3Error

from tests.deploy.compose_parts import (
    REPOSITORY,
    Secrets,
    Store,
    run_store_setup,
    running_redis,
    running_store,
)
from tests.support.farms.farm_processes import free_port
from tunemq_scheduler.security.forged_signatures import UNSIGNED, forgeries
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.objects.s3_address import parse_address
from tunemq_shared.objects.s3_objects import S3Objects

pytestmark = [pytest.mark.deploy]


class Services:
    """The store and Redis of one farm."""

    def __init__(self, secrets: Secrets, store: Store, redis_port: int) -> None:
        self.secrets, self.store, self.redis_port = secrets, store, redis_port
        self.said = self.set_up()

    def set_up(self, **variables: str) -> str:
        """Run the setup steps of each `docker compose up`."""
        self.secrets.run(**variables)
        return run_store_setup(self.secrets, self.store, self.redis_port)

    def have(self, submitters: str) -> None:
        """Set up for these submitters, unless it is done: tests run in any order."""
        if self.secrets.variables["TUNEMQ_SUBMITTERS"] != submitters:
            self.set_up(TUNEMQ_SUBMITTERS=submitters)

    def client(self, role: str) -> Minio:
        """A client for a role that connects through the proxy."""
        access_key, secret_key = self.secrets.keys(role)
        http_client = urllib3.PoolManager(ca_certs=str(self.store.ca_file), retries=False)
        return Minio(
            self.store.proxy,
            access_key=access_key,
            secret_key=secret_key,
            region="us-east-1",
            http_client=http_client,
        )

    def redis(self, user: str, password: str = "") -> redis.Redis:
        """The same for Redis."""
        return _client_of_redis(self.secrets, self.redis_port, user, password)

    def put(
        self, place: str, name: str, headers: dict[str, str] | list[tuple[str, str]], body: bytes
    ) -> int:
        """Send a raw PUT request; return the status. Headers in a list may repeat."""
        if place == self.store.proxy:
            context = ssl.create_default_context(cafile=str(self.store.ca_file))
            line: http.client.HTTPConnection = http.client.HTTPSConnection(place, context=context)
        else:
            line = http.client.HTTPConnection(place)
        line.putrequest("PUT", name)
        for header, value in headers.items() if isinstance(headers, dict) else headers:
            line.putheader(header, value)
        line.putheader("Content-Length", str(len(body)))
        line.endheaders(body)
        status = line.getresponse().status
        line.close()
        return status


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("compose")
    secrets = Secrets(folder / "secrets", TUNEMQ_SUBMITTERS="ada ben")
    with (
        running_store(secrets, folder / "store") as store,
        running_redis(secrets, folder / "redis") as port,
    ):
        yield Services(secrets, store, port)


def test_store_grants_each_role_only_the_rights_it_needs(services: Services):
    services.have("ada ben")
    body = b"x" * 70_000
    for role, allowed, rejected in (
        ("scheduler", "farm/search/journal/scheduler", "elsewhere/file"),
        ("worker", "farm/search/trial/file", "farm/search/journal/scheduler"),
        ("outside/ada", "farm/blobs/code", "farm/search/trial/file"),
    ):
        client = services.client(role)
        client.put_object("tunemq", allowed, *_sent(body))
        with pytest.raises(S3Error, match="AccessDenied"):
            client.put_object("tunemq", rejected, *_sent(body))


def test_existing_objects_are_left_unchanged(services: Services):
    services.have("ada ben")
    line = services.redis("worker").connection_pool.get_connection()
    assert services.set_up() == ""
    line.send_command("PING")  # a client would connect again: Redis has not closed this one
    assert line.read_response() == b"PONG"
    line.disconnect()


def test_removed_submitter_is_rejected_everywhere_and_added_one_accepted_everywhere(
    services: Services,
):
    services.have("ada ben")
    ben, passwords = services.client("outside/ben"), services.secrets.path / "authority/passwords"
    password = (passwords / "ben.password").read_text().strip()
    assert services.redis("ben").ping()
    said = services.set_up(TUNEMQ_SUBMITTERS="ada eve")
    assert "created the submitter eve-" in said
    assert "removed the user ben-" in said
    with pytest.raises(S3Error, match="InvalidAccessKeyId"):
        ben.put_object("tunemq", "farm/blobs/code", *_sent(b""))
    with pytest.raises(redis.AuthenticationError):
        services.redis("ben", password).ping()
    assert services.redis("eve").ping()
    services.client("outside/eve").put_object("tunemq", "farm/blobs/code", *_sent(b""))


def test_admin_user_of_redis_may_only_reload_its_users(services: Services):
    admin = services.redis("keeper")
    assert admin.acl_load()
    assert "worker" in admin.acl_users()
    for rejected in (
        ("GET", "tunemq:farm"),
        ("ACL", "LIST"),
        ("CONFIG", "GET", "dir"),
        ("KEYS", "*"),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            admin.execute_command(*rejected)


def test_transaction_survives_a_restart_of_redis(tmp_path: Path):
    """Redis 7 reads its append-only file as the default user, and checks that user's rights."""
    secrets = Secrets(tmp_path / "secrets")
    ask = "redis.call('set', KEYS[1], '1') redis.call('lpush', KEYS[2], redis.call('get', KEYS[1]))"
    for is_again in (False, True):
        with running_redis(secrets, tmp_path / "redis") as port:
            client = _client_of_redis(secrets, port, "scheduler")
            if not is_again:
                client.eval(ask, 2, "tunemq:generation", "tunemq.node.one")
            assert client.get("tunemq:generation") == b"1"
            assert client.llen("tunemq.node.one") == 1
            strangers = redis.Redis(
                **_place(secrets, port), username="default", password="", socket_timeout=5
            )
            with pytest.raises(redis.AuthenticationError):
                strangers.ping()
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(**_place(secrets, port)).get("tunemq:signs")


def test_forged_uploads_are_rejected_by_the_proxy_for_any_user(services: Services):
    """MinIO accepts them from a user whom no policy binds; hence the rule of the proxy."""
    root = services.secrets.text("minio/root-user")
    passed, rejected = [], []
    for forgery in forgeries("farm/", "forged", root, "us-east-1"):
        name = f"/tunemq/farm/forged?{forgery.query}"
        for place, answers in ((services.store.minio, passed), (services.store.proxy, rejected)):
            answers.append(services.put(place, name, forgery.headers, forgery.body))
    assert 200 in passed, "this MinIO is no longer vulnerable; the rule does no harm"
    assert rejected == [403, 403, 403]
    assert UNSIGNED in services.store.errors.read_text()


@pytest.mark.parametrize(
    "hashes",
    [
        [UNSIGNED],
        [UNSIGNED.lower()],
        [f"{UNSIGNED},UNSIGNED-PAYLOAD"],
        [f"\t{UNSIGNED}"],
        ["UNSIGNED-PAYLOAD", UNSIGNED],
        ["", UNSIGNED],
        ["STREAMING-AWS4-HMAC-SHA256-PAYLOAD2"],
        ["0" * 63],
    ],
)
def test_no_spelling_of_a_forged_upload_passes_the_proxy(hashes: list[str], services: Services):
    """The proxy checks the first of several headers and passes on only that one."""
    root = services.secrets.text("minio/root-user")
    forgery = list(forgeries("farm/", "forged", root, "us-east-1"))[-1]
    others = [item for item in forgery.headers.items() if item[0] != "x-amz-content-sha256"]
    headers = [*(("x-amz-content-sha256", one) for one in hashes), *others]
    assert services.put(services.store.proxy, "/tunemq/farm/x", headers, forgery.body) in {400, 403}


def test_minio_interfaces_beside_s3_are_not_reached_through_the_proxy(services: Services):
    for path in (
        "/minio/admin/v3/list-users",
        "//minio/admin/v3/list-users",
        "/%6dinio/admin/v3/list-users",
        "/x/../minio/v2/metrics/cluster",
        "/minio/health/live",
    ):
        assert services.put(services.store.proxy, path, {}, b"") == 403
    assert "/minio/health/live" in services.store.errors.read_text()


@pytest.mark.parametrize(("service", "port"), [("minio", "9000"), ("proxy", "9001")])
def test_health_check_tells_whether_a_service_answers(service: str, port: str, services: Services):
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8"))
    kind, *line = compose["services"][service]["healthcheck"]["test"]
    assert kind == "CMD"
    there = {"minio": services.store.minio, "proxy": services.store.health}[service]
    for place, is_well in ((there.rpartition(":")[2], True), (str(free_port()), False)):
        asked = [word.replace(f"127.0.0.1/{port}", f"127.0.0.1/{place}") for word in line]
        assert asked != line
        done = subprocess.run(asked, check=False, capture_output=True, timeout=30)
        assert (done.returncode == 0) is is_well, done.stderr


def test_multipart_objects_pass_the_proxy_whole(services: Services, tmp_path: Path):
    access_key, secret_key = services.secrets.keys("scheduler")
    environ = {
        "TUNEMQ_S3_ENDPOINT": f"https://{services.store.proxy}",
        "AWS_CA_BUNDLE": str(services.store.ca_file),
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
    }
    content = bytes(range(256)) * 2**17  # 32 MiB: several parts
    file, back, cancel = tmp_path / "file", tmp_path / "back", CancelToken()
    file.write_bytes(content)
    with S3Objects(parse_address("s3://tunemq/farm", environ), environ) as objects:
        sha256 = hashlib.sha256(content).hexdigest()
        objects.put_file("large", file, size=len(content), sha256=sha256, cancel=cancel)
        objects.get_file("large", back, size=len(content), cancel=cancel)
        assert back.read_bytes() == content
        assert "large" in [found.key for found in objects.list()]
        objects.delete(["large"])


def test_no_output_log_or_argument_contains_a_secret(services: Services):
    """Search the printed output, nginx's log, and arguments of processes."""
    said = services.said + services.secrets.made + services.store.errors.read_text()
    for name, content in services.secrets.contents().items():
        if name.endswith((".password", "root-password", ".credentials")):
            secret = content.decode().split()[-1]
            assert secret not in said, name


def _place(secrets: Secrets, port: int) -> dict[str, Any]:
    ca_file = str(secrets.path / "redis" / "tls" / "ca.crt")
    return {"host": "127.0.0.1", "port": port, "ssl": True, "ssl_ca_certs": ca_file}


def _client_of_redis(secrets: Secrets, port: int, user: str, password: str = "") -> redis.Redis:
    password = password or secrets.text(f"authority/passwords/{user}.password")
    return redis.Redis(**_place(secrets, port), username=user, password=password)


def _sent(body: bytes) -> tuple[object, int]:
    return io.BytesIO(body), len(body)
