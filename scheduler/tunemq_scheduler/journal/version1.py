"""Journals of version 1: one file of frames, each a length, a CRC-32 of the payload, the payload.

They are read, and made into a folder when their search goes on.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.journal.contents import JournalHeader, readable, tunemq_version
from tunemq_shared.errors import JournalCorrupt, JournalError, JournalOfOtherVersion

VERSION: Final = 1

_FRAME: Final = struct.Struct(">II")
_MAX_PAYLOAD: Final = 2**30


class _Header(JournalHeader, frozen=True, kw_only=True, tag="tunemq-journal"):
    """Its header did not say which TuneMQ wrote it."""

    tunemq: str = ""


_decode_header: Final = msgspec.msgpack.Decoder(_Header).decode


def read(path: Path) -> tuple[JournalHeader, list[bytes], int]:
    """The header, the payloads of all whole turns, and how many bytes of a torn one are behind.

    Raises:
        JournalError: it cannot be read, or is of another version.
        JournalCorrupt: a damaged frame has whole ones behind it, or there is no header.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"the journal {path} cannot be read: {error.strerror}.") from error
    payloads = list(_payloads(path, data))
    if not payloads:
        raise JournalCorrupt(str(path), 0, "it has no header")
    header = readable(payloads[0], _decode_header, path)
    if header.version != VERSION:
        raise JournalOfOtherVersion(
            f"{path} is one file of journal version {header.version}; of those TuneMQ "
            f"{tunemq_version()} reads version {VERSION}."
        )
    whole = sum(_FRAME.size + len(payload) for payload in payloads)
    return header.of_journal(), payloads[1:], len(data) - whole


def read_in_part(path: Path) -> tuple[JournalHeader, list[bytes], int]:
    """As `read`, of one that is damaged: what is before the damage, and how many turns are behind.

    Raises:
        JournalError: its header cannot be read.
    """
    data = path.read_bytes()
    payloads: list[bytes] = []
    offset = 0
    while (payload := _payload_at(data, offset)) is not None:
        payloads.append(payload)
        offset += _FRAME.size + len(payload)
    if not payloads:
        raise JournalError(f"of {path} nothing is of use: its header is damaged.")
    behind = 0
    while offset < len(data):
        payload = _payload_at(data, offset)
        behind += bool(payload)
        offset += _FRAME.size + len(payload) if payload else 1
    header = readable(payloads[0], _decode_header, path)
    return header.of_journal(), payloads[1:], behind


def _payloads(path: Path, data: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(data):
        payload = _payload_at(data, offset)
        if payload is None:
            if _is_whole_frame_behind(data, offset):
                raise JournalCorrupt(str(path), offset, "a record is damaged, whole ones follow")
            return
        yield payload
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


def _is_whole_frame_behind(data: bytes, offset: int) -> bool:
    for start in range(offset + 1, len(data) - _FRAME.size):
        length = _FRAME.unpack_from(data, start)[0]
        if 0 < length <= len(data) - start - _FRAME.size and _payload_at(data, start) is not None:
            return True
    return False
