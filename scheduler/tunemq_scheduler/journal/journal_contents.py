"""What stands in the files of a journal, and which versions of it this TuneMQ can read."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_shared.base.errors import JournalCorrupt, JournalVersionMismatch
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.protocol.messages import PROTOCOL_VERSION

#: Of the format of the files.
JOURNAL_VERSION: Final = 2

_T = TypeVar("_T", bound=msgspec.Struct)


@functools.cache
def tunemq_version() -> str:
    """The version of TuneMQ that runs here; said in each file's header."""
    try:
        return importlib.metadata.version("tunemq")
    except importlib.metadata.PackageNotFoundError:  # run from its sources, without installation
        return "of unknown version"


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, tag="tunemq-journal"):
    """Whose journal it is, and by which rules its events were handled.

    ``store`` is the address of its checkpoints; empty for the journal's own folder, which people
    may move. ``protocol`` is the version of the messages in it, ``tunemq`` the version of TuneMQ
    that began it.
    """

    version: int = JOURNAL_VERSION
    experiment: str
    experiment_id: str
    started: float
    settings: RunnerSettings
    store: str = ""
    protocol: int = PROTOCOL_VERSION
    tunemq: str = msgspec.field(default_factory=tunemq_version)

    def of_journal(self) -> JournalHeader:
        """What is the same in each segment."""
        return JournalHeader(**self.fields())

    def fields(self) -> dict[str, Any]:
        """What is the same in each segment, by name."""
        return {name: getattr(self, name) for name in JournalHeader.__struct_fields__}


class SegmentHeader(JournalHeader, frozen=True, kw_only=True, tag="tunemq-journal"):
    """The first frame of a segment; ``turns_before``: how many turns are in those before it."""

    segment: int
    turns_before: int


class SnapshotHeader(msgspec.Struct, frozen=True, kw_only=True, tag="tunemq-snapshot"):
    """The first frame of a snapshot.

    Attributes:
        segment: what follows the snapshot begins in the segment of this number.
        turns: how many turns it stands for.
        history_bytes: so much of the history belongs to it, ...
        history_records: ... which are so many records, the header not counted.
    """

    version: int = JOURNAL_VERSION
    protocol: int = PROTOCOL_VERSION
    tunemq: str = msgspec.field(default_factory=tunemq_version)
    experiment_id: str
    segment: int
    turns: int
    history_bytes: int
    history_records: int


class HistoryHeader(msgspec.Struct, frozen=True, kw_only=True, tag="tunemq-history"):
    """The first frame of the history."""

    version: int = JOURNAL_VERSION
    protocol: int = PROTOCOL_VERSION
    tunemq: str = msgspec.field(default_factory=tunemq_version)
    experiment_id: str


class JournalSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an experiment after some turn.

    Attributes:
        version: of this content; another one is refused by whoever reads it.
        state: of the core, without the summaries of finished trials, which are in the history.
        algorithms: what "search", "scheduler" and "stopper" gave as their state, as JSON.
    """

    version: int = 1
    state: bytes
    algorithms: dict[str, bytes] = {}


class _AnyHeader(msgspec.Struct, kw_only=True):
    """What every version has in its headers, whatever else it may have."""

    type: str
    version: int
    protocol: int = PROTOCOL_VERSION
    tunemq: str = ""


_decode_any_header: Final = msgspec.msgpack.Decoder(_AnyHeader).decode


def decode_header(payload: bytes, kind: type[_T], path: Path) -> _T:
    """A header of this kind.

    Raises:
        JournalCorrupt: it is the header of something else.
        JournalOfOtherVersion: another version wrote it.
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
    """What an undamaged payload holds.

    Raises:
        JournalOfOtherVersion: it cannot be understood: a newer TuneMQ wrote it.
    """
    try:
        return decode(payload)
    except UNDECODABLE as error:
        raise JournalVersionMismatch(
            f"{path} holds what TuneMQ {tunemq_version()} does not know, so another version wrote "
            f"it: {error}."
        ) from error
