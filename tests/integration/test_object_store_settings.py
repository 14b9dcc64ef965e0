"""An unusable object store: each mistake gets an error message within seconds, with a remedy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from minio import MinioAdmin
from minio.credentials import StaticProvider

from tests.support.stores.object_servers import Certificate, running_minio
from tests.support.stores.store_roles import wait_for_users
from tunemq_shared.base.errors import StoreError
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects import remote_object_store
from tunemq_shared.objects.remote_object_store import PROBE_S
from tunemq_shared.objects.s3_address import parse_address
from tunemq_shared.objects.s3_objects import S3Objects

pytestmark = pytest.mark.integration


def rejection(address: str, environ: dict[str, str]) -> str:
    """Use the store; return the error message, which comes quickly and leaks no key."""
    begin = time.monotonic()
    with pytest.raises(StoreError) as caught, use(address, environ) as objects:
        objects.probe()
    assert time.monotonic() - begin < 5 * PROBE_S
    assert environ.get("AWS_SECRET_ACCESS_KEY", "none") not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits: a server on a busy machine answers late."""
    monkeypatch.setattr(remote_object_store, "PROBE_S", 20.0)
    monkeypatch.setattr(remote_object_store, "PROBE_ANSWER_S", 20.0)


def use(address: str, environ: dict[str, str]) -> S3Objects:
    return S3Objects(parse_address(address, environ), environ)


@pytest.fixture(params=["minio", "served"])
def server(request):
    return request.getfixturevalue(f"shared_{request.param}")


@pytest.fixture
def place(server) -> str:
    return server.create_bucket()


@pytest.mark.usefixtures("patient")
def test_store_settings_come_from_the_environment(minio, bucket):
    with open_objects(f"s3://{bucket}/a") as objects:
        objects.probe()


@pytest.mark.usefixtures("patient")
def test_store_with_wrong_keys_is_an_error_that_names_them(server, place):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        told = rejection(server.address(place), {**server.environ, name: "wrong" * 4})
        assert f"s3://{place} at {server.url}" in told
        assert "the server does not know these keys" in told
        assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in told


def test_store_without_keys_is_an_error_that_says_so(server, place):
    assert "there are no keys for the store" in rejection(server.address(place), {})


@pytest.mark.usefixtures("patient")
def test_missing_bucket_is_made_only_if_asked_for(server):
    name = f"missing-{server.access_key[:6]}"
    told = rejection(server.address(name), server.environ)
    assert f"there is no bucket '{name}'; make it, correct the name, or add create_bucket" in told
    for _ in range(2):
        with use(server.address(name, create_bucket="true"), server.environ) as objects:
            objects.probe()
    assert server.client().bucket_exists(name)


def test_store_at_https_with_an_http_server_is_an_error(server, place):
    told = rejection(server.address(place, endpoint=f"https{server.url[4:]}"), server.environ)
    assert "no secure connection can be made" in told
    assert "check http or https in endpoint" in told


def test_store_without_a_listening_server_is_an_error(server, place):
    told = rejection(server.address(place, endpoint="http://127.0.0.1:1"), server.environ)
    assert "cannot be reached ([Errno 111] Connection refused)" in told
    assert "check that it runs and that endpoint is its address" in told


def test_store_with_an_unknown_host_name_is_an_error(server, place):
    told = rejection(server.address(place, endpoint="http://no-such-host.invalid"), server.environ)
    assert "the server cannot be reached" in told


@pytest.fixture
def web_server() -> Iterator[str]:
    """A web server that answers every request alike, and does not speak S3."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p/>"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # the client may have closed the connection
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.usefixtures("patient")
def test_server_that_is_no_object_store_is_an_error(shared_minio, web_server):
    told = rejection(shared_minio.address("bucket", endpoint=web_server), shared_minio.environ)
    assert "what answers there does not speak S3" in told


@pytest.mark.usefixtures("patient")
def test_store_with_a_wrong_region_is_an_error(tmp_path):
    with running_minio(tmp_path / "minio", region="eu-test") as server:
        place = server.create_bucket()
        told = rejection(server.address(place, region="us-east-1"), server.environ)
        assert "the region 'us-east-1' is wrong" in told
        assert "expecting 'eu-test'" in told
        with use(server.address(place), server.environ) as objects:
            objects.probe()


def test_store_with_a_private_certificate_needs_its_ca_file(tmp_path):
    certificate = Certificate(tmp_path / "certificate")
    with running_minio(tmp_path / "minio", certificate=certificate) as server:
        place = server.create_bucket()
        keys = {name: value for name, value in server.environ.items() if "KEY" in name}
        told = rejection(f"s3://{place}?endpoint={server.url}", keys)
        assert "certificate verify failed" in told
        assert "ca_file (or AWS_CA_BUNDLE) names the CA" in told
        told = rejection(f"s3://{place}?endpoint=http{server.url[5:]}", keys)
        assert "does not speak S3 (HTTP status 400); check host, port, and http or https" in told
        for address, environ in (
            (server.address(place), keys),
            (f"s3://{place}?endpoint={server.url}", server.environ),
        ):
            with use(address, environ) as objects:
                objects.probe()
                objects.put_bytes("a", bytes(2**20))
                assert objects.get_bytes("a", limit=2**20) == bytes(2**20)


def test_store_that_accepts_and_never_answers_is_an_error(tmp_path):
    with running_minio(tmp_path / "minio") as server:
        place = server.create_bucket()
        server.freeze()
        told = rejection(server.address(place), server.environ)
        server.thaw()
        assert "the server cannot be reached (timed out)" in told


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ("s3:GetObject", "it cannot be listed: these keys are not allowed to do that"),
        ("s3:ListBucket", "it cannot be written: these keys are not allowed to do that"),
    ],
)
def test_store_keys_without_rights_are_an_error(tmp_path, allowed, message):
    statement = {"Effect": "Allow", "Action": [allowed], "Resource": ["arn:aws:s3:::*"]}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    with running_minio(tmp_path / "minio") as server:
        keys = StaticProvider(server.access_key, server.secret_key)
        admin = MinioAdmin(endpoint=server.url[len("http://") :], credentials=keys, secure=False)
        wait_for_users(admin)
        admin.user_add("reader", "readers-secret")
        admin.policy_add("some", policy=policy)
        admin.policy_set("some", user="reader")
        environ = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "readers-secret"}
        told = rejection(server.address(server.create_bucket()), environ)
        assert message in told
        assert "allow them to read, write, list and remove below s3://" in told
