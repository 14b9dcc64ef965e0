"""Opening files in folders where trials write and may have put anything in their place."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

import pytest

from tests.support.leases import leased
from tests.support.waiting import eventually
from tunemq_shared.system import plain_files
from tunemq_shared.system.plain_files import open_to_read, open_to_write, sha256_of

#: The user of the tests or, for root, a user without rights.
OWNER = os.geteuid() or 65534


def write(path, text):
    descriptor = open_to_write(str(path), os.O_WRONLY | os.O_APPEND)
    with open(descriptor, "a") as file:
        file.write(text)


def test_regular_file_is_appended_to(tmp_path):
    write(tmp_path / "a", "1")
    write(tmp_path / "a", "2")

    with open_to_read(tmp_path / "a") as file:
        assert file.read() == b"12"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/full", path)])
def test_other_entry_is_moved_aside_for_a_writer_and_missing_for_a_reader(put, tmp_path):
    path = tmp_path / "a"
    put(path)
    with pytest.raises(FileNotFoundError):
        open_to_read(path)

    write(path, "1")
    path.unlink()
    put(path)
    write(path, "2")

    assert path.read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == ["a", "a.not-a-file", "a.not-a-file-2"]


def test_missing_folder_or_file_in_its_place_is_replaced(tmp_path):
    path = tmp_path / "folder" / "a"
    with pytest.raises(FileNotFoundError):
        open_to_read(path)
    write(path, "1")
    os.unlink(path)
    os.rmdir(path.parent)
    path.parent.write_text("a file")
    with pytest.raises(FileNotFoundError):
        open_to_read(path)

    write(path, "2")

    assert path.read_text() == "2"
    assert (tmp_path / "folder.not-a-file").read_text() == "a file"


def test_file_and_folder_without_rights_are_written_by_their_owner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o711)
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "a").write_text("1")
    (folder / "a").chmod(0)
    folder.chmod(0)
    for path in (folder, folder / "a"):
        os.chown(path, OWNER, -1)

    child = os.fork()
    if not child:  # root may write everywhere
        try:
            os.setuid(OWNER)
            write("trial/a", "2")
            os._exit(0)
        except BaseException:  # noqa: BLE001  printed; the parent tells by the exit code
            traceback.print_exc()
            os._exit(1)

    assert os.waitpid(child, 0)[1] == 0
    assert (folder / "a").read_text() == "12"


#: Replaces a folder by nothing, by a file and by a folder, as fast as it can.
DISTURB = """
import os, sys
folder = sys.argv[1]
print(flush=True)
while True:
    for change in (lambda: open(folder, "x").close(), lambda: os.unlink(folder),
                   lambda: os.mkdir(folder), lambda: os.unlink(f"{folder}/a"),
                   lambda: os.rmdir(folder)):
        try:
            change()
        except OSError:
            pass
"""


def test_file_is_opened_while_its_folder_is_replaced_all_the_time(tmp_path):
    folder = tmp_path / "folder"
    command = [sys.executable, "-c", DISTURB, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as disturber:
        try:
            assert disturber.stdout is not None
            disturber.stdout.readline()
            for _ in range(300):
                write(folder / "a", "1")
        finally:
            disturber.kill()


def test_leased_file_is_skipped_by_a_reader_and_moved_aside_by_a_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_files, "LEASE_S", 0.1)
    path = tmp_path / "a"
    with leased(path):
        with pytest.raises(BlockingIOError):
            open_to_read(path)
        write(path, "1")
    assert path.read_text() == "1"
    assert sorted(os.listdir(tmp_path)) == ["a", "a.not-a-file"]


def test_file_whose_lease_is_returned_on_request_is_appended_to(tmp_path):
    """NFS and Samba servers give back leases in this way."""
    path = tmp_path / "a"
    path.write_text("1")
    descriptor = os.open(path, os.O_RDONLY)
    give_back = partial(fcntl.fcntl, descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    before = signal.signal(signal.SIGIO, lambda *_: give_back())
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        write(path, "2")
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)
    assert path.read_text() == "12"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("length", [0, 1, 2**18, 2**18 + 1])
def test_file_is_hashed_whole(tmp_path, length):
    file = tmp_path / "file"
    file.write_bytes(b"x" * length)
    with open_to_read(file) as opened:
        expected = hashlib.sha256(b"x" * length).hexdigest(), length
        assert sha256_of(opened, length) == expected


def test_endless_file_is_hashed_to_one_byte_beyond_its_size(tmp_path):
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(2**43)
    with open_to_read(file) as opened:
        _, hashed = sha256_of(opened, 1_000_000)
    assert hashed == 1_000_001


#: Keep a FIFO locked, by an end that only waits.
LOCKS = """
import os, socket, sys
fifo = os.open(sys.argv[1], os.O_RDWR)
silent, _other = socket.socketpair()
print(flush=True)
os.splice(silent.fileno(), fifo, 4096)
"""


@pytest.mark.parametrize("opens", ["open_plain(path, 0)", "read_below(path.parent, 'a', 9)"])
def test_fifo_that_another_process_locks_is_not_waited_for(opens, tmp_path):
    path = tmp_path / "a"
    os.mkfifo(path)
    program = f"""
from pathlib import Path
from tunemq_shared.system.plain_files import open_plain, read_below
path = Path({str(path)!r})
try:
    print({opens})
except FileNotFoundError:
    print(None)
"""
    with subprocess.Popen([sys.executable, "-c", LOCKS, path], stdout=subprocess.PIPE) as locks:
        assert locks.stdout is not None
        locks.stdout.readline()
        stat = Path(f"/proc/{locks.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as opener:
            try:
                assert opener.communicate(timeout=30)[0] == b"None\n"
            finally:
                locks.kill()  # only this ends an opener that waits
