"""Multipart uploads: the length of parts, and the buffer that is read, hashed and sent."""

from __future__ import annotations

import os
from io import FileIO
from typing import Final

from tunemq_shared.base.errors import CheckpointCorrupt
from tunemq_shared.base.retrying import CancelToken

#: Bytes of a part; larger only if `MOST_PARTS` parts would not hold the file.
PART: Final = 16 * 2**20
#: S3's limit.
MOST_PARTS: Final = 10_000


def part_length(size: int) -> int:
    """The length of each part but the last, for a file of ``size`` bytes; whole MiB."""
    least = -(-size // MOST_PARTS)
    return max(PART, -(-least // 2**20) * 2**20)


class PartBody(bytearray):
    """One part of fixed length, filled from a file and sent as often as retries need.

    It is a buffer for hashing and signing, and a file for sending; as a file it raises once
    ``cancel`` is cancelled or expired. With a ``sha256``, only content with that hash is sent.
    """

    cancel: CancelToken
    sha256: str = ""
    _source: str
    _at: int

    def fill(self, file: FileIO) -> None:
        """Read the next bytes of the file, as many as the part holds.

        Raises:
            CheckpointCorrupt: The file is too short.
        """
        self._source = str(file.name)
        filled, length = 0, len(self)
        with memoryview(self) as view:
            while filled < length:
                count = file.readinto(view[filled:])
                if not count:
                    raise CheckpointCorrupt(
                        f"{self._source}: the file is cut short: "
                        f"expected {length - filled} bytes more, found none."
                    )
                filled += count

    def rewound(self) -> bytes:
        """Rewind the part, to be read from its beginning."""
        self._at = 0
        return self  # type: ignore[return-value]  # hashing and sending accept any buffer

    def read(self, length: int) -> memoryview:
        """The next bytes, at most ``length``; empty at the end."""
        self.cancel.check()
        piece = memoryview(self)[self._at : self._at + length]
        self._at += len(piece)
        return piece

    def check(self, found: str) -> None:
        """Raise CheckpointCorrupt if ``sha256`` is set and ``found`` differs from it."""
        if self.sha256:
            check_hash(self._source, self.sha256, found)


def check_end(file: FileIO) -> None:
    """Raise CheckpointCorrupt unless the file was read to its end."""
    if file.read(1):
        raise CheckpointCorrupt(
            f"{file.name}: the file has grown: expected {file.tell() - 1} bytes, found more."
        )


def check_hash(source: str, expected: str, found: str) -> None:
    """Raise CheckpointCorrupt unless the hashes are equal."""
    if found != expected:
        raise CheckpointCorrupt(
            f"{source}: the file is damaged: expected SHA-256 {expected}, found {found}."
        )


def write_at(fd: int, data: bytes, at: int) -> None:
    """Write all data at the offset ``at`` of the file."""
    written = 0
    with memoryview(data) as view:
        while written < len(view):
            written += os.pwrite(fd, view[written:], at + written)
