"""`RunRecord`: which process ran an experiment last, its term, and whether it deregistered.

It lies beside the journal, and where the experiment has a store also beside the journal's copy
there: the one knows of all runs from this folder, the other of all of this experiment, on
whatever machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.journal import FILE_NAME
from tunemq_shared.base.errors import JournalError, SchedulerSuperseded
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.objects.object_store import NoSuchObject, ObjectStore
from tunemq_shared.signing.message_signing import (
    InvalidSignature,
    MessageSigner,
    unchecked_body,
)

#: Its name beside the journal's segments.
RECORD: Final = "scheduler"
#: In the store, signed; under the name of the file syncers put the file as it is.
_KEY: Final = f"{FILE_NAME}/last_run"
_MOST_BYTES: Final = 2**16
_CONTEXT: Final = RECORD.encode()


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last run of an experiment.

    Attributes:
        holder: the process that ran it; each run has another token.
        term: the term of its scheduler; 0 for a script's own farm.
        run: the number of the run, which is in the journal once it has begun.
        is_warm: whether it began with the nodes of the run before, and what they hosted.
        is_over: whether it told the nodes to forget the experiment: then a further run needs a
            stream of its own, since nodes number what they say from 1 again.
        events_key: the stream of its events; empty for a script's own farm.
    """

    holder: LeaseHolder
    term: int
    run: int
    is_warm: bool
    is_over: bool = False
    events_key: str = ""

    def is_next_warm(self, acknowledged_up_to: int) -> bool:
        """Whether the next run takes over what nodes host.

        Args:
            journalled: the last run that the journal knows.
        """
        return self.is_warm if self.run > acknowledged_up_to else not self.is_over


def read_record(folder: str) -> RunRecord | None:
    """That of an experiment's folder; None where there is none.

    Raises:
        JournalError: there is one that cannot be read.
    """
    path = _path(folder)
    try:
        return _decoded(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}.") from error


def write_record(folder: str, record: RunRecord) -> None:
    """Keep it, durably.

    Raises:
        JournalError: the disk refuses it; the one before stands.
    """
    path = _path(folder)
    beside = path.with_name(f"{RECORD}.new")
    try:
        with open(beside, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise JournalError(f"{path} cannot be written: {error.strerror}.") from error


def stored_record(objects: ObjectStore, message_signer: MessageSigner) -> RunRecord | None:
    """That of an experiment's store; None where there is none.

    Args:
        seal: of the journals of this search.

    Raises:
        StoreError: the store cannot be reached.
        JournalError: it cannot be read, or the scheduler did not write it.
    """
    try:
        content = objects.get_bytes(_KEY, limit=_MOST_BYTES)
    except NoSuchObject:
        return None
    try:
        if not message_signer.is_signed:  # a script without keys may restore a farm's search
            return _decoded(unchecked_body(content), _KEY)
        return _decoded(message_signer.open(content, _CONTEXT), _KEY)
    except InvalidSignature as error:
        raise JournalError(
            f"{_KEY} at {objects.address}, which says who ran this search last, {error}: the "
            "scheduler of this farm did not write it. If no other scheduler runs this search, "
            "remove that object and start again."
        ) from error


def store_record(objects: ObjectStore, record: RunRecord, message_signer: MessageSigner) -> None:
    """Keep it in the store, too.

    Args:
        seal: of the journals of this search.

    Raises:
        StoreError: the store cannot be reached.
    """
    objects.put_bytes(_KEY, message_signer.close(msgspec.json.encode(record), _CONTEXT))


def check_newest(local: RunRecord | None, stored: RunRecord | None, folder: str) -> None:
    """Refuse a folder from which the experiment went on elsewhere.

    Raises:
        SchedulerSuperseded: it did; says where.
    """
    is_scripts = stored is not None and not stored.events_key and stored != local
    if stored is not None and (local is None or is_scripts or stored.term > local.term):
        raise SchedulerSuperseded(
            f"{folder} is not the newest state of this experiment: it went on elsewhere"
            f" ({stored.holder}). Go on there; or, if that machine is lost, move this folder away"
            " and start the scheduler with --take-over ADDRESS to go on from the store's copy."
        )


def _decoded(data: bytes, place: str) -> RunRecord:
    try:
        return msgspec.json.decode(data, type=RunRecord)
    except UNDECODABLE as error:
        raise JournalError(f"{place} cannot be read: {error}.") from error


def _path(folder: str) -> Path:
    return Path(folder) / FILE_NAME / RECORD
