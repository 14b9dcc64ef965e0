"""The contents of a journal's files, and the versions that this TuneMQ can read."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import JournalCorrupt, JournalVersionMismatch
from tunemq_shared.protocol.messages import PROTOCOL_VERSION

#: The version of the file format.
JOURNAL_VERSION: Final = 2

_T = TypeVar("_T", bound=msgspec.Struct)


@functools.cache
def tunemq_version() -> str:
    """Return the version of the running TuneMQ, which each file's header contains."""
    try:
        return importlib.metadata.version("tunemq")
    except importlib.metadata.PackageNotFoundError:  # run from source without installation
        return "of unknown version"


class _FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of each kind of file.

    Attributes:
        protocol: the version of the messages in it.
        tunemq: the version of TuneMQ that began it.
    """

    version: int = JOURNAL_VERSION
    protocol: int = PROTOCOL_VERSION
    tunemq: str = msgspec.field(default_factory=tunemq_version)
    experiment_id: str


class JournalHeader(_FileHeader, frozen=True, kw_only=True, tag="tunemq-journal"):
    """The identity of a journal's experiment, and the rules by which its events were handled.

    Attributes:
        store: the address of its checkpoints; empty for the experiment's own folder, which users
            may move.
    """

    experiment: str
    started: float
    settings: RunnerSettings
    store: str = ""

    def of_journal(self) -> JournalHeader:
        """Return the part that is equal in all segments."""
        return JournalHeader(**self.fields())

    def fields(self) -> dict[str, Any]:
        """Return the fields that are equal in all segments, by name."""
        return {name: getattr(self, name) for name in JournalHeader.__struct_fields__}


class SegmentHeader(JournalHeader, frozen=True, kw_only=True, tag="tunemq-journal"):
    """The first frame of a segment; ``turns_before`` counts the turns in earlier segments."""

    segment: int
    turns_before: int


class SnapshotHeader(_FileHeader, frozen=True, kw_only=True, tag="tunemq-snapshot"):
    """The first frame of a snapshot.

    Attributes:
        segment: the number of the segment that follows the snapshot.
        turns: the number of turns that it replaces.
        history_bytes: how many bytes of the history belong to it, ...
        history_records: ... and how many records, without the header.
    """

    segment: int
    turns: int
    history_bytes: int
    history_records: int


class HistoryHeader(_FileHeader, frozen=True, kw_only=True, tag="tunemq-history"):
    """The first frame of the history."""


class JournalSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an experiment after a turn.

    Attributes:
        version: the version of this content; readers reject others.
        state: the runner's state, without the summaries of finished trials, which are in the
            history.
        algorithms: the states of "search", "scheduler" and "stopper", as JSON.
    """

    version: int = 1
    state: bytes
    algorithms: dict[str, bytes] = {}


class _AnyHeader(msgspec.Struct, kw_only=True):
    """The common part of the headers of all versions."""

    type: str
    version: int
    protocol: int = PROTOCOL_VERSION
    tunemq: str = ""


_decode_any_header: Final = msgspec.msgpack.Decoder(_AnyHeader).decode


def decode_header(payload: bytes, kind: type[_T], path: Path) -> _T:
    """Decode a header of this kind.

    Raises:
        JournalCorrupt: it is another kind of header.
        JournalVersionMismatch: another version wrote it.
    """
    found = readable(payload, _decode_any_header, path)
    expected = kind.__struct_config__.tag
    if found.type != expected:
        raise JournalCorrupt(str(path), 0, f"it is of the kind {found.type}, and not {expected}")
    writer = f" (TuneMQ {found.tunemq})" if found.tunemq else ""
    remedy = f"Install TuneMQ {found.tunemq or 'of that version'} to continue this search."
    if found.version != JOURNAL_VERSION:
        raise JournalVersionMismatch(
            f"{path} was written by journal version {found.version}{writer}, this is "
            f"{JOURNAL_VERSION} (TuneMQ {tunemq_version()}). {remedy}"
        )
    if found.protocol != PROTOCOL_VERSION:
        raise JournalVersionMismatch(
            f"{path} holds messages of version {found.protocol}{writer}, this is "
            f"{PROTOCOL_VERSION} (TuneMQ {tunemq_version()}). {remedy}"
        )
    header: _T = readable(payload, functools.partial(msgspec.msgpack.decode, type=kind), path)
    return header


def readable(payload: bytes, decode: Callable[[bytes], Any], path: Path) -> Any:
    """Decode an undamaged payload.

    Raises:
        JournalVersionMismatch: it cannot be decoded: a newer TuneMQ wrote it.
    """
    try:
        return decode(payload)
    except UNDECODABLE as error:
        raise JournalVersionMismatch(
            f"{path} holds what TuneMQ {tunemq_version()} does not know, so another version wrote "
            f"it: {error}."
        ) from error
