"""S11, S12: what a browser can be made to send neither changes nor reads anything in a folder.

The token is in no cookie, so no page has it; all else here is a second line behind that.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.object_servers import Certificate
from tests.raw_requests import connect, raw
from tests.served_folders import FolderServer, serving
from tests.support import eventually
from tunemq_scheduler.store_server.refusal import Refusal
from tunemq_scheduler.store_server.trusted_requests import METHODS, TrustedRequests
from tunemq_shared.errors import ConfigError, StoreError
from tunemq_shared.http_address import parse_http_address
from tunemq_shared.http_objects import HttpObjects

__all__ = ["connect", "raw"]

pytestmark = [pytest.mark.integration, pytest.mark.security]

FREE = {"GET", "HEAD"}
OTHERS = ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
SHA256_OF_X = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"


def exchanged(server: FolderServer, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status, and all that is answered, to a request without anything that is not given."""
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode("latin-1") + body)
        connection.shutdown(socket.SHUT_WR)
        told = b""
        while piece := connection.recv(65536):
            told += piece
    return int(told.split()[1]), told


def holds(server: FolderServer, place: str) -> bool:
    with server.objects(place) as objects:
        return [one.key for one in objects.list()] == ["kept"]


@pytest.fixture
def place(shared_served: FolderServer) -> str:
    place = shared_served.create_bucket()
    with shared_served.objects(place) as objects:
        objects.put_bytes("kept", b"secret content")
    return place


def asking(server: FolderServer, method: str, target: str, *headers: str) -> str:
    return "\r\n".join(
        [
            f"{method} {target} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {server.token}",
            f"X-TuneMQ-SHA256: {SHA256_OF_X}",
            "Content-Length: 1",
            *headers,
        ]
    )


# --- S11: requests that a page makes --------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET", "OPTIONS", "x"])
@pytest.mark.parametrize(
    "header",
    [
        "Origin: http://evil.example",
        "Origin: null",
        "Origin: http://127.0.0.1",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
        "Sec-Fetch-Site: same-origin",
    ],
)
def test_s11_no_page_is_answered_even_if_it_had_the_token(shared_served, place, method, header):
    head = asking(shared_served, method, f"/{place}/kept", header)
    status, told = exchanged(shared_served, head, b"x")
    assert status in (400, 403)
    assert b"secret content" not in told
    assert b"access-control" not in told.lower()
    assert holds(shared_served, place)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("method", OTHERS)
def test_s11_a_simple_form_does_nothing_without_the_token(shared_served, place, method, kind):
    head = f"{method} /{place}/kept?upload= HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}"
    status, told = exchanged(shared_served, f"{head}\r\nContent-Length: 1", b"x")
    assert status in (400, 401)
    assert b"access-control" not in told.lower()
    assert holds(shared_served, place)


def test_s11_methods_are_an_allow_list(shared_served, place):
    """Ray forgot DELETE in its list of what is forbidden: CVE-2026-27482."""
    for method in ("PATCH", "OPTIONS", "TRACE", "CONNECT", "COPY", "LOCK", "PROPFIND", "get"):
        assert method not in METHODS
        status, _ = exchanged(shared_served, asking(shared_served, method, f"/{place}/kept"), b"x")
        assert status == 400, method
    assert holds(shared_served, place)


def test_s11_reading_changes_nothing(shared_served, place):
    before = shared_served.incoming()
    for method in FREE:
        for query in ("", "?upload=", "?upload=x&start=0", "?list=&after=", "?uploads="):
            exchanged(shared_served, asking(shared_served, method, f"/{place}/kept{query}"), b"x")
    assert holds(shared_served, place)
    assert set(shared_served.incoming()) <= set(before)


def test_s11_neither_cookies_nor_addresses_carry_the_token(shared_served, place):
    for more in (f"Cookie: token={shared_served.token}", f"X-Token: {shared_served.token}"):
        head = f"GET /{place}/kept HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}"
        assert exchanged(shared_served, head)[0] == 401
    head = f"GET /{place}/kept?token={shared_served.token} HTTP/1.1\r\nHost: 127.0.0.1"
    assert exchanged(shared_served, head)[0] == 401


# --- S12: whom a request is for -------------------------------------------------------------------

HOSTS = [
    "evil.example",
    "evil.example:7380",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example#127.0.0.1",
    "127.0.0.1, evil.example",
    "[::1].evil.example",
    "",
    "\x7f\x01",
]


@pytest.mark.parametrize("host", HOSTS)
def test_s12_a_request_for_another_host_is_refused(shared_served, place, host):
    for more in ("", "\r\nX-Forwarded-Host: 127.0.0.1", "\r\nForwarded: host=127.0.0.1"):
        head = asking(shared_served, "GET", f"/{place}/kept").replace(
            "Host: 127.0.0.1", f"Host: {host}{more}"
        )
        status, told = exchanged(shared_served, head, b"x")
        assert status == 400, told
        assert b"secret content" not in told


def test_s12_a_host_that_is_missing_or_there_twice_is_refused(shared_served, place):
    whole = asking(shared_served, "GET", f"/{place}/kept")
    twice = whole.replace("Host: 127.0.0.1", "Host: 127.0.0.1\r\nHost: evil.example")
    none = whole.replace("Host: 127.0.0.1\r\n", "")
    for head in (twice, none, none.replace("HTTP/1.1", "HTTP/1.0")):
        assert exchanged(shared_served, head, b"x")[0] == 400
    assert exchanged(shared_served, f"{whole}\r\nConnection: close", b"x")[0] == 200


def test_s12_forwarded_headers_are_believed_by_nobody(shared_served, place):
    spoofed = ("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "X-Forwarded-Proto: https")
    head = asking(shared_served, "GET", f"/{place}/kept", *spoofed)
    without = head.replace(shared_served.token, "w" * 43)
    assert exchanged(shared_served, without, b"x")[0] == 401
    assert "X-Forwarded" not in shared_served.said()


def test_s12_it_answers_to_its_own_names_and_those_it_is_given():
    trusted = TrustedRequests(["store.example"])
    from email.message import Message

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
    with pytest.raises(Refusal, match=r"not called 'other\.example'.*--host-name"):
        trusted.check("GET", headers)
    with pytest.raises(ConfigError, match="--host-name 'http://a' is no name"):
        TrustedRequests(["http://a"])


def test_s12_by_default_no_other_machine_reaches_it(tmp_path: Path):
    from tunemq_scheduler.store_server.server import parse_listen
    from tunemq_scheduler.tools import store

    assert store.DEFAULT_LISTEN == "127.0.0.1:7380"
    assert parse_listen(store.DEFAULT_LISTEN) == ("127.0.0.1", 7380)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", ""])
def test_s12_wherever_it_listens_it_asks_for_a_token(tmp_path: Path, host: str):
    with serving(tmp_path / "server", host) as server:
        assert len(server.token) >= 32
        server.host = "127.0.0.1"
        for head in ("GET /?list=&after= HTTP/1.1", "PUT /a HTTP/1.1"):
            assert exchanged(server, f"{head}\r\nHost: 127.0.0.1\r\nContent-Length: 0")[0] == 401
        assert ("without TLS" in server.said()) is (host != "127.0.0.1")


def test_s12_over_tls_nobody_reads_the_token_on_its_way(tmp_path: Path):
    certificate = Certificate(tmp_path / "certificate")
    options = ("--tls-certificate", str(certificate.file))
    options += ("--tls-key", str(certificate.folder / "private.key"))
    with serving(tmp_path / "server", options=options) as server:
        assert server.url.startswith("https://")
        address = f"{server.url}/place?ca_file={certificate.file}"
        with HttpObjects(parse_http_address(address), server.environ) as objects:
            objects.probe()
            objects.put_bytes("a", bytes(2**20))
            assert objects.get_bytes("a", limit=2**20) == bytes(2**20)
        for wrong in (address.partition("?")[0], f"http{address[5:].partition('?')[0]}"):
            with (
                HttpObjects(parse_http_address(wrong), server.environ) as objects,
                pytest.raises(StoreError),
            ):
                objects.probe()
        # Who connects and does not begin to speak TLS holds up nobody, and is sent away.
        with socket.create_connection((server.host, server.port), timeout=60) as silent:
            with HttpObjects(parse_http_address(address), server.environ) as objects:
                objects.probe()
            silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
            eventually(lambda: _is_over(silent), message="it waits for plain HTTP")
        assert server.stop() == 0


def _is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True
