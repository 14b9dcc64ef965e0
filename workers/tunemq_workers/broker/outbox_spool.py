"""The outbox's part on disk: what does not fit in memory, in files that nobody else can see.

The files have no name (they are unlinked as soon as they are open), so a crash leaves nothing
behind: what an outbox holds is of no use to anybody after its node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from tunemq_workers.system.trial_user import own_files

_SEGMENT_BYTES: Final = 8 * 2**20
_PREFIX: Final = ".outbox-"


@dataclass(slots=True, eq=False)
class _Segment:
    fd: int
    size: int = 0
    pieces: int = 0


@dataclass(frozen=True, slots=True)
class SpoolPosition:
    """Where a piece lies."""

    segment: _Segment = field(repr=False)
    offset: int
    size: int


class Spool:
    """Keeps pieces of bytes in segments, whose room comes back when all their pieces are freed.

    Args:
        folder: where the segments are made.
        segment_bytes: a new segment begins when one holds so much.
    """

    def __init__(self, folder: str, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []

    @property
    def size(self) -> int:
        """Bytes that the segments take on disk."""
        return sum(segment.size for segment in self._segments)

    def write(self, data: bytes | bytearray) -> SpoolPosition:
        """Keep ``data``.

        Raises:
            OSError: the disk is full or broken; nothing is kept.
        """
        segment = self._roomy()
        offset, view = segment.size, memoryview(data)
        while view:
            written = os.pwrite(segment.fd, view, offset + len(data) - len(view))
            view = view[written:]
        segment.size += len(data)
        segment.pieces += 1
        return SpoolPosition(segment, offset, len(data))

    def read(self, place: SpoolPosition) -> bytes:
        """The bytes kept at ``place``.

        Raises:
            OSError: the disk is broken.
        """
        data = os.pread(place.segment.fd, place.size, place.offset)
        if len(data) != place.size:
            raise OSError(f"{place.size - len(data)} bytes of the outbox are gone from the disk")
        return data

    def free(self, place: SpoolPosition) -> None:
        """Forget a piece; its place is void."""
        segment = place.segment
        segment.pieces -= 1
        if not segment.pieces:
            os.close(segment.fd)
            self._segments.remove(segment)

    def close(self) -> None:
        """Forget everything."""
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()

    def _roomy(self) -> _Segment:
        if not self._segments or self._segments[-1].size >= self._segment_bytes:
            self._segments.append(_Segment(_nameless_file(self._folder)))
        return self._segments[-1]


def is_spool(name: str) -> bool:
    """Whether a file of this name is a segment whose maker died before it had lost its name."""
    return name.startswith(_PREFIX)


def _nameless_file(folder: str) -> int:
    path = os.path.join(folder, f"{_PREFIX}{os.urandom(8).hex()}")
    with own_files():
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    return fd
