"""`DoneRequests`: remembers completed requests and their answers, so that none runs twice.

It appends the newest ones to a file. A client repeats a request for a minute at most, and a
replayed signed request is void after `redis_keys.REQUEST_TTL_S`. So no request is forgotten for
that long, however many arrive.
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

#: How many are kept when the file is rewritten, which happens at twice as many.
_KEPT: Final = 2000
#: The age at which a request is void, whatever its sender's clock says.
_REPEATABLE_S: Final = float(redis_keys.REQUEST_TTL_S + redis_keys.CLOCK_TOLERANCE_S)
#: Before each record: the length of the id, that of the answer, and the CRC of both.
_HEAD: Final = struct.Struct("<HII")


class DoneRequests:
    """The answers to the newest requests that changed something, by request key.

    Args:
        path: the file; created on first use, in an existing folder.
        kept: how many to keep at least.
        clock: a monotonic clock, in seconds.

    Raises:
        JournalError: the file cannot be read.
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
        #: Answers for which the disk had no space.
        self._unsaved: dict[str, bytes] = {}
        #: When each was done, or read from the file; in the same order.
        self._done_at: dict[str, float] = {}
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            whole = self._read(data)
            if whole < len(data):
                os.truncate(self._path, whole)  # an append that a crash cut short
        except OSError as error:
            raise rejected(self._path, "read", error) from error

    def get(self, request: str) -> bytes | None:
        """Return the answer; None if the request was not done, as far as is remembered."""
        return self._answers.get(request)

    def add(self, request: str, answer: bytes) -> None:
        """Remember an answer; durable on return, or, if the disk is full, after a later `save`.

        Raises:
            JournalError: the disk rejects the write.
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
        """Write answers for which the disk had no space.

        Raises:
            JournalFull: it still has none; the file is unchanged.
            JournalError: the disk rejects the write.
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
                    os.truncate(self._path, size)  # data after a partial record is not read
            raise rejected(self._path, "written", error) from error
        self._unsaved.clear()

    def _put(self, request: str, answer: bytes) -> None:
        self._done_at.pop(request, None)  # so that it is last in both
        self._answers.pop(request, None)
        self._answers[request], self._done_at[request] = answer, self._clock()

    def _shrink(self) -> None:
        since = self._clock() - _REPEATABLE_S
        newest = list(self._answers)
        young = sum(at >= since for at in self._done_at.values())
        for request in newest[: -max(self._kept, young)]:
            del self._answers[request], self._done_at[request]
        self._shrink_at = 2 * max(self._kept, len(self._answers))
        with contextlib.suppress(JournalFull):  # the file is only longer than necessary
            replace_file(self._path, b"".join(_record(*one) for one in self._answers.items()))

    def _read(self, data: bytes) -> int:
        """Read the complete records; return the offset of the first incomplete one."""
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
