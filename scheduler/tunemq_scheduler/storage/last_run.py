"""`RunRecord`: which process ran an experiment last, its term, and whether it deregistered.

It is stored beside the journal, and, if the experiment has a store, also beside the journal's copy
there. The first shows all runs from this folder, the second all runs of this experiment on any
machine.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.journal.journal_files import FILE_NAME, write_durably
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import JournalError, SchedulerSuperseded
from tunemq_shared.objects.object_store import (
    NoSuchObject,
    ObjectSizeMismatch,
    ObjectStore,
)
from tunemq_shared.signing.message_signing import (
    InvalidSignature,
    MessageSigner,
    unchecked_body,
)

#: The name of the file beside the journal's segments.
RECORD: Final = "scheduler"
#: The key in the store, for signed content; syncers upload the plain file under its own name.
RECORD_KEY: Final = f"{FILE_NAME}/last_run"
_MOST_BYTES: Final = 2**16
_CONTEXT: Final = RECORD.encode()
#: Redis counts terms as floating point numbers; a term is about the Unix time.
_Term = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last run of an experiment.

    Attributes:
        holder: the process that ran it; each run has another token.
        term: the term of its scheduler; 0 for an embedded farm.
        run: the number of the run, which is in the journal once the run has begun.
        is_warm: whether it began with the nodes of the previous run, and what they ran.
        is_over: whether it made the nodes forget the experiment: then a further run needs a new
            stream, because nodes number their events from 1 again.
        is_copied: whether the store has all of an ended search; only in the folder's record.
        events_key: the stream of its events; empty for an embedded farm.
        experiment_id: the experiment's id; another search that started at once under this name
            finds it in the store, and does not begin.
    """

    holder: LeaseHolder
    term: _Term
    run: int
    is_warm: bool
    is_over: bool = False
    events_key: str = ""
    experiment_id: str = ""
    is_copied: bool = False

    def is_next_warm(self, journalled_run: int) -> bool:
        """Whether the next run takes over what nodes run.

        Args:
            journalled_run: the number of the last run in the journal.
        """
        return self.is_warm if self.run > journalled_run else not self.is_over


def read_record(folder: str) -> RunRecord | None:
    """Return the record in an experiment's folder, or None.

    Raises:
        JournalError: it cannot be read.
    """
    path = _path(folder)
    try:
        return _decoded(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}.") from error


def write_record(folder: str, record: RunRecord) -> None:
    """Store the record durably in the experiment's folder.

    Raises:
        JournalError: the disk rejects it; the previous record stays.
    """
    path = _path(folder)
    try:
        write_durably(path, msgspec.json.encode(record))
    except OSError as error:
        raise JournalError(f"{path} cannot be written: {error.strerror}.") from error


def stored_record(objects: ObjectStore, message_signer: MessageSigner) -> RunRecord | None:
    """Return the record in an experiment's store, or None.

    Args:
        objects: the experiment's store.
        message_signer: verifies this search's records.

    Raises:
        StoreError: the store cannot be reached.
        JournalError: it cannot be read, or has no valid signature of the scheduler.
    """
    try:
        content = objects.get_bytes(RECORD_KEY, limit=_MOST_BYTES)
    except NoSuchObject:
        return None
    except ObjectSizeMismatch as error:
        raise _unreadable(RECORD_KEY, error) from error
    try:
        if not message_signer.is_signed:  # a script without keys may restore a farm's search
            return _decoded(unchecked_body(content), RECORD_KEY)
        return _decoded(message_signer.open(content, _CONTEXT), RECORD_KEY)
    except InvalidSignature as error:
        raise JournalError(
            f"{RECORD_KEY} at {objects.address}, which says who ran this search last, {error}: the "
            "scheduler of this farm did not write it, or its key was dropped since. If no other "
            "scheduler runs this search, remove it and start again."
        ) from error


def sign_again(objects: ObjectStore, local: RunRecord, message_signer: MessageSigner) -> None:
    """Sign a run's own record in its store again if a key signed it that was dropped since.

    Args:
        objects: the experiment's store.
        local: the record in the experiment's folder.
        message_signer: signs this search's records.

    Raises:
        StoreError: the store cannot be reached.
    """
    if not message_signer.is_signed:
        return
    try:
        content = objects.get_bytes(RECORD_KEY, limit=_MOST_BYTES)
        message_signer.open(content, _CONTEXT)
    except (NoSuchObject, ObjectSizeMismatch):
        return
    except InvalidSignature:
        with contextlib.suppress(JournalError):  # reported by `stored_record`
            if _decoded(unchecked_body(content), RECORD_KEY).holder == local.holder:
                store_record(objects, local, message_signer)


def store_record(objects: ObjectStore, record: RunRecord, message_signer: MessageSigner) -> None:
    """Store the record in the experiment's store, too.

    Args:
        objects: the experiment's store.
        record: the record.
        message_signer: signs this search's records.

    Raises:
        StoreError: the store cannot be reached.
    """
    objects.put_bytes(RECORD_KEY, message_signer.close(msgspec.json.encode(record), _CONTEXT))


def last_heard(objects: ObjectStore, message_signer: MessageSigner) -> str:
    """Return who ran the experiment in a store last, and how long ago it wrote; for messages.

    Raises:
        StoreError: the store cannot be reached.
    """
    written = max((one.modified for one in objects.list(f"{FILE_NAME}/")), default=0.0)
    try:
        record = stored_record(objects, message_signer)
    except JournalError:
        record = None
    holder = "an unknown process" if record is None else record.holder
    ago = max(0.0, time.time() - written)
    return f"{holder}, last heard {ago:.0f} s ago by the clocks of the store and this machine"


def check_newest(local: RunRecord | None, stored: RunRecord | None, folder: str) -> None:
    """Reject a folder whose experiment continued on another machine.

    Raises:
        SchedulerSuperseded: it did; says where.
    """
    if stored is None or (local is not None and stored.holder == local.holder):
        return
    is_scripts = not stored.events_key
    if local is None or is_scripts or stored.term > local.term:
        raise SchedulerSuperseded(
            f"{folder} is not the newest state of this experiment: it continued"
            f" elsewhere ({stored.holder}), or this folder is from a backup. Continue there; or, if"
            " that machine is lost or the folder is from a backup, move the folder away and start"
            " the scheduler with --take-over ADDRESS to continue from the store's copy."
        )


def _decoded(data: bytes, place: str) -> RunRecord:
    try:
        return msgspec.json.decode(data, type=RunRecord)
    except UNDECODABLE as error:
        raise _unreadable(place, error) from error


def _unreadable(place: str, error: Exception) -> JournalError:
    return JournalError(
        f"{place}, which says who ran this search last, cannot be read: {error}. If no other"
        " scheduler runs this search, remove it and start again."
    )


def _path(folder: str) -> Path:
    return Path(folder) / FILE_NAME / RECORD
