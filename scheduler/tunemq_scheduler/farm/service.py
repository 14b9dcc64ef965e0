"""What `tunemq scheduler` does: finds the search and its place, gets the farm, runs it there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tunemq_scheduler.farm.holder import Holder
from tunemq_scheduler.farm.record import RunRecord, check_newest, read_record, stored_record
from tunemq_scheduler.farm.script import load_tuner
from tunemq_scheduler.folders import make_experiment_folder, safe_name
from tunemq_scheduler.installed_packages import installed_packages_first
from tunemq_scheduler.journal import FILE_NAME, read_header
from tunemq_scheduler.opening import ResumeOptions
from tunemq_scheduler.prepare import Prepared, prepare
from tunemq_scheduler.restoring import Restored, bring_experiment, restored
from tunemq_scheduler.saved_tuner import pickle_tuner, save_tuner
from tunemq_scheduler.storage import Storage, storage_of
from tunemq_scheduler.tuner import Tuner, TunerParts
from tunemq_shared.errors import (
    BugError,
    ConfigError,
    JournalLocked,
    SchedulerSuperseded,
    TuneError,
    UserError,
    WireUnavailable,
)
from tunemq_shared.store_address import canonical_address, is_remote, join
from tunemq_shared.stores import open_objects

#: The search could not go on; what it had is saved.
EXIT_FAILED: Final = 1
#: Redis is away, or lets nobody in (EX_UNAVAILABLE).
EXIT_UNAVAILABLE: Final = 69
#: Another scheduler runs on this farm, has this search, or took it over (EX_TEMPFAIL).
EXIT_SUPERSEDED: Final = 75
#: A killed process gives its locks back with its last file, which a slow disk may hold up.
_LOCK_WITHIN_S: Final = 5.0
_RETRY_S: Final = 0.02


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of ``tunemq scheduler``; see there.

    Attributes:
        take_over: None where it was not asked for, empty where it was without an address.
    """

    url: str
    script: str
    results: str | None = None
    name: str | None = None
    journal_release: str = "local"
    take_over: str | None = None


class _Place(NamedTuple):
    """Where the experiment is.

    ``copy`` is the address from which it has to be brought; ``is_there`` whether it was run before.
    """

    folder: str
    store: str
    copy: str
    is_there: bool


def run_service(wanted: Wanted) -> int:
    """Run the search; the exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C; everything is saved.
        UserError: something given is of no use; says what to do.
        BugError: ours.
    """
    try:
        _run(wanted)
    except (UserError, BugError):
        raise
    except TuneError as problem:
        _tell(str(problem))
        if isinstance(problem, SchedulerSuperseded | JournalLocked):
            return EXIT_SUPERSEDED
        return EXIT_UNAVAILABLE if isinstance(problem, WireUnavailable) else EXIT_FAILED
    return 0


def _run(wanted: Wanted) -> None:
    parts = _parts_of(load_tuner(wanted.script), wanted)
    place = _place_of(parts, wanted)
    if wanted.journal_release == "store" and not place.store:
        raise ConfigError(
            "--journal-release store needs a store that outlives this machine: give the search"
            " RunConfig(storage_path='s3://bucket/prefix')."
        )
    with installed_packages_first("celery", "kombu", "redis"):
        from tunemq_scheduler.farm.experiment import FarmExperiment, Wire
        from tunemq_scheduler.farm.lease import SchedulerLease

    me = Holder.this_process(parts.run.name or "")
    record = _newest_record(place)
    lease = SchedulerLease(wanted.url, me)
    try:
        lease.claim(record.term + 1 if record is not None else 1, _tell)
        record = _newest_record(place)  # who had the lease until now may have said goodbye
        if place.copy:
            _bring(place)
        prepared, found, keep = _prepared(parts, place)
        experiment = FarmExperiment(
            prepared,
            Storage(place.folder, found.store if found is not None else place.store),
            None if found is None else found.options,
            keep=keep,
            on=Wire(wanted.url, _without_password(wanted.url), lease, me),
            release_when_copied=wanted.journal_release == "store",
            is_copy=bool(place.copy),
            record=record,
        )
        _free_journal(place, record, may_kill=wanted.take_over is not None)
        experiment.run()
    finally:
        lease.close()


# --- what was asked for ---------------------------------------------------------------------------


def _parts_of(tuner: Tuner, wanted: Wanted) -> TunerParts:
    parts = tuner.parts
    name = wanted.name or parts.run.name
    if wanted.take_over and not wanted.name:
        name = wanted.take_over.partition("?")[0].rstrip("/").rpartition("/")[2]
    if not name:
        raise ConfigError(
            "the experiment needs a name, by which it is found again after a crash: --name, or"
            " RunConfig(name=...) in the script."
        )
    return parts._replace(run=replace(parts.run, name=safe_name(name, "experiment")))


def _place_of(parts: TunerParts, wanted: Wanted) -> _Place:
    among = storage_of(parts.run)
    if wanted.results is not None:
        if is_remote(wanted.results):
            raise ConfigError(
                f"--results {wanted.results} is no folder of this machine; the store of a search is"
                " its RunConfig(storage_path=...)."
            )
        among = Storage(os.path.abspath(os.path.expanduser(wanted.results)), among.store)
    name = parts.run.name or ""
    folder = os.path.join(among.folder, name)
    store = join(among.store, name) if among.store else ""
    is_there = _has_journal(folder)
    copy = ""
    if wanted.take_over:
        if not is_remote(wanted.take_over):
            raise ConfigError(
                f"--take-over {wanted.take_over}: give the address of an experiment in a store,"
                " such as s3://bucket/prefix/name; nothing for one in --results."
            )
        address = canonical_address(wanted.take_over)
        store = address
        copy = "" if is_there else address
    elif store and not is_there:
        _check_free(store)
    if not (is_there or copy):
        make_experiment_folder(among.folder, name, is_new=False)
    return _Place(folder, store, copy, is_there or bool(copy))


def _check_free(store: str) -> None:
    """Refuse to begin where there is another experiment of the name.

    Raises:
        ConfigError: there is one.
        StoreError: the store cannot be used.
    """
    with open_objects(store) as objects:
        objects.probe()
        if next(iter(objects.list(f"{FILE_NAME}/")), None) is not None:
            raise ConfigError(
                f"there is an experiment at {store}, and nothing of it on this machine: go on with"
                f" it by --take-over {store}, or give this one another --name."
            )


def _has_journal(folder: str) -> bool:
    path = Path(folder, FILE_NAME)
    if not path.is_dir() or not any(path.glob("*.turns")):
        return False
    read_header(path)
    return True


def _newest_record(place: _Place) -> RunRecord | None:
    """Who ran the experiment last.

    Raises:
        SchedulerSuperseded: this machine's folder is not the newest state of it.
    """
    local = read_record(place.folder) if place.is_there and not place.copy else None
    if not (place.store and place.is_there):
        return local
    with open_objects(place.store) as objects:
        stored = stored_record(objects)
    if place.copy:
        return stored
    check_newest(local, stored, place.folder)
    return local


def _bring(place: _Place) -> None:
    """Bring the experiment's copy to this machine.

    Raises:
        ConfigError: there is none.
    """
    _tell(f"Bringing the experiment from {place.copy} to {place.folder} ...")
    bring_experiment(place.copy, place.folder)


def _prepared(
    parts: TunerParts, place: _Place
) -> tuple[Prepared, Restored | None, Callable[[], None]]:
    found = None
    if place.is_there:
        found = restored(
            place.folder,
            parts.trainable,
            ResumeOptions(),
            param_space=parts.param_space or {},
            tune_config=parts.tune,
            run_config=parts.run,
        )
        parts = parts._replace(tune=found.tune, run=found.run)
    # Before `prepare` sets up the algorithms in it: a later run begins with fresh ones.
    kept = pickle_tuner(parts.param_space, parts.tune, parts.run)
    prepared = prepare(*parts)

    def keep() -> None:
        save_tuner(place.folder, kept, name=prepared.trainable_name, seed=prepared.seed)

    return prepared, found, keep


def _free_journal(place: _Place, record: RunRecord | None, *, may_kill: bool) -> None:
    """See to it that nobody of this machine holds the journal, whose lease we have.

    A process that lost its lease and still holds the journal was stopped, or is stuck. Once it went
    on it would write into the journal's middle; so it is not enough to take the lock from it.

    Raises:
        JournalLocked: somebody holds it, and may not be killed.
    """
    holder = record.holder if record is not None else None
    if place.copy or holder is None or not holder.is_here or holder.is_gone:
        return  # what was brought from the store is held by nobody
    if not may_kill:
        raise JournalLocked(
            f"{place.folder} is held by a scheduler that does not renew its lease ({holder}): it"
            " was stopped, or hangs. End it, or have it killed with --take-over."
        )
    _tell(f"Killing the scheduler that held this search: {holder}.")
    deadline = time.monotonic() + _LOCK_WITHIN_S
    while not holder.kill():
        if time.monotonic() > deadline:
            raise JournalLocked(f"{place.folder} is held by {holder}, which cannot be killed.")
        time.sleep(_RETRY_S)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=place).geturl()


def _tell(text: str) -> None:
    sys.stderr.write(f"tunemq scheduler: {text}\n")
