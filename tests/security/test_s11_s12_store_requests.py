"""S11, S12: requests from a browser neither change nor read anything in a served folder.

Each request to a served folder is signed with keys that no web page has.
"""

from __future__ import annotations

import http.client
import socket
from email.message import Message
from pathlib import Path

import pytest

from tests.support.stores.object_servers import Certificate, ServedFolder, serving
from tunemq_scheduler.cli import store_serve_command
from tunemq_scheduler.farm.monitoring.listen_address import parse_listen
from tunemq_scheduler.farm.monitoring.trusted_requests import TrustedRequests, UntrustedRequest
from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.objects import remote_object_store
from tunemq_shared.objects.s3_address import parse_address
from tunemq_shared.objects.s3_objects import S3Objects

pytestmark = [pytest.mark.integration, pytest.mark.security]

SECRET = b"secret content"


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"])
def test_s11_s12_unsigned_requests_read_and_change_nothing(
    shared_served: ServedFolder, method: str, host: str
):
    bucket = shared_served.create_bucket()
    with shared_served.objects(bucket) as objects:
        objects.put_bytes("kept", SECRET)
        for target in ("/", f"/{bucket}", f"/{bucket}/kept", f"/{bucket}?delete"):
            connection = http.client.HTTPConnection("127.0.0.1", shared_served.port, timeout=60)
            headers = {"Host": host, "Cookie": shared_served.access_key}
            connection.request(method, target, b"x", headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            assert SECRET not in content
            assert b"kept" not in content.replace(f"/{bucket}/kept".encode(), b"")
            assert answer.status >= 400 or method == "OPTIONS", (target, answer.status)
        assert objects.get_bytes("kept", limit=100) == SECRET
        assert [one.key for one in objects.list()] == ["kept"]


def test_s12_metrics_server_answers_only_to_its_own_and_given_host_names():
    trusted = TrustedRequests(["store.example"])
    for host in (
        "localhost",
        "LOCALHOST:7380",
        "127.0.0.1",
        "10.1.2.3:7380",
        "[::1]:7380",
        socket.gethostname(),
        "store.example",
        "Store.Example.:443",
    ):
        headers = Message()
        headers["Host"] = host
        trusted.check("GET", headers)
    headers = Message()
    headers["Host"] = "other.example"
    with pytest.raises(UntrustedRequest, match=r"not called 'other\.example'.*--metrics-host"):
        trusted.check("GET", headers)
    with pytest.raises(ConfigError, match="--metrics-host 'http://a' is no name"):
        TrustedRequests(["http://a"])


def test_s12_store_server_listens_on_the_loopback_by_default():
    assert store_serve_command.DEFAULT_LISTEN == "127.0.0.1:7380"
    assert parse_listen(store_serve_command.DEFAULT_LISTEN) == ("127.0.0.1", 7380)


def test_s12_store_server_asks_for_keys_on_every_address(tmp_path: Path):
    with serving(tmp_path / "server", host="") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().status == 400
        connection.close()
        assert "The store has no TLS" in server.said()


def test_s12_traffic_over_tls_is_not_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_object_store, "PROBE_S", 20.0)
    certificate = Certificate(tmp_path / "certificate")
    with serving(tmp_path / "server", certificate=certificate) as server:
        assert f"at https://127.0.0.1:{server.port}\n" in server.said()
        with server.objects(store_serve_command.BUCKET) as objects:
            objects.probe()
            objects.put_bytes("a", bytes(2**20))
            assert objects.get_bytes("a", limit=2**20) == bytes(2**20)
        environ = {**server.environ, "AWS_CA_BUNDLE": ""}
        for endpoint in (server.url, f"http{server.url[5:]}"):
            address = f"s3://{store_serve_command.BUCKET}/a?endpoint={endpoint}"
            with (
                S3Objects(parse_address(address, environ), environ) as objects,
                pytest.raises(StoreError),
            ):
                objects.probe()
