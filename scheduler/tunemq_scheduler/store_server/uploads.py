"""`Uploads`: large files that come in parts, each written to its place in one hidden file.

They are forgotten when the server ends: whoever sends one begins it again.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, Final

from tunemq_scheduler.store_server.refusal import Refusal
from tunemq_scheduler.store_server.served_folder import ServedFolder, check_key
from tunemq_shared.http_wire import Code, UnderWay

#: An upload of which nothing has come for so many seconds is forgotten.
_FORGOTTEN_AFTER_S: Final = 86_400.0
#: So many ids of completed uploads are known: who did not hear of the end asks again.
_REMEMBERED: Final = 1000


class _Upload:
    """One file on its way.

    Of a part that is sent again, because its connection broke, only the newest sender may write:
    what an old one still holds must never come behind it.
    """

    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.name = name
        self.lock = threading.Lock()
        self.touched = time.monotonic()
        #: Where each part begins -> who writes it; gone when the file is complete.
        self.writers: dict[int, object] = {}
        #: Where each part begins -> its length and hash, once it is on the disk.
        self.parts: dict[int, tuple[int, str]] = {}
        self.is_complete = False


class Uploads:
    """All uploads under way. **Threads.** Any may call anything."""

    def __init__(self, folder: ServedFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._uploads: dict[str, _Upload] = {}
        self._completed: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)

    def begin(self, key: str) -> str:
        """A new upload's id."""
        check_key(key)
        self._forget_old()
        with self._folder.new_file(0) as (name, _file):
            pass
        with self._lock:
            self._uploads[name] = _Upload(key, name)
        return name

    def under_way(self) -> tuple[UnderWay, ...]:
        """All uploads that are neither complete nor thrown away."""
        with self._lock:
            return tuple(UnderWay(one.key, one.name) for one in self._uploads.values())

    def take_part(
        self,
        key: str,
        name: str,
        start: int,
        length: int,
        sha256: str,
        receive: Callable[[Callable[[memoryview], None]], str],
    ) -> None:
        """Write a part to its place.

        Args:
            receive: Hands each piece of the part to what it is given; returns the hash of all.

        Raises:
            Refusal: there is no such upload, no room, or the part was damaged on its way.
        """
        upload, me = self._find(key, name), object()
        self._folder.check_room(length)
        with upload.lock:
            upload.writers[start] = me
            upload.parts.pop(start, None)
        with self._again(upload) as file:
            place = start

            def write(piece: memoryview) -> None:
                nonlocal place
                with upload.lock:
                    if upload.writers.get(start) is not me:
                        raise Refusal(Code.NO_SUCH_UPLOAD, "somebody else sends this part")
                    place += _write_at(file, piece, place)

            found = receive(write)
            if found != sha256:
                raise damaged(sha256, found)
            os.fdatasync(file.fileno())
        with upload.lock:
            if upload.writers.get(start) is not me:
                raise Refusal(Code.NO_SUCH_UPLOAD, "somebody else sends this part")
            upload.parts[start] = (length, sha256)
            upload.touched = time.monotonic()

    def complete(self, key: str, name: str, hashes: Sequence[str]) -> None:
        """Make the object of the parts.

        Raises:
            Refusal: there is no such upload, or these are not its parts.
        """
        with self._lock:
            if name in self._completed:
                return
        upload = self._find(key, name)
        with upload.lock:
            if upload.is_complete:
                return
            end = 0
            for start, (length, _) in sorted(upload.parts.items()):
                if start != end:
                    raise Refusal(Code.BAD_REQUEST, f"the part that begins at {end} is missing")
                end = start + length
            if [sha256 for _, (_, sha256) in sorted(upload.parts.items())] != list(hashes):
                raise Refusal(Code.BAD_REQUEST, "the parts that came are others")
            upload.writers.clear()
            with self._again(upload) as file:
                file.truncate(end)
                os.fsync(file.fileno())
            self._folder.show(upload.name, key)
            upload.is_complete = True
        with self._lock:
            self._completed.append(name)
            self._uploads.pop(name, None)

    def abort(self, key: str, name: str) -> None:
        """Throw the parts away.

        Raises:
            Refusal: there is no such upload.
        """
        upload = self._find(key, name)
        with self._lock:
            self._uploads.pop(name, None)
        with upload.lock:
            upload.writers.clear()
        self._folder.drop(upload.name)

    def _again(self, upload: _Upload) -> BinaryIO:
        try:
            return self._folder.again(upload.name)
        except FileNotFoundError:
            raise _forgotten(upload.name) from None

    def _find(self, key: str, name: str) -> _Upload:
        with self._lock:
            upload = self._uploads.get(name)
        if upload is None or upload.key != key:
            raise _forgotten(name)
        return upload

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _FORGOTTEN_AFTER_S
        with self._lock:
            old = [one for one in self._uploads.values() if one.touched < oldest]
        for one in old:
            with contextlib.suppress(Refusal):  # its owner was faster
                self.abort(one.key, one.name)


def damaged(expected: str, found: str) -> Refusal:
    """What came has another hash than what was sent."""
    return Refusal(Code.DAMAGED, f"expected SHA-256 {expected}, found {found}")


def _forgotten(name: str) -> Refusal:
    return Refusal(Code.NO_SUCH_UPLOAD, f"there is no upload {name!r}")


def _write_at(file: BinaryIO, piece: memoryview, place: int) -> int:
    written = 0
    while written < len(piece):
        written += os.pwrite(file.fileno(), piece[written:], place + written)
    return written
