"""`ServedFolder`: objects as files below one folder, and nothing that is outside of it.

    <folder>/<key>                   an object; its key is its path
    <folder>/.tunemq-store/lock      held by the process that serves the folder
    <folder>/.tunemq-store/token     what clients are let in with, unless that is elsewhere
    <folder>/.tunemq-store/incoming  what is being written; emptied when a server starts

An object appears by one rename, when it is whole and on the disk. Paths are walked a folder at a
time, each opened without following a link, so that no name and no link leads out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from tunemq_scheduler.store_server.refusal import Refusal
from tunemq_shared.errors import ConfigError
from tunemq_shared.failpoints import failpoint
from tunemq_shared.http_wire import Code
from tunemq_shared.manifest import is_safe_name

#: The folder, below the one that is served, with what is the server's own.
OWN: Final = ".tunemq-store"
_INCOMING: Final = "incoming"
_LOCK: Final = "lock"
_AS_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Bytes of the disk that are left for others.
_SPARE: Final = 2**20
#: A folder that somebody removes because it is empty, just when an object is put there.
_TRIES: Final = 100


class ServedFolder:
    """The files below ``root``; made if it is not there.

    **Threads.** Any may call anything. **Processes.** One serves a folder at a time.

    Raises:
        ConfigError: the folder cannot be used, or another process serves it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        try:
            incoming = self.root / OWN / _INCOMING
            incoming.mkdir(parents=True, exist_ok=True)
            (self.root / OWN).chmod(0o700)
            self._lock = os.open(self.root / OWN / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the folder {self.root} cannot be served: {error.filename}: {error.strerror}; "
                "give one that you may write."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"another process serves the folder {self.root}; end that, or serve another one."
            ) from None
        self.fd = os.open(self.root, _AS_FOLDER)
        self._incoming = os.open(incoming, _AS_FOLDER)
        for left in os.listdir(self._incoming):
            os.unlink(left, dir_fd=self._incoming)

    def close(self) -> None:
        """Let another process serve it."""
        for fd in (self._incoming, self.fd, self._lock):
            os.close(fd)

    @contextlib.contextmanager
    def new_file(self, room: int) -> Iterator[tuple[str, BinaryIO]]:
        """The name of a new file that no client sees, and the file; removed if the block fails.

        Args:
            room: So many bytes will be written.

        Raises:
            Refusal: there is no room for them.
        """
        self.check_room(room)
        name = secrets.token_hex(16)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o666, dir_fd=self._incoming)
        try:
            with open(fd, "w+b", buffering=0) as file:
                yield name, file
        except BaseException:
            self.drop(name)
            raise

    def again(self, name: str) -> BinaryIO:
        """The file that `new_file` made, opened once more."""
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._incoming)
        return open(fd, "r+b", buffering=0)

    def drop(self, name: str) -> None:
        """Remove a file that nobody sees."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._incoming)

    def show(self, name: str, key: str) -> None:
        """Make the file, which is whole and on the disk, the object with this key.

        Raises:
            Refusal: the key is none, or something else is at its place.
        """
        for _ in range(_TRIES):
            try:
                with self._folder_of(key, is_made=True) as (folder, last):
                    failpoint("serve.before_rename")
                    os.rename(name, last, src_dir_fd=self._incoming, dst_dir_fd=folder)
                    failpoint("serve.after_rename")
                    os.fsync(folder)
                    return
            except FileNotFoundError:
                continue
            except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
                raise _taken(key) from error
        raise Refusal(Code.BUSY, f"the folder of {key!r} is removed again and again")

    def open_object(self, key: str) -> BinaryIO:
        """The object's file, for reading.

        Raises:
            Refusal: the key is none, or there is no such object.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with self._folder_of(key) as (folder, last):
                fd = os.open(last, flags, dir_fd=folder)
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise Refusal(Code.NO_SUCH_OBJECT, f"there is no {key!r}") from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Refusal(Code.NO_SUCH_OBJECT, f"{key!r} is no file")
        return open(fd, "rb", buffering=0)

    def remove(self, key: str) -> None:
        """Remove the object, if it is there, and what folders are then empty.

        Raises:
            Refusal: the key is none.
        """
        try:
            with self._folder_of(key) as (folder, last):
                if not stat.S_ISDIR(os.lstat(last, dir_fd=folder).st_mode):
                    os.unlink(last, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            return
        while "/" in key:
            key = key.rpartition("/")[0]
            try:
                with self._folder_of(key) as (folder, last):
                    os.rmdir(last, dir_fd=folder)
            except OSError:  # it is not empty, or somebody was faster
                return

    def check_room(self, needed: int) -> None:
        """Return if the disk has room for so many bytes.

        Raises:
            Refusal: it has not.
        """
        disk = os.fstatvfs(self.fd)
        free = disk.f_bavail * disk.f_frsize
        if needed + _SPARE > free:
            raise Refusal(
                Code.FULL,
                f"the disk of the served folder {self.root} is full: {needed} bytes are to be "
                f"written, {free} are free",
            )

    @contextlib.contextmanager
    def _folder_of(self, key: str, *, is_made: bool = False) -> Iterator[tuple[int, str]]:
        """The open folder that the object is in, and its name there."""
        check_key(key)
        *parts, last = key.split("/")
        folder = os.dup(self.fd)
        try:
            for part in parts:
                if is_made:
                    _make(part, folder)
                below = os.open(part, _AS_FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
            yield folder, last
        finally:
            os.close(folder)


_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


def check_key(key: str) -> None:
    """Return if the key may be that of an object.

    Raises:
        Refusal: it may not.
    """
    if not is_safe_name(key) or key.split("/", 1)[0] == OWN:
        raise Refusal(Code.BAD_REQUEST, f"{key!r} is not the key of an object")


def _make(name: str, folder: int) -> None:
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return
    os.fsync(folder)


def _taken(key: str) -> Refusal:
    return Refusal(
        Code.TAKEN,
        f"{key!r} cannot be an object here: it is a folder, or a part of it is a file or a link",
    )
