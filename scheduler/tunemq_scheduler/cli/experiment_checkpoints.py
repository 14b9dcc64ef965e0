"""`ExperimentCheckpoints`: an experiment's checkpoints, found by its folder or store address."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.journal.copy_signing_keys import known_journal_signer
from tunemq_scheduler.journal.fetch_copy import fetch_journal
from tunemq_scheduler.journal.journal_files import FILE_NAME, TURNS_SUFFIX, numbers
from tunemq_scheduler.journal.journal_reader import RecoveredJournal, recover
from tunemq_scheduler.journal.journal_replay import replay_as_far_as_possible, replay_recovered
from tunemq_shared.base.errors import CheckpointError, ConfigError, JournalError, StoreError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.checkpoints.manifest import MANIFEST, MAX_MANIFEST
from tunemq_shared.checkpoints.open_store import (
    canonical_address,
    is_remote,
    open_objects,
    open_store,
)
from tunemq_shared.checkpoints.remote_store import RemoteCheckpointStore
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.objects.object_store import NoSuchObject
from tunemq_shared.objects.store_address import without_settings
from tunemq_shared.protocol.messages import CheckpointCommitted


@dataclass(frozen=True)
class JournalledCheckpoint:
    """One checkpoint in the journal.

    Attributes:
        trial: The id of its trial.
        committed: The event that committed it.
        is_newest: Whether it is its trial's newest.
    """

    trial: str
    committed: CheckpointCommitted
    is_newest: bool

    @property
    def key(self) -> str:
        """Its key in the store."""
        return self.committed.key


class ExperimentCheckpoints:
    """All checkpoints of one experiment, and the store that holds them.

    Args:
        runner: The state replayed from the journal.
        store: Holds the files; closed by `opened`.
        address: The store's address, or the folder.
    """

    def __init__(self, runner: TrialRunner, store: CheckpointStore, address: str) -> None:
        self.runner = runner
        self.store = store
        self.address = address

    def all(self) -> list[JournalledCheckpoint]:
        """All checkpoints, sorted by trial, oldest first."""
        found = []
        held: dict[str, list[CheckpointCommitted]] = {}
        for one in self.runner.book.condemned():
            held.setdefault(one.trial, []).append(one)
        for trial in sorted([*self.runner.finished, *self.runner.live]):
            summary = self.runner.summary(trial)
            newest = "" if summary.checkpoint is None else summary.checkpoint.key
            kept = [*held.get(trial, ()), *summary.checkpoints]
            found += [JournalledCheckpoint(trial, one, one.key == newest) for one in kept]
        return found

    def there(self) -> set[str]:
        """The keys of all checkpoints in the store, including those that the journal lacks."""
        return set(self.store.list_checkpoints())

    def unknown(self) -> dict[str, str]:
        """Checkpoints in the store that the journal lacks, with their manifests' hashes.

        They exist if the journal is not the newest copy. They matter only in an object store, where
        they may refer to objects of other checkpoints.
        """
        if not isinstance(self.store, RemoteCheckpointStore):
            return {}
        known = {*self.runner.live_checkpoints(), *(one.key for one in self.all())}
        return {
            key: hashlib.sha256(
                self.store.objects.get_bytes(f"{key}/{MANIFEST}", limit=MAX_MANIFEST)
            ).hexdigest()
            for key in sorted(self.there() - known)
        }

    def named(self, name: str) -> JournalledCheckpoint:
        """Find the checkpoint with this key; for a trial's id or name, its newest one.

        The newest one of a trial that continues from the state of another may be that one's.

        Raises:
            CheckpointError: There is none.
        """
        by_key, key = {one.key: one for one in self.all()}, name
        for trial in (*self.runner.finished, *self.runner.live):
            is_named = name == trial or name.endswith(f"_{trial}")
            if is_named and (newest := self.runner.summary(trial).checkpoint) is not None:
                key = newest.key
        found = by_key.get(key)
        if found is None:
            keys = list(by_key)
            there_are = ", ".join(keys[:5]) + (" ..." if len(keys) > 5 else "") or "none"
            raise CheckpointError(
                f"{without_settings(self.address)} has no checkpoint {name!r}; give a key, or a "
                f"trial's id or name. It has: {there_are}."
            )
        return found


@contextmanager
def opened(experiment: str) -> Iterator[ExperimentCheckpoints]:
    """Open the checkpoints of the experiment at a local folder or at its address in a store.

    Raises:
        ConfigError: There is no experiment.
        JournalError: Its journal cannot be read.
        StoreError: Its store cannot be reached.
    """
    with opened_journal(experiment) as (runner, own_store):
        is_copy = is_remote(experiment)
        local = os.path.abspath(os.path.expanduser(experiment.removeprefix("file://")))
        address = canonical_address(experiment) if is_copy else own_store or local
        store = open_store(address)
        try:
            yield ExperimentCheckpoints(runner, store, address)
        finally:
            store.close()


@contextmanager
def opened_journal(experiment: str) -> Iterator[tuple[TrialRunner, str]]:
    """Replay the journal of the experiment at a local folder or at its address in a store.

    Yields:
        The state at its end, and the address of its store; empty for none.

    Raises:
        ConfigError: There is no experiment.
        JournalError: Its journal cannot be read.
        StoreError: Its store cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="tunemq-journal-") as scratch:
        if is_remote(experiment):
            folder = _fetched_journal(canonical_address(experiment), scratch)
        else:
            folder = Path(os.path.expanduser(experiment.removeprefix("file://"))).absolute()
        path = folder / FILE_NAME
        if not path.exists():
            raise ConfigError(
                f"{experiment} is not an experiment: it has no {FILE_NAME}. Give the folder of "
                "a search, or its address in a store."
            )
        found = _recovered_while_used(path)
        yield replay_recovered(found), found.header.store


def _recovered_while_used(path: Path) -> RecoveredJournal:
    """Read a journal; repeats if a snapshot of its running search removed files meanwhile."""
    while True:
        files = numbers(path, TURNS_SUFFIX)
        try:
            return recover(path)
        except JournalError:
            if numbers(path, TURNS_SUFFIX) == files:
                raise


def _fetched_journal(address: str, scratch: str) -> Path:
    """Copy the journal from the store to a folder, and return that."""
    objects = open_objects(address)
    objects.probe(is_read_only=True)
    try:
        path, signer = Path(scratch, FILE_NAME), known_journal_signer(address)
        found = fetch_journal(objects, path, signer, replay=replay_as_far_as_possible)
    except NoSuchObject as error:
        raise ConfigError(
            f"{without_settings(address)} is not an experiment, or its journal was not copied "
            "there yet. Give the local folder of the search."
        ) from error
    except StoreError as error:
        raise StoreError(
            f"cannot read the journal of {without_settings(address)}: {error}"
        ) from error
    if found.lost:
        sys.stderr.write(f"{harmless(found.lost)}\n")
    return Path(scratch)
