"""`DoneRequests`: which requests were done and what was answered, so that none is done twice.

The newest ones, in a file that is appended to. A client asks again for a minute at most, and a
signed request that somebody kept is void after `wire.REQUEST_TTL_S`: so long none is forgotten,
however many come.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tunemq_scheduler.farm.common.small_files import rejected, replace_file
from tunemq_shared.base.errors import JournalFull
from tunemq_shared.broker import redis_keys

#: So many are kept when the file is made smaller, which it is at twice as many.
_KEPT: Final = 2000
#: A request is void by then, whatever its sender's clock said.
_REPEATABLE_S: Final = float(redis_keys.REQUEST_TTL_S + redis_keys.CLOCK_TOLERANCE_S)
#: Before each record: the bytes of the id, those of the answer, and the CRC of both.
_HEAD: Final = struct.Struct("<HII")


class DoneRequests:
    """The answers to the newest requests that changed something, by what these are known by.

    Args:
        path: of the file; made on first use, in a folder that is there.
        kept: how many at least.
        clock: seconds that only grow.

    Raises:
        JournalError: it cannot be read.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        kept: int = _KEPT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._clock = Path(path), clock
        self._kept = kept
        self._shrink_at = 2 * kept
        self._answers: dict[str, bytes] = {}
        #: Those that the disk had no room for.
        self._unsaved: dict[str, bytes] = {}
        #: When each was done, or read from the file: in the same order.
        self._done_at: dict[str, float] = {}
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            whole = self._read(data)
            if whole < len(data):
                os.truncate(self._path, whole)  # of an append that a crash cut short
        except OSError as error:
            raise rejected(self._path, "read", error) from error

    def get(self, request: str) -> bytes | None:
        """What was answered; None if it was not done, as far as is remembered."""
        return self._answers.get(request)

    def add(self, request: str, answer: bytes) -> None:
        """Remember it; durable on return, or, where the disk is full, when `save` has room.

        Raises:
            JournalError: the disk refuses it.
        """
        was_full = bool(self._unsaved)
        self._unsaved[request] = answer
        with contextlib.suppress(JournalFull):
            if not was_full:
                self.save()
        self._put(request, answer)
        if len(self._answers) >= self._shrink_at and not self._unsaved:
            self._shrink()

    def save(self) -> None:
        """Write what the disk had no room for.

        Raises:
            JournalFull: it still has none; nothing of it is in the file.
            JournalError: the disk refuses it.
        """
        if not self._unsaved:
            return
        size = None
        try:
            with open(self._path, "ab") as file:
                size = file.tell()
                file.writelines(_record(*one) for one in self._unsaved.items())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, size)  # what is behind half a record is not read
            raise rejected(self._path, "written", error) from error
        self._unsaved.clear()

    def _put(self, request: str, answer: bytes) -> None:
        self._done_at.pop(request, None)  # so that it stands last in both
        self._answers.pop(request, None)
        self._answers[request], self._done_at[request] = answer, self._clock()

    def _shrink(self) -> None:
        since = self._clock() - _REPEATABLE_S
        newest = list(self._answers)
        young = sum(at >= since for at in self._done_at.values())
        for request in newest[: -max(self._kept, young)]:
            del self._answers[request], self._done_at[request]
        self._shrink_at = 2 * max(self._kept, len(self._answers))
        with contextlib.suppress(JournalFull):  # it is merely longer than it need be
            replace_file(self._path, b"".join(_record(*one) for one in self._answers.items()))

    def _read(self, data: bytes) -> int:
        """Take the whole records; where the first that is not whole begins."""
        at = 0
        while len(data) - at >= _HEAD.size:
            name_size, size, crc = _HEAD.unpack_from(data, at)
            content = data[at + _HEAD.size : at + _HEAD.size + name_size + size]
            if len(content) < name_size + size or zlib.crc32(content) != crc:
                break
            self._put(content[:name_size].decode(), content[name_size:])
            at += _HEAD.size + len(content)
        return at


def _record(request: str, answer: bytes) -> bytes:
    content = request.encode() + answer
    return _HEAD.pack(len(request.encode()), len(answer), zlib.crc32(content)) + content
