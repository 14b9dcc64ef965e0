"""`DoneRequests`: which requests were done and what was answered, so that none is done twice.

The newest ones, in a file that is appended to: a client asks again for a minute at most, so a few
thousand are more than anybody can still ask for.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Final

from tunemq_scheduler.folders import replace_file
from tunemq_shared.errors import JournalError, StoreError

#: So many are kept when the file is made smaller, which it is at twice as many.
_KEPT: Final = 2000
#: Before each record: the bytes of the id, those of the answer, and the CRC of both.
_HEAD: Final = struct.Struct("<HII")


class DoneRequests:
    """The answers to the newest requests that changed something, by the requests' ids.

    Args:
        path: of the file; made on first use, in a folder that is there.
        kept: how many at least.

    Raises:
        JournalError: it cannot be read.
    """

    def __init__(self, path: Path | str, *, kept: int = _KEPT) -> None:
        self._path = Path(path)
        self._kept = kept
        self._answers: dict[str, bytes] = {}
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            whole = self._read(data)
            if whole < len(data):
                os.truncate(self._path, whole)  # of an append that a crash cut short
        except OSError as error:
            raise self._unusable("read", error) from error

    def get(self, request: str) -> bytes | None:
        """What was answered; None if it was not done, as far as is remembered."""
        return self._answers.get(request)

    def add(self, request: str, answer: bytes) -> None:
        """Remember it; durable on return.

        Raises:
            JournalError: the disk refuses it.
        """
        try:
            with open(self._path, "ab") as file:
                file.write(_record(request, answer))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unusable("written", error) from error
        self._answers[request] = answer
        if len(self._answers) >= 2 * self._kept:
            self._shrink()

    def _shrink(self) -> None:
        self._answers = dict(list(self._answers.items())[-self._kept :])
        try:
            replace_file(str(self._path), b"".join(_record(*one) for one in self._answers.items()))
        except StoreError as error:
            raise JournalError(str(error)) from error

    def _read(self, data: bytes) -> int:
        """Take the whole records; where the first that is not whole begins."""
        at = 0
        while len(data) - at >= _HEAD.size:
            name_size, size, crc = _HEAD.unpack_from(data, at)
            content = data[at + _HEAD.size : at + _HEAD.size + name_size + size]
            if len(content) < name_size + size or zlib.crc32(content) != crc:
                break
            self._answers[content[:name_size].decode()] = content[name_size:]
            at += _HEAD.size + len(content)
        return at

    def _unusable(self, what: str, error: OSError) -> JournalError:
        return JournalError(f"{self._path} cannot be {what}: {error.strerror}.")


def _record(request: str, answer: bytes) -> bytes:
    content = request.encode() + answer
    return _HEAD.pack(len(request.encode()), len(answer), zlib.crc32(content)) + content
