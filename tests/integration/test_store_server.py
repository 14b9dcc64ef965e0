"""`tunemq store serve`: who is let in, what cannot be asked for, and who holds up nobody."""

from __future__ import annotations

import hashlib
import json
import os
import stat

import pytest

from tests.raw_requests import connect, raw, whole, writing
from tests.served_folders import serving
from tests.support import eventually
from tunemq_shared.http_address import parse_http_address
from tunemq_shared.http_objects import HttpObjects
from tunemq_shared.object_client import Refused
from tunemq_shared.object_store import MissingObject
from tunemq_shared.parts import PART
from tunemq_shared.retrying import Cancel

__all__ = ["connect", "raw"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


# --- who is let in --------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "wrong" * 8, "ü" * 43])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "POST"])
def test_nobody_is_let_in_without_the_token(shared_served, raw, method, token):
    place = shared_served.create_bucket()
    with shared_served.objects(place) as objects:
        objects.put_bytes("secret", b"secret")
    status, told = raw.ask(f"{method} /{place}/secret HTTP/1.1", token=token)
    assert status == 401
    assert b"secret" not in told
    assert raw.is_closed()
    with shared_served.objects(place) as objects:
        assert objects.get_bytes("secret", limit=6) == b"secret"


def test_who_has_the_beginning_of_the_token_or_none_at_all_is_told_what_to_do(shared_served):
    address = parse_http_address(shared_served.address("a"))
    for token in (shared_served.token[:-1], shared_served.token + "x"):
        with (
            HttpObjects(address, {"TUNEMQ_STORE_TOKEN": token}) as objects,
            pytest.raises(Refused, match=r"not the server's token; set TUNEMQ_STORE_TOKEN") as told,
        ):
            objects.probe()
        assert token[:20] not in str(told.value)


def test_a_large_file_is_refused_with_the_reason_too(shared_served, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(PART))
    sha256 = hashlib.sha256(bytes(PART)).hexdigest()
    address = parse_http_address(shared_served.address("a"))
    with HttpObjects(address, {"TUNEMQ_STORE_TOKEN": "wrong" * 8}) as objects:
        for _ in range(5):
            with pytest.raises(Refused, match="not the server's token"):
                objects.put_file("a", file, size=PART, sha256=sha256, cancel=Cancel(100))


def test_the_token_is_made_once_and_for_its_owner_only(tmp_path):
    with serving(tmp_path / "server") as server:
        token = server.token
        assert stat.S_IMODE(server.token_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(server.token_file.parent.stat().st_mode) == 0o700
        assert token not in server.said()
        assert str(server.token_file) in server.said()
        server.stop()
        server.start()
        assert server.token == token


# --- what cannot be asked for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/../outside",
        "/a/../../outside",
        "/%2e%2e/outside",
        "/a/%2e%2e%2f..%2foutside",
        "/a//outside",
        "/./outside",
        "//outside/",
        "/a%00b",
        "/%ff",
        "/ü",
        "/.tunemq-store/token",
        "/.tunemq-store%2Ftoken",
        "/%2etunemq-store/lock",
        "http://other/outside",
        "outside",
        "*",
        "/",
        "/a?list=",
        "/?list=",
        "/a?upload=x",
        "/a?upload=x&start=-1",
        "/a?upload=../../x&start=0",
    ],
)
def test_what_is_no_object_cannot_be_reached(shared_served, connect, path):
    outside = shared_served.data.parent / "outside"
    outside.write_bytes(b"outside")
    before = shared_served.token
    for line in (f"GET {path}", f"DELETE {path}", f"PUT {path}", f"POST {path}"):
        raw = connect(shared_served)
        head = writing("", b"x").partition("\r\n")[2]
        status, told = raw.ask(f"{line} HTTP/1.1\r\n{head}", b"x")
        assert status in (400, 404), (line, told)
        assert before.encode() not in told
    assert outside.read_bytes() == b"outside"
    assert shared_served.token == before


def test_links_lead_nowhere(shared_served, tmp_path):
    place = shared_served.create_bucket()
    folder = shared_served.data / place
    with shared_served.objects(place) as objects:
        objects.put_bytes("real/file", b"real")
        (tmp_path / "secret").write_bytes(b"secret")
        (folder / "file").symlink_to(tmp_path / "secret")
        (folder / "folder").symlink_to(tmp_path)
        (folder / "inside").symlink_to(folder / "real")
        os.mkfifo(folder / "pipe")
        for key in ("file", "folder/secret", "inside/file", "pipe", "real"):
            with pytest.raises(MissingObject):
                objects.get_bytes(key, limit=100)
        assert [found.key for found in objects.list()] == ["real/file"]
        for key in ("folder/new", "inside/new", "real"):
            with pytest.raises(Refused, match="is a folder, or a part of it is a file or a link"):
                objects.put_bytes(key, b"new")
        objects.delete(["folder/secret", "inside/file", "real"])
        objects.put_bytes("file", b"new")  # in the place of the link, not where it leads
        assert objects.get_bytes("file", limit=3) == b"new"
        assert objects.get_bytes("real/file", limit=4) == b"real"
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_an_object_is_not_below_another(shared_served):
    with shared_served.objects(shared_served.create_bucket()) as objects:
        objects.put_bytes("a", b"")
        with pytest.raises(Refused, match="/a/b' cannot be an object here"):
            objects.put_bytes("a/b", b"")
        with pytest.raises(Refused, match="file system takes no such name"):
            objects.put_bytes("x" * 300, b"")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked", 400),
        ("PUT /a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        ("PUT /a HTTP/1.1\r\nContent-Length: -1", 400),
        ("PUT /a HTTP/1.1\r\nContent-Length: 0x1", 400),
        ("PUT /a HTTP/1.1", 400),
        ("POST /a?upload=x HTTP/1.1\r\nContent-Length: 99999999", 400),
        ("GET /?list=&after=&more= HTTP/1.1", 400),
        ("GET /?list=%ff&after= HTTP/1.1", 400),
        ("GET /a HTTP/1.1\r\nRange: bytes=-5", 404),
        ("GET /a HTTP/1.1\r\nRange: lines=1-5", 404),
        ("PATCH /a HTTP/1.1", 400),
        ("GET /a HTTP/9.9", 505),
        ("GET /a b c HTTP/1.1", 400),
        ("\x00\x01\x02", 400),
        ("GET /a", 400),
        (f"GET /{'a' * 40_000} HTTP/1.1", 431),
        (f"GET /a HTTP/1.1\r\nX: {'a' * 40_000}", 431),
        ("GET /a HTTP/1.1" + "\r\nX: a" * 150, 431),
    ],
)
def test_requests_that_no_client_makes_are_refused(shared_served, raw, head, status):
    if status == 431:
        raw.socket.sendall(f"{head}\r\n\r\n".encode())
        assert raw.answer()[0] == status
        assert raw.is_closed()
    else:
        got, told = raw.ask(head)
        assert got in (status, 401), told
        assert json.loads(told)["code"]
    with shared_served.objects() as objects:
        objects.probe()


def test_what_does_not_have_its_hash_makes_no_object(shared_served, raw):
    place, before = shared_served.create_bucket(), shared_served.incoming()
    status, told = raw.ask(writing(f"{place}/a", b"data", sha256="0" * 64), b"data")
    assert (status, json.loads(told)["code"]) == (422, "Damaged")
    with shared_served.objects(place) as objects:
        assert list(objects.list()) == []
    assert set(shared_served.incoming()) <= set(before)


def test_a_part_that_is_sent_twice_is_what_came_last(shared_served, connect):
    """And what an older sender of it still holds is not written any more."""
    place = shared_served.create_bucket()
    slow, quick = connect(shared_served), connect(shared_served)
    _, told = quick.ask(f"POST /{place}/a?upload= HTTP/1.1\r\nContent-Length: 0")
    upload = json.loads(told)["upload"]
    old, new = b"o" * 1000, b"n" * 1000
    target = f"{place}/a?upload={upload}&start=0"
    head = whole(writing(target, old), shared_served.token)
    slow.socket.sendall(head.encode() + old[:500])
    file = shared_served.data / ".tunemq-store" / "incoming" / upload
    eventually(lambda: file.read_bytes() == old[:500])
    assert quick.ask(writing(target, new), new)[0] == 201
    slow.socket.sendall(old[500:])
    assert slow.answer()[0] == 404
    parts = json.dumps({"hashes": [hashlib.sha256(new).hexdigest()]}).encode()
    complete = f"POST /{place}/a?upload={upload} HTTP/1.1\r\nContent-Length: {len(parts)}"
    # Who did not hear that it was done asks again.
    assert [quick.ask(complete, parts)[0] for _ in range(2)] == [201, 201]
    with shared_served.objects(place) as objects:
        assert objects.get_bytes("a", limit=1000) == new
        assert objects.abort_uploads(lambda _key: True) == 0


def test_a_file_is_complete_only_with_all_of_its_parts(shared_served, raw):
    place = shared_served.create_bucket()
    _, told = raw.ask(f"POST /{place}/a?upload= HTTP/1.1\r\nContent-Length: 0")
    upload = json.loads(told)["upload"]
    hashes = [hashlib.sha256(part).hexdigest() for part in (b"first", b"second")]
    body = json.dumps({"hashes": hashes}).encode()
    complete = f"POST /{place}/a?upload={upload} HTTP/1.1\r\nContent-Length: {len(body)}"
    assert raw.ask(writing(f"{place}/a?upload={upload}&start=5", b"second"), b"second")[0] == 201
    assert raw.ask(complete, body)[0] == 400
    assert raw.ask(writing(f"{place}/a?upload={upload}&start=0", b"other"), b"other")[0] == 201
    assert raw.ask(complete, body)[0] == 400
    assert raw.ask(writing(f"{place}/a?upload={upload}&start=0", b"first"), b"first")[0] == 201
    assert raw.ask(complete, body)[0] == 201
    assert raw.ask(f"GET /{place}/a HTTP/1.1") == (200, b"firstsecond")


def test_a_part_of_an_object_can_be_read(shared_served, raw):
    key = f"{shared_served.create_bucket()}/a"
    assert raw.ask(writing(key, b"0123456789"), b"0123456789")[0] == 201
    for asked, status, got in [
        ("0-0", 206, b"0"),
        ("3-5", 206, b"345"),
        ("8-", 206, b"89"),
        ("8-99", 206, b"89"),
        ("0-9", 200, b"0123456789"),
        ("10-", 416, None),
        ("-5", 400, None),
    ]:
        found = raw.ask(f"GET /{key} HTTP/1.1\r\nRange: bytes={asked}")
        assert found[0] == status, asked
        assert got is None or found[1] == got
