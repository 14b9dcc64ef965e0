"""The frames of a journal file, which distinguish damage from a torn end.

A frame consists of a head of 24 bytes and the payload. The head has a mark; the frame's number, one
more than the previous frame's; the length of the payload; its CRC-32; and the CRC-32 of these
fields. The head's own CRC ensures that only correct lengths are used; the mark serves to find
frames after damage.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from tunemq_shared.base.errors import JournalCorrupt, JournalError
from tunemq_shared.system.plain_files import open_to_read

MARK: Final = b"\xf5TMQ"
_HEAD: Final = struct.Struct(">4sQII")
_CRC: Final = struct.Struct(">I")
#: The bytes of a frame before its payload.
HEAD_BYTES: Final = _HEAD.size + _CRC.size
#: The most bytes of a payload.
MAX_PAYLOAD: Final = 2**30
_BLOCK: Final = 2**20


class JournalFrame(NamedTuple):
    """One whole frame: its start and end in the file, its number, its payload."""

    offset: int
    end: int
    number: int
    payload: bytes


def pack(number: int, payload: bytes) -> bytes:
    """Encode a frame.

    Raises:
        JournalError: the payload is too long.
    """
    if len(payload) > MAX_PAYLOAD:
        raise JournalError(
            f"{len(payload)} bytes do not fit into one record of a journal, which holds "
            f"{MAX_PAYLOAD}."
        )
    head = _HEAD.pack(MARK, number, len(payload), zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


class JournalFrames:
    """The whole frames of a file, in order; can be iterated once.

    Attributes:
        end: the offset after the last frame that was returned.
        size: the number of bytes examined.

    Args:
        path: the file.
        limit: ignore all bytes from this offset on.

    Iterating raises:
        JournalCorrupt: whole frames follow a damaged one, or one is missing.
        JournalError: the file cannot be read.
    """

    def __init__(self, path: Path, *, limit: int | None = None) -> None:
        self.path = path
        self.end = 0
        self.size = 0
        self._limit = limit

    @property
    def torn(self) -> int:
        """The bytes at the end that form no whole frame; valid after iteration."""
        return self.size - self.end

    def __iter__(self) -> Iterator[JournalFrame]:
        try:
            with open_to_read(self.path) as file:  # a FIFO in its place would block
                size = os.fstat(file.fileno()).st_size
                self.size = size if self._limit is None else min(size, self._limit)
                yield from self._frames(file)
        except OSError as error:
            raise JournalError(
                f"the journal's {self.path} cannot be read: {error.strerror}."
            ) from error

    def _frames(self, file: BinaryIO) -> Iterator[JournalFrame]:
        expected: int | None = None
        while self.end < self.size:
            frame = frame_at(file, self.end, self.size)
            if frame is None:
                if next(whole_frames_behind(file, self.end, self.size), None) is not None:
                    raise JournalCorrupt(
                        str(self.path), self.end, "a record is damaged, whole ones follow"
                    )
                return
            if expected is not None and frame.number != expected:
                raise JournalCorrupt(
                    str(self.path),
                    self.end,
                    f"record {expected} should be here, and it is record {frame.number}",
                )
            expected = frame.number + 1
            self.end = frame.end
            yield frame


def frame_at(file: BinaryIO, offset: int, size: int) -> JournalFrame | None:
    """Return the whole frame at an offset, or None."""
    file.seek(offset)
    head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES or not head.startswith(MARK):
        return None
    if _CRC.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
        return None
    _, number, length, crc = _HEAD.unpack_from(head)
    end = offset + HEAD_BYTES + length
    if end > size:
        return None
    payload = file.read(length)
    if len(payload) < length or zlib.crc32(payload) != crc:
        return None
    return JournalFrame(offset, end, number, payload)


def all_whole_frames(path: Path) -> Iterator[JournalFrame]:
    """Yield all whole frames of a file, including those after damage.

    Raises:
        JournalError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = frame_at(file, 0, size)
            if first is not None:
                yield first
            yield from whole_frames_behind(file, first.end - 1 if first else 0, size)
    except OSError as error:
        raise JournalError(f"the journal's {path} cannot be read: {error.strerror}.") from error


def whole_frames_behind(file: BinaryIO, offset: int, size: int) -> Iterator[JournalFrame]:
    """Yield the whole frames that begin after an offset, at any position; they do not overlap."""
    position = offset + 1
    while position < size:
        file.seek(position)
        block = file.read(min(_BLOCK, size - position))
        frame = _first_frame(file, block, position, size)
        if frame is None:
            # The mark may begin in this block and end in the next.
            position += max(1, len(block) - len(MARK) + 1)
        else:
            yield frame
            position = frame.end


def _first_frame(file: BinaryIO, block: bytes, offset: int, size: int) -> JournalFrame | None:
    """Return the first whole frame that begins in a block, which is at this offset."""
    found = block.find(MARK)
    while found >= 0:
        frame = frame_at(file, offset + found, size)
        if frame is not None:
            return frame
        found = block.find(MARK, found + 1)
    return None
