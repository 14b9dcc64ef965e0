"""`tunemq store serve` with strange clients, on a bad day; and its client with strange servers."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from tests.object_servers import Certificate
from tests.raw_requests import connect, raw, whole, writing
from tests.served_folders import serving
from tests.small_disk import on_small_disk
from tests.support import eventually
from tunemq_scheduler.store_server.guests import Guests
from tunemq_scheduler.store_server.server import StoreServer
from tunemq_shared import remote_objects
from tunemq_shared.errors import StoreError
from tunemq_shared.http_address import parse_http_address
from tunemq_shared.http_objects import HttpObjects
from tunemq_shared.object_client import Refused
from tunemq_shared.remote_objects import PROBE_S
from tunemq_shared.retrying import Cancel, StoreUnavailable, in_parallel, retried

__all__ = ["connect", "raw"]

pytestmark = pytest.mark.integration


# --- who holds up nobody --------------------------------------------------------------------------


def test_connections_that_say_nothing_or_little_hold_up_nobody(tmp_path, connect):
    with serving(tmp_path / "server") as server:
        idle = [connect(server) for _ in range(60)]
        for one in idle[::2]:
            one.socket.sendall(b"GET /a HTTP/1.1\r\nX-Slow: ")
        half = connect(server)
        head = whole(writing("half", bytes(1000)), server.token)
        half.socket.sendall(head.encode() + bytes(10))
        with server.objects() as objects:
            for n in range(20):
                objects.put_bytes(f"a/{n}", bytes(1000))
            assert len(list(objects.list("a/"))) == 20
            assert [found.key for found in objects.list("h")] == []
        for one in [*idle, half]:
            one.socket.close()
        eventually(lambda: not server.incoming())


def test_where_there_is_no_room_the_one_goes_that_waits_longest():
    guests = Guests(most=3)
    pairs = [socket.socketpair() for _ in range(5)]
    ours = [pair[0] for pair in pairs]
    try:
        assert all(guests.admit(one) for one in ours[:3])
        guests.is_served(ours[0])
        assert guests.admit(ours[3])
        pairs[1][1].settimeout(5)
        assert pairs[1][1].recv(1) == b""
        for one in ours[2:4]:
            guests.is_served(one)
        assert not guests.admit(ours[4])
        guests.leave(ours[0])
        assert guests.admit(ours[4])
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def test_many_write_and_remove_in_the_same_folders_at_once(tmp_path):
    with serving(tmp_path / "server") as server, server.objects("a/b") as objects:

        def work(n: int, cancel: Cancel) -> None:
            data = str(n).encode() * 100
            key = f"same/folder/{n}"
            for left in reversed(range(8)):
                retried(lambda: objects.put_bytes(key, data), cancel)
                retried(lambda: objects.put_bytes("same/one", data), cancel)
                assert objects.get_bytes(key, limit=10**6) == data
                if left:
                    objects.delete([key])

        in_parallel(work, range(8), Cancel(200), at_once=8)
        one = objects.get_bytes("same/one", limit=10**6)
        assert one in [str(n).encode() * 100 for n in range(8)]
        assert len(list(objects.list("same/folder/"))) == 8
        objects.delete([found.key for found in objects.list()])
        assert list(objects.list()) == []
        assert [path.name for path in server.data.iterdir()] == [".tunemq-store"]
        assert server.incoming() == []


# --- the server's own troubles --------------------------------------------------------------------


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
import hashlib, sys, threading
from pathlib import Path
from tunemq_scheduler.store_server.server import StoreServer
from tunemq_shared.http_address import parse_http_address
from tunemq_shared.http_objects import HttpObjects
from tunemq_shared.retrying import Cancel, StoreUnavailable, TimedOut
token = "t" * 20
server = StoreServer(Path(sys.argv[1]), "127.0.0.1:0", token)
thread = threading.Thread(target=server.run)
thread.start()
objects = HttpObjects(parse_http_address(server.address), {"TUNEMQ_STORE_TOKEN": token})
objects.put_bytes("kept", b"kept")
try:
    objects.put_bytes("large", bytes(9 * 2**20))
except StoreUnavailable as error:
    print(error)
file = Path(sys.argv[1], "..", "large")
file.write_bytes(bytes(20 * 2**20))
sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
try:
    objects.put_file("large", file, size=20 * 2**20, sha256=sha256, cancel=Cancel(5))
except TimedOut as error:
    print(error)
print([found.key for found in objects.list()])
server.stop()
thread.join()
"""
    command = [sys.executable, "-c", script, str(disk)]
    done = subprocess.run(
        on_small_disk(disk, command, options="size=8m"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, listed = done.stdout.splitlines()
    assert f"the disk of the served folder {disk} is full: 9437184 bytes are to be wr" in first
    assert first.endswith("are free; make room there.")
    assert "Gave up after 5 s" in second
    assert listed == "['kept']"


def test_a_folder_is_served_by_one_process(tmp_path):
    with serving(tmp_path / "server") as server:
        (server.data / ".tunemq-store" / "incoming" / "left").touch()
        command = [sys.executable, "-m", "tunemq", "store", "serve", str(server.data)]
        done = subprocess.run(
            [*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 64
        assert f"another process serves the folder {server.data}; end that" in done.stderr
        server.kill()
        server.start()
        assert server.incoming() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "7380"], "--listen '7380' is not usable; give HOST:PORT"),
        (["--listen", "::1:7380"], "is not usable; give HOST:PORT"),
        (["--listen", "host:70000"], "is not usable; give HOST:PORT"),
        (["--listen", "192.0.2.1:0"], "choose an address of this machine"),
        (["--token-file", "/dev/null"], "has no token in it"),
        (["--token-file", "/proc/token"], "--token-file /proc/token cannot be made"),
    ],
)
def test_what_cannot_be_served_is_told(tmp_path, options, message):
    command = [sys.executable, "-m", "tunemq", "store", "serve", str(tmp_path / "x"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 64
    assert message in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_it_is_told_to(tmp_path, connect, how):
    with serving(tmp_path / "server") as server, server.objects() as objects:
        objects.put_bytes("a", b"a")
        idle = connect(server)
        assert server.stop(how) == 0
        assert server.said().endswith("Stopped.\n")
        assert idle.is_closed()
        with pytest.raises(StoreUnavailable, match=r"cannot be reached.*check that `tunemq store"):
            objects.get_bytes("a", limit=1)
        server.start()
        assert objects.get_bytes("a", limit=1) == b"a"


def test_it_speaks_ipv6(tmp_path):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with serving(tmp_path / "server", host="[::1]") as server, server.objects("a") as objects:
        assert server.url.startswith("http://[::1]:")
        objects.probe()


# --- what answers there is something else ---------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<p/>", Refused, "is no `tunemq store serve"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\n<p/>", Refused, "is no `tunemq store serve"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Refused, "is no `tunemq store serve`"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n", StoreUnavailable, "HTTP status 502"),
        (b"", StoreUnavailable, "cannot be reached"),
        (b"HTTP/1.1 200 OK\r\nX-TuneMQ-Store: 2\r\n\r\n", Refused, "it speaks version 2"),
        (
            b"HTTP/1.1 200 OK\r\nX-TuneMQ-Store: 1\r\nContent-Length: 9\r\n\r\nhalf",
            StoreUnavailable,
            "hung up 5 bytes before the end",
        ),
    ],
)
def test_what_is_no_store_is_told(answer, kind, message):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # who asked may have gone
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = parse_http_address(f"http://127.0.0.1:{listener.getsockname()[1]}/a")
        with (
            HttpObjects(address, {"TUNEMQ_STORE_TOKEN": "t" * 20}) as objects,
            pytest.raises(kind, match=message),
        ):
            objects.get_bytes("a", limit=100)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_it_can_be_behind_https(tmp_path):
    certificate = Certificate(tmp_path / "certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.folder / "private.key")
    token = {"TUNEMQ_STORE_TOKEN": "t" * 20}
    server = StoreServer(tmp_path / "data", "127.0.0.1:0", "t" * 20)
    server._listener = context.wrap_socket(server._listener, server_side=True)
    thread = threading.Thread(target=server.run)
    thread.start()
    place = f"https{server.address[4:]}/a"
    with HttpObjects(parse_http_address(f"{place}?ca_file={certificate.file}"), token) as objects:
        objects.probe()
        objects.put_bytes("a", bytes(2**20))
        assert objects.get_bytes("a", limit=2**20) == bytes(2**20)
    with (
        HttpObjects(parse_http_address(place), token) as objects,
        pytest.raises(Refused, match=r"certificate verify failed.*name its certificate"),
    ):
        objects.probe()
    server.stop()
    thread.join()


def test_https_where_there_is_http(shared_served):
    address = parse_http_address(f"https{shared_served.url[4:]}/a")
    with (
        HttpObjects(address, shared_served.environ) as objects,
        pytest.raises(StoreError, match=r"no secure connection.*check http or https"),
    ):
        objects.probe()


def test_a_server_that_accepts_and_says_nothing_is_given_up(tmp_path, monkeypatch):
    with serving(tmp_path / "server") as server, server.objects() as objects:
        server.freeze()
        with pytest.raises(StoreError, match=f"Gave up after {PROBE_S:g} s"):
            objects.probe()
        server.thaw()
        monkeypatch.setattr(remote_objects, "PROBE_S", 60.0)  # it may take its time
        objects.probe()
