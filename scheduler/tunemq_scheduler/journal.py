"""The journal: what happened, in order, on disk before anything is done about it.

A journal is a file of frames: length (4 bytes, big endian), CRC-32 of the payload (4 bytes),
payload (msgpack). The first frame is the `JournalHeader`; each other frame is one turn of the loop,
a list of entries. A turn is therefore there as a whole or not at all, and costs one fsync.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from tunemq_scheduler.core.settings import RunnerSettings
from tunemq_shared.errors import JournalCorrupt, JournalError
from tunemq_shared.failpoints import failpoint
from tunemq_shared.messages import Entry, decode_entries, encode

JOURNAL_VERSION: Final = 1
FILE_NAME: Final = "journal"

_FRAME: Final = struct.Struct(">II")
#: A frame that claims to be longer is damage, not a turn.
_MAX_PAYLOAD: Final = 2**30


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, tag="tunemq-journal"):
    """The first frame: whose journal this is, and by which rules its events were handled.

    ``store`` is the address of its checkpoints; empty for the journal's own folder, which people
    may move.
    """

    version: int
    experiment: str
    experiment_id: str
    started: float
    settings: RunnerSettings
    store: str = ""


_decode_header = msgspec.msgpack.Decoder(JournalHeader).decode


class Journal:
    """The open journal of one experiment; one writer.

    Args:
        path: the file, created here.
        header: its first frame.
        sync: whether `append` waits until the disk has the turn; simulations may do without.

    Raises:
        JournalError: the file exists already or cannot be written.
    """

    def __init__(self, path: Path, header: JournalHeader, *, sync: bool = True) -> None:
        self.path = path
        self._sync = sync
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(
                f"the journal {path} cannot be written: {error.strerror}."
            ) from error
        payload = encode(header)
        with self._refusals(len(payload)):
            self._write(payload)
            _sync_folder(path.parent)

    def append(self, entries: Sequence[Entry]) -> None:
        """Write one turn; when this returns, it survives the death of the process and the machine.

        Raises:
            JournalError: the disk refuses it. Nothing of the turn may be acted upon then.
        """
        payload = encode(entries)
        with self._refusals(len(payload)):
            failpoint("journal.before_append")
            self._write(payload)
            failpoint("journal.after_append")

    def close(self) -> None:
        """Close the file; a closed journal can be read."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, payload: bytes) -> None:
        view = memoryview(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
        while view:
            view = view[os.write(self._fd, view) :]
        if self._sync:
            os.fdatasync(self._fd)

    @contextmanager
    def _refusals(self, size: int) -> Iterator[None]:
        """What the disk refuses becomes a JournalError; ``size`` bytes were to be written."""
        try:
            yield
        except OSError as error:
            raise JournalError(
                f"{size + _FRAME.size} bytes could not be written to {self.path}: {error.strerror}."
            ) from error


def read_header(path: Path) -> JournalHeader:
    """The journal's first frame.

    Raises:
        JournalError: there is no such file, or another version wrote it.
        JournalCorrupt: it is damaged.
    """
    for _, payload in _frames(path):
        header = _decode_header(payload)
        if header.version != JOURNAL_VERSION:
            raise JournalError(
                f"{path} was written by journal version {header.version}, this is "
                f"{JOURNAL_VERSION}."
            )
        return header
    raise JournalCorrupt(str(path), 0, "it has no header")


def read_turns(path: Path) -> Iterator[list[Entry]]:
    """The turns that were written as a whole, in order; a torn one at the end was never acted upon.

    Raises:
        JournalError: there is no such file.
        JournalCorrupt: a damaged frame has whole ones behind it.
    """
    frames = _frames(path)
    next(frames, None)
    for _, payload in frames:
        yield decode_entries(payload)


def read_entries(path: Path) -> Iterator[Entry]:
    """All entries of all turns, in order."""
    for turn in read_turns(path):
        yield from turn


def _frames(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"the journal {path} cannot be read: {error.strerror}.") from error
    offset = 0
    while offset < len(data):
        payload = _payload_at(data, offset)
        if payload is None:
            if _whole_frame_behind(data, offset):
                raise JournalCorrupt(
                    str(path), offset, "its length or CRC is wrong, whole turns follow"
                )
            return
        yield offset, payload
        offset += _FRAME.size + len(payload)


def _payload_at(data: bytes, offset: int) -> bytes | None:
    if offset + _FRAME.size > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, offset)
    start = offset + _FRAME.size
    if length > _MAX_PAYLOAD or start + length > len(data):
        return None
    payload = data[start : start + length]
    return payload if zlib.crc32(payload) == crc else None


def _whole_frame_behind(data: bytes, offset: int) -> bool:
    """Whether any whole, non-empty frame begins behind ``offset``."""
    for start in range(offset + 1, len(data) - _FRAME.size):
        length = _FRAME.unpack_from(data, start)[0]
        if 0 < length <= len(data) - start - _FRAME.size and _payload_at(data, start) is not None:
            return True
    return False


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
