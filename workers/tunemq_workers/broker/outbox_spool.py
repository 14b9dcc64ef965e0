"""`Spool`: the outboxes' files for events that do not fit in memory.

The node unlinks each file as soon as it is open, so a crash leaves nothing behind. The content of
an outbox has no meaning after its node instance ends.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from tunemq_workers.system.trial_user import own_files

_SEGMENT_BYTES: Final = 8 * 2**20
_PREFIX: Final = ".outbox-"


class _Segment(msgspec.Struct, eq=False):
    fd: int
    size: int = 0
    pieces: int = 0


class SpoolPosition(msgspec.Struct, frozen=True):
    """The position of a piece in the spool."""

    segment: _Segment
    offset: int
    size: int


class Spool:
    """Keep pieces of bytes in segment files; a segment is deleted when all its pieces are freed.

    Args:
        folder: the folder in which to create segments.
        segment_bytes: size from which on a new segment is begun.
    """

    def __init__(self, folder: str, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []

    def write(self, data: bytes | bytearray) -> SpoolPosition:
        """Write ``data`` to the spool and return its position.

        Raises:
            OSError: the disk is full or broken; nothing is kept.
        """
        if not self._segments or self._segments[-1].size >= self._segment_bytes:
            self._segments.append(_Segment(_nameless_file(self._folder)))
        segment = self._segments[-1]
        offset, view = segment.size, memoryview(data)
        while view:
            written = os.pwrite(segment.fd, view, offset + len(data) - len(view))
            view = view[written:]
        segment.size += len(data)
        segment.pieces += 1
        return SpoolPosition(segment, offset, len(data))

    def read(self, place: SpoolPosition) -> bytes:
        """Return the bytes at ``place``.

        Raises:
            OSError: the disk is broken.
        """
        data = os.pread(place.segment.fd, place.size, place.offset)
        if len(data) != place.size:
            raise OSError(f"{place.size - len(data)} bytes of the outbox are missing on the disk")
        return data

    def free(self, place: SpoolPosition) -> None:
        """Free a piece; its position becomes invalid."""
        segment = place.segment
        segment.pieces -= 1
        if not segment.pieces:
            os.close(segment.fd)
            self._segments.remove(segment)


def is_spool(name: str) -> bool:
    """Return whether this is the name of a segment that a killed node did not unlink."""
    return name.startswith(_PREFIX)


def _nameless_file(folder: str) -> int:
    path = os.path.join(folder, f"{_PREFIX}{os.urandom(8).hex()}")
    with own_files():
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    return fd
