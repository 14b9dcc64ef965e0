"""Brings an experiment from its store to this machine, and takes it over from another run."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.journal import journal_files
from tunemq_scheduler.journal.copy_layout import TUNER
from tunemq_scheduler.journal.fetch_copy import fetch_journal, has_others, is_copy_ahead
from tunemq_scheduler.journal.journal_files import FILE_NAME, LOCK
from tunemq_scheduler.journal.journal_lock import JournalLock
from tunemq_scheduler.journal.journal_replay import replay_as_far_as_possible
from tunemq_scheduler.output.callback_states import STATES_FILE
from tunemq_scheduler.settings.saved_tuner import TUNER_FILE
from tunemq_scheduler.storage.last_run import (
    RECORD,
    RunRecord,
    last_heard,
    read_record,
    stored_record,
    write_record,
)
from tunemq_scheduler.storage.store_claim import FRESH_S, StoreClaim
from tunemq_shared.base.errors import ConfigError, JournalError, StoreError
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.object_store import NoSuchObject, ObjectSizeMismatch, ObjectStore
from tunemq_shared.objects.store_address import without_settings
from tunemq_shared.signing.message_signing import MessageSigner
from tunemq_shared.system.folder_trees import remove_tree

#: Seconds until another run has noticed this one's record before it deletes a checkpoint.
_NOTICED_S: Final = 2 * FRESH_S
_CHECKPOINT: Final = "checkpoint_"
#: The folder, in an experiment's, to which its journal is fetched.
_FETCHED: Final = ".fetched"
_FETCHED_FILE: Final = ".fetched-file"
#: In `_FETCHED`: the journal that was fetched before.
_EARLIER: Final = "earlier"
_log = logging.getLogger(__name__)


def bring_experiment(
    address: str, folder: str, message_signer: MessageSigner, record: RunRecord | None = None
) -> str:
    """Copy an experiment without its checkpoints from its store into a folder.

    The journal appears there last, and complete: before, the experiment can be brought again. It
    replaces one that was only fetched; the journal of a run that happened there stays.

    Args:
        address: the experiment's address in the store.
        folder: the target.
        message_signer: verifies the search's journals. With keys, it accepts only a journal and a
            Tuner that the scheduler signed.
        record: the record of the last run, to be stored beside the journal.

    Returns:
        What the journal's copy lacked, for messages; empty if nothing.

    Raises:
        ConfigError: there is none at this address.
        StoreError: the store cannot be reached, or the copy cannot be used.
        JournalError: the journal's copy cannot be used, or a run left a journal in the folder.
    """
    os.makedirs(folder, exist_ok=True)
    try:
        with open_objects(address) as objects:
            _bring_files(objects, Path(folder))
            fetched = Path(folder, _FETCHED)
            remove_tree(fetched)  # an earlier attempt was killed
            fetched.mkdir()
            journal = fetched / FILE_NAME
            try:
                found = fetch_journal(
                    objects, journal, message_signer, replay=replay_as_far_as_possible
                )
            except JournalError as error:  # a run that is alive may be the cause
                heard = last_heard(objects, message_signer)
                error.args = (f"{error} The last run there: {heard}.",)
                raise
    except NoSuchObject as error:
        raise ConfigError(
            f"{without_settings(address)} is not an experiment, or its journal was not copied "
            "there yet. Give the local folder of the search."
        ) from error
    copied, tuner = journal / TUNER, Path(folder, TUNER_FILE)
    if copied.exists():
        copied.replace(tuner)
    elif message_signer.is_signed:
        tuner.unlink(missing_ok=True)
    states = Path(folder, STATES_FILE)
    if message_signer.is_signed and states.exists():
        states.unlink()
        _log.warning("%s is not restored: in the store it has no signature.", STATES_FILE)
    if record is not None:
        write_record(str(fetched), record)
    target = Path(folder, FILE_NAME)
    try:
        if is_only_fetched(folder):
            # A run may be about to begin there.
            with contextlib.closing(JournalLock(target, os.path.basename(folder))):
                target.rename(fetched / _EARLIER)
        journal.rename(target)
    except OSError as error:
        raise JournalError(
            f"the journal cannot be brought to {folder}: {error.strerror}; move that folder away."
        ) from error
    journal_files.sync_folder(Path(folder))
    remove_tree(fetched)
    return found.lost


def is_only_fetched(folder: str) -> bool:
    """Whether the folder has an experiment of which no run happened there."""
    journal = Path(folder, FILE_NAME)
    # A run locks the journal, and leaves the file of the lock behind.
    return journal.exists() and not any((journal / name).exists() for name in (LOCK, RECORD))


def claim_store(address: str, message_signer: MessageSigner) -> RunRecord | None:
    """Claim an experiment's store for this process, and wait until a live run has noticed.

    From then on that run deletes no checkpoint, so the journal's copy refers to none that is gone.

    Args:
        address: the experiment's address in the store.
        message_signer: verifies the search's records, and signs this one.

    Returns:
        The record of the last run; None if there is none.

    Raises:
        JournalError: the record cannot be read, or has no valid signature of the scheduler.
        StoreError: the store cannot be reached.
    """
    claim = StoreClaim(address, message_signer)
    last = claim.stored()
    if last is not None and not last.holder.is_gone:
        claim.write(msgspec.structs.replace(last, holder=LeaseHolder.this_process()))
        time.sleep(_NOTICED_S)
    return last


def check_newest_here(address: str, folder: str, message_signer: MessageSigner) -> None:
    """Reject a folder if its store has results of the search that it lacks.

    Both would write to the same place in the store, and those results would be lost.

    Args:
        address: the experiment's address in the store.
        folder: its folder, which no process has open.
        message_signer: verifies the search's records and journals.

    Raises:
        ConfigError: it does; says where.
        JournalError: the folder's journal or record cannot be read.
        StoreError: the store cannot be reached.
    """
    journal, local = Path(folder, FILE_NAME), read_record(folder)
    with open_objects(address) as objects:
        stored = stored_record(objects, message_signer)
        is_same_run = stored is None or (local is not None and stored.holder == local.holder)
        is_behind = is_copy_ahead if is_same_run else has_others
        if not is_behind(objects, journal, message_signer):
            return
        shown = without_settings(address)
        raise ConfigError(
            f"the search in {folder} continued elsewhere since, or another search took its place "
            f"({last_heard(objects, message_signer)}), and {shown} has the newest state: rename "
            f'this folder, and restore from there: Tuner.restore("{shown}", ...). To give up '
            "everything since, remove journal/ there first."
        )


def bring_newest(address: str, folder: str, message_signer: MessageSigner) -> str:
    """Claim a brought experiment's store; bring it again if a live run has continued it.

    Args:
        address, folder, message_signer: as for `bring_experiment`.

    Returns:
        As `bring_experiment`; empty if the brought journal is the newest.

    Raises:
        JournalLocked: a process of this machine has the experiment.
        ConfigError, StoreError, JournalError: as `bring_experiment`.
    """
    journal = Path(folder, FILE_NAME)
    lock = JournalLock(journal, os.path.basename(folder))
    try:
        claim_store(address, message_signer)
        with open_objects(address) as objects:
            if not is_copy_ahead(objects, journal, message_signer):
                return ""
        remove_tree(journal)
    finally:
        lock.close()
    return bring_experiment(address, folder, message_signer)


def _bring_files(objects: ObjectStore, folder: Path) -> None:
    """Copy the experiment's and its trials' own files, without checkpoints."""
    listed = list(objects.list())
    names = {TUNER_FILE, *(found.key for found in listed)}
    for found in listed:
        if not is_safe_name(found.key):
            raise StoreError(f"the store has an object of the name {found.key!r}.")
        parts = found.key.split("/")
        if any("/".join(parts[:length]) in names for length in range(1, len(parts))):
            _log.warning("%s is not restored: a part of its name is a file.", found.key)
            continue
        # Folders that begin with a dot are not needed: code is uploaded again.
        if (
            parts[0] == FILE_NAME
            or parts[0].startswith(".")
            or any(part.startswith(_CHECKPOINT) for part in parts)
        ):
            continue
        path = folder.joinpath(*parts)
        _make_room(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fetched = folder / _FETCHED_FILE
        fetched.unlink(missing_ok=True)  # an earlier attempt was cut off
        try:
            objects.get_file(found.key, fetched, size=found.size, cancel=CancelToken())
        except (NoSuchObject, ObjectSizeMismatch):  # a live run has replaced it
            _log.warning("%s is not restored: it has changed meanwhile.", found.key)
            continue
        shutil.copyfile(fetched, path)  # a process may have the file open as its output
        fetched.unlink()


def _make_room(path: Path) -> None:
    """Remove a folder where a file is to be: a worker may have named an object like that before."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
