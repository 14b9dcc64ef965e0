"""Finds an experiment's location and state, and runs it on a farm."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.api.tuner import TunerParts
from tunemq_scheduler.experiment.bring_experiment import bring_experiment, claim_store
from tunemq_scheduler.experiment.open_experiment import KeepTuner, ResumeOptions, keeper_of
from tunemq_scheduler.experiment.restore import RestoredExperiment, restored
from tunemq_scheduler.experiment.start_checks import PreparedSearch, prepare
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.ipc_messages import RETRY_ALL, ExperimentJob
from tunemq_scheduler.farm.process.farm_experiment import FarmExperiment
from tunemq_scheduler.journal.fetch_copy import is_copy_ahead
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_scheduler.settings.saved_tuner import pickle_tuner
from tunemq_scheduler.settings.storage_settings import StorageLocation, storage_of
from tunemq_scheduler.storage.folders import make_experiment_folder, safe_name
from tunemq_scheduler.storage.last_run import (
    RunRecord,
    check_newest,
    read_record,
    sign_again,
    stored_record,
)
from tunemq_shared.base.errors import (
    ConfigError,
    JournalCorrupt,
    JournalLocked,
    SchedulerSuperseded,
)
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.store_address import canonical_address, is_remote, join, without_settings
from tunemq_shared.signing.key_files import journal_signer
from tunemq_shared.signing.message_signing import MessageSigner
from tunemq_shared.system.standard_streams import tell

#: A killed process releases its locks with its last file, which a slow disk may delay.
_LOCK_WITHIN_S: Final = 5.0
_RETRY_S: Final = 0.02


class ExperimentLocation(NamedTuple):
    """The location of an experiment.

    ``copy`` is the address from which to download it, if needed; ``is_there`` says whether it has
    run before.
    """

    folder: str
    store: str
    copy: str
    is_there: bool


def run_on_farm(parts: TunerParts, job: ExperimentJob, connection: SupervisorConnection) -> None:
    """Run the search.

    Args:
        parts: the experiment's Tuner.
        job: how it is run this time.
        connection: to the farm's supervisor.

    Raises:
        TuneError: the search cannot run, or failed.
    """
    parts = parts._replace(run=replace(parts.run, name=safe_name(job.name, "experiment")))
    place = _place_of(parts, job)
    message_signer = journal_signer(job.journal_keys)
    lost = ""
    if place.copy:
        tell(f"Fetching the experiment from {place.copy} to {place.folder} ...")
        with connection.alive():
            record = claim_store(place.copy, message_signer)
            lost = bring_experiment(place.copy, place.folder, message_signer, record)
    else:
        record = _newest_record(place, message_signer)
    prepared, found, keep = _prepared(parts, place, job)
    experiment = FarmExperiment(
        prepared,
        StorageLocation(place.folder, found.store if found is not None else place.store),
        None if found is None else found.options,
        keep=keep,
        connection=connection,
        job=job,
        is_copy=bool(place.copy),
        lost=lost,
        record=record,
    )
    _free_journal(place, record)
    try:
        experiment.run()
    except JournalCorrupt as error:
        if place.store:
            address = without_settings(place.store)
            also = f"See first whether the copy has more: `tunemq journal check {address}`. If it"
            error.args = (f"{error} {also} does, {_take_over(place)}.",)
        raise


# --- location -------------------------------------------------------------------------------------


def _place_of(parts: TunerParts, job: ExperimentJob) -> ExperimentLocation:
    """Return the location of a named experiment, and create its folder.

    Raises:
        ConfigError: it cannot be there; says what to do.
        StoreError: its store cannot be used.
    """
    name = parts.run.name or ""
    folder = os.path.join(job.results, name)
    store = job.store if is_remote(job.store) else ""
    if among := storage_of(parts.run).store:
        store = join(among, name)
    is_there = _has_journal(folder)
    copy = ""
    if job.take_over:
        store = canonical_address(job.take_over)
        copy = "" if is_there else store
    elif store and not is_there:
        _check_free(store)
    if not (is_there or copy):
        make_experiment_folder(job.results, name, is_new=False)
    return ExperimentLocation(folder, store, copy, is_there or bool(copy))


def _check_free(store: str) -> None:
    """Check that the store has no other experiment of this name.

    Raises:
        ConfigError: there is one.
        StoreError: the store cannot be used.
    """
    with open_objects(store) as objects:
        objects.probe()
        if next(iter(objects.list(f"{FILE_NAME}/")), None) is not None:
            raise ConfigError(
                f"the store has an experiment at {store}, and this machine has nothing of it: "
                f"start the farm's scheduler with --take-over {store}, or submit this one with "
                "another --name."
            )


def _has_journal(folder: str) -> bool:
    path = Path(folder, FILE_NAME)
    if not path.is_dir() or not any(path.glob("*.turns")):
        return False
    read_header(path)
    return True


def _newest_record(place: ExperimentLocation, message_signer: MessageSigner) -> RunRecord | None:
    """Return the record of the last run of an experiment that needs no download.

    Args:
        place: the experiment's location.
        message_signer: signs the journals of this search.

    Raises:
        SchedulerSuperseded: this machine's folder is not its newest state.
    """
    local = read_record(place.folder) if place.is_there else None
    if not (place.store and place.is_there):
        return local
    with open_objects(place.store) as objects:
        if local is not None:
            sign_again(objects, local, message_signer)
        check_newest(local, stored_record(objects, message_signer), place.folder)
        if is_copy_ahead(objects, Path(place.folder, FILE_NAME), message_signer):
            raise SchedulerSuperseded(
                f"{place.folder} lacks results that the copy in the store has, for example "
                f"after a restore of a backup: {_take_over(place)}."
            )
    return local


def _take_over(place: ExperimentLocation) -> str:
    return (
        f"move {place.folder} away and start the scheduler with --take-over"
        f" {without_settings(place.store)} to continue from the copy"
    )


def _prepared(
    parts: TunerParts, place: ExperimentLocation, job: ExperimentJob
) -> tuple[PreparedSearch, RestoredExperiment | None, KeepTuner]:
    found = None
    if place.is_there:
        retried = () if job.retry in {"", RETRY_ALL} else (job.retry,)
        options = ResumeOptions(errored="resume" if job.retry == RETRY_ALL else "", also=retried)
        found = restored(
            place.folder,
            parts.trainable,
            options,
            param_space=parts.param_space or {},
            tune_config=parts.tune,
            run_config=parts.run,
            is_own_code=True,
        )
        found = found._replace(options=msgspec.structs.replace(found.options, also=retried))
        parts = parts._replace(param_space=found.param_space, tune=found.tune, run=found.run)
    # Before `prepare` sets up the algorithms in it: a later run begins with fresh ones.
    kept = pickle_tuner(parts.param_space, parts.tune, parts.run)
    if job.variables:
        # They are stored only in the farm's queue, because a value may be secret, and other users
        # read an experiment's folder.
        variables = {**(parts.run.env_vars or {}), **job.variables}
        parts = parts._replace(run=replace(parts.run, env_vars=variables))
    prepared = prepare(*parts)
    resumes = None if found is None else found.options
    return prepared, found, keeper_of(place.folder, kept, prepared, resumes)


def _free_journal(place: ExperimentLocation, record: RunRecord | None) -> None:
    """Kill an outdated process of this machine that still holds the journal.

    Such a process belongs to a supervisor that lost its lease, and is suspended or stuck. If it
    continued, it would write into the middle of the journal; so taking its lock is not enough.

    Raises:
        JournalLocked: a process holds the journal and cannot be killed.
    """
    holder = record.holder if record is not None else None
    if place.copy or holder is None or not holder.is_here or holder.is_gone:
        return  # no process holds an experiment that was downloaded from the store
    if holder.is_hidden:
        return  # if that process is running, it has the journal's lock
    tell(f"Killing the scheduler that held this search: {holder}.")
    deadline = time.monotonic() + _LOCK_WITHIN_S
    while not holder.kill():
        if time.monotonic() > deadline:
            raise JournalLocked(f"{place.folder} is held by {holder}, which cannot be killed.")
        time.sleep(_RETRY_S)
