"""Open files in folders that trials' code can write to, whatever it put in their place.

A FIFO would block the process that opens it, even with O_NONBLOCK if another process locks it
(`splice`), and so would a lease (F_SETLEASE; 45 s per file); a link would lead out of the folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Final

#: Retries if a trial's code replaces the file at the same time.
TRIES: Final = 1000
#: Seconds to wait for another process's lease where waiting is harmless: NFS and Samba servers
#: release theirs when asked, a trial may not.
LEASE_S: Final = 5.0
_LEASE_PAUSE_S: Final = 0.01
_BUFFER_BYTES: Final = 2**18

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_plain(path: str | os.PathLike[str], flags: int, *, lease_s: float = 0.0) -> int | None:
    """Open a regular file; returns its descriptor, or None if there is something else.

    Args:
        path: The file.
        flags: As for `os.open`.
        lease_s: Seconds to wait for another process's lease; it never waits for anything else.

    Raises:
        OSError: It cannot be opened; FileNotFoundError if there is nothing, BlockingIOError if
            another process keeps a lease on it.
    """
    if flags & os.O_EXCL:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + lease_s
    while True:
        try:
            descriptor = _open_if_regular(path, flags & ~os.O_CREAT)
            break
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            with suppress(FileExistsError):  # another process has just made it
                return os.open(path, flags | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LEASE_PAUSE_S)
    if descriptor is not None:
        os.set_blocking(descriptor, True)  # a child that inherits it may expect that
    return descriptor


def _open_if_regular(
    path: str | os.PathLike[str], flags: int, *, at: int | None = None
) -> int | None:
    """Open an existing file; returns None, and opens nothing, if it is not a regular one."""
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return None
        return os.open(f"/proc/self/fd/{found}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(found)


def open_regular(path: str | os.PathLike[str], flags: int, *, lease_s: float = 0.0) -> int:
    """Open a regular file; see `open_plain`.

    Raises:
        OSError: It cannot be opened; FileNotFoundError also if there is something else.
    """
    descriptor = open_plain(path, flags, lease_s=lease_s)
    if descriptor is None:
        raise FileNotFoundError(errno.ENOENT, "it is no regular file", os.fspath(path))
    return descriptor


def open_to_read(path: str | os.PathLike[str], *, restores_rights: bool = False) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: The file.
        restores_rights: Change permissions that forbid reading, if this process may.

    Raises:
        OSError: It cannot be opened; FileNotFoundError also if there is something else.
    """
    try:
        return os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "it is no regular file", os.fspath(path)) from error
    except PermissionError:
        if not restores_rights:
            raise
        allow(os.path.dirname(path), 0o700)
        allow(os.fspath(path), 0o600)
        return open_to_read(path)


def read_plain(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file; waits for another process's lease.

    Raises:
        OSError: As `open_regular`.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY, lease_s=LEASE_S), "rb") as file:
        return file.read()


def open_to_write(path: str, flags: int) -> int:
    """Open a regular file in a trial's folder for writing; both are made if missing.

    Other kinds of files with these names, and a file whose lease is not released, are renamed to
    ``NAME.not-a-file``: one trial's files must not end a search.

    Args:
        path: The file.
        flags: As for `os.open`; O_CREAT is added.

    Raises:
        OSError: It cannot be opened.
    """
    problem = OSError(errno.EEXIST, "something else than a file is put there", path)
    may_allow = True
    for _ in range(TRIES):
        try:
            descriptor = open_plain(path, flags | os.O_CREAT, lease_s=LEASE_S)
        except BlockingIOError as error:
            problem = error
            with suppress(FileNotFoundError):
                move_aside(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            problem = error
            make_folder(os.path.dirname(path))
        except PermissionError:
            if not may_allow:
                raise
            may_allow = False
            allow(os.path.dirname(path), 0o700)
            allow(path, 0o600)
        else:
            if descriptor is not None:
                return descriptor
            with suppress(FileNotFoundError):
                move_aside(path)
    raise problem


def make_folder(path: str) -> None:
    """Make a trial's folder if it is missing; another kind of file there is renamed.

    Raises:
        OSError: It cannot be made.
    """
    problem = OSError(errno.EEXIST, "something else than a folder is put there", path)
    for _ in range(TRIES):
        try:
            os.makedirs(path, exist_ok=True)
            if not os.path.islink(path):
                return
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            problem = error
            if os.path.isdir(path) and not os.path.islink(path):
                return
        with suppress(FileNotFoundError):
            move_aside(path)
    raise problem


def allow(path: str, mode: int) -> None:
    """Give the owner of this path these permissions, if this process may; follow no link."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
        finally:
            os.close(descriptor)


@contextmanager
def opened_below(folder: Path, name: str) -> Iterator[Path]:
    """Yield a path that leads to one open regular file, whatever is renamed meanwhile.

    No folder of ``name`` may be a link, nor the last two of ``folder``, which a trial's user can
    replace: a link into ``/proc/self`` has the rights of the process that follows it.

    Raises:
        OSError: There is no such file, or something else.
    """
    path = folder / name
    *folders, last = path.relative_to(folder.parents[1]).parts
    at = os.open(folder.parents[1], _FOLDER)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        file = _open_if_regular(last, os.O_RDONLY, at=at)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "it is no regular file")
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(at)
    try:
        yield Path(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


def read_below(folder: Path, name: str, limit: int) -> bytes:
    """Read a small file, found as by `opened_below`.

    Raises:
        OSError: There is no such file, or something else, or it has more than ``limit`` bytes.
    """
    with opened_below(folder, name) as file, file.open("rb") as opened:
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", os.fspath(folder / name))
    return data


def move_aside(path: str) -> None:
    """Rename a foreign file to the first free ``NAME.not-a-file``, ``...-2``, and so on.

    Raises:
        OSError: It cannot be renamed.
    """
    aside, number = f"{path}.not-a-file", 1
    while os.path.lexists(aside):
        number += 1
        aside = f"{path}.not-a-file-{number}"
    os.rename(path, aside)


def sha256_of(file: BufferedReader, size: int) -> tuple[str, int]:
    """Hash a file that should have ``size`` bytes; return the SHA-256 in hex and the bytes hashed.

    It reads at most one byte more: a trial may have made the file endless.
    """
    digest, hashed = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while hashed <= size and (read := file.readinto(buffer[: size + 1 - hashed])):
        digest.update(buffer[:read])
        hashed += read
    return digest.hexdigest(), hashed
