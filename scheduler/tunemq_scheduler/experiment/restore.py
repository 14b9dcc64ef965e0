"""Prepares `Tuner.restore`: finds the experiment, and checks what was passed to it.

Its folder contains the arguments of the original run (`tunemq_scheduler.settings.saved_tuner`).
Some may be replaced; those by which earlier trials were judged may not.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.experiment.bring_experiment import bring_experiment, is_only_fetched
from tunemq_scheduler.experiment.open_experiment import ResumeOptions, StopCriteria
from tunemq_scheduler.journal.fetch_copy import copied_id, has_others
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_lock import is_being_written
from tunemq_scheduler.journal.journal_reader import read_header, recover
from tunemq_scheduler.journal.journal_replay import replay_recovered
from tunemq_scheduler.results.lazy_results import trial_results
from tunemq_scheduler.results.result_grid import ResultGrid
from tunemq_scheduler.search.domain_types import Domain, Function
from tunemq_scheduler.search.same_values import same
from tunemq_scheduler.search.space import path_name, read_space, variables
from tunemq_scheduler.settings.config import RunConfig, TuneConfig
from tunemq_scheduler.settings.saved_tuner import TUNER_FILE, SavedTuner, read_tuner
from tunemq_scheduler.stopping.stopper import make_stopping
from tunemq_scheduler.storage.folders import make_experiment_folder, results_folder, safe_name
from tunemq_scheduler.storage.last_run import last_heard, stored_record
from tunemq_shared.base.errors import ConfigError, JournalError, StoreError
from tunemq_shared.base.safe_text import repr_of
from tunemq_shared.checkpoints.open_store import check_allowed, open_objects
from tunemq_shared.code.code_by_value import trainable_name
from tunemq_shared.objects.object_store import NoSuchObject, ObjectStore
from tunemq_shared.objects.store_address import canonical_address, is_remote, without_settings
from tunemq_shared.protocol.messages import BlobRef, Environment
from tunemq_shared.signing.key_files import journal_signer
from tunemq_shared.system.folder_trees import remove_tree
from tunemq_shared.trainable.attached import attached_to

_log = logging.getLogger(__name__)


class RestoredExperiment(NamedTuple):
    """An experiment that can be resumed, and the arguments for that.

    ``address`` is the address from which it is restored; empty if from a folder.
    """

    folder: str
    store: str
    address: str
    param_space: dict[str, Any] | None
    tune: TuneConfig
    run: RunConfig
    options: ResumeOptions


def can_restore(path: str | os.PathLike[str]) -> bool:
    """Whether this folder, or this address in a store, contains an experiment."""
    place = os.fspath(path)
    try:
        if is_remote(place):
            with open_objects(canonical_address(place)) as objects:
                return any(found.key == TUNER_FILE for found in objects.list(TUNER_FILE))
        folder = _local(place)
        read_header(Path(folder) / FILE_NAME)
    except (JournalError, StoreError, ConfigError):
        return False
    return os.path.isfile(os.path.join(folder, TUNER_FILE))


def restored(
    path: str | os.PathLike[str],
    trainable: Any,
    options: ResumeOptions,
    *,
    param_space: dict[str, Any] | None = None,
    tune_config: TuneConfig | None = None,
    run_config: RunConfig | None = None,
    is_own_code: bool = False,
) -> RestoredExperiment:
    """Find the experiment, and check new arguments against those of the original run.

    Args:
        path: its folder, or its address in a store.
        trainable: the same as before.
        options: how to treat the trials of earlier runs.
        param_space, tune_config, run_config: new arguments; None: those that were saved.
        is_own_code: the search's own code made the arguments anew. The saved search space and seed
            count, as far as they can be loaded: code may make others each time, by the clock or in
            the order of a set, and values without a representation cannot be compared.

    Raises:
        ConfigError: there is none, or it cannot resume like this; says why.
        JournalError: its journal cannot be read.
        StoreError: its store cannot be reached.
    """
    place = os.fspath(path)
    address = canonical_address(place) if is_remote(place) else ""
    folder = _fetched(address, None) if address else _local(place)
    saved = read_tuner(folder)
    header = read_header(Path(folder) / FILE_NAME)
    _check_trainable(trainable, saved)
    tune = saved.get("tune_config") if tune_config is None else tune_config
    run = saved.get("run_config") if run_config is None else run_config
    if is_own_code:
        tune = replace(tune, seed=None)
        with contextlib.suppress(ConfigError):
            param_space = saved.get("param_space") or {}
    elif param_space is not None and (before := _loaded(saved, "param_space")):
        _check_space(before[0], param_space)
    space = saved.get("param_space") if param_space is None else param_space
    if tune_config is not None and (before := _loaded(saved, "tune_config")):
        _check_tune(before[0], tune_config)
    if tune.seed not in {None, saved.seed}:
        raise _other("TuneConfig(seed)", saved.seed, tune.seed)
    if run_config is not None and (before := _loaded(saved, "run_config")):
        _check_run(before[0], run_config, is_own_code=is_own_code)
    stops = StopCriteria(
        saved=saved.stop,
        saved_for=saved.run,
        earlier=saved.stopped_by,
        now=make_stopping(run.stop)[0],
    )
    return RestoredExperiment(
        folder=folder,
        store=header.store,
        address=address,
        param_space=space,
        tune=replace(tune, seed=saved.seed),
        run=run,
        options=msgspec.structs.replace(options, stops=stops),
    )


def results_so_far(found: RestoredExperiment, trainable: Any) -> ResultGrid:
    """Return the results of the experiment's trials in its journal; changes nothing.

    Raises:
        JournalError: the journal cannot be read.
    """
    return _results(
        found.folder, found.store, trainable, metric=found.tune.metric, mode=found.tune.direction
    )


def foreign_results(
    place: str, identity: str, trainable: Any, *, metric: str | None, mode: str | None
) -> ResultGrid:
    """Return the results so far of a farm's experiment; executes nothing of what stands there.

    Others may have written to the store. Values of configurations whose loading could run code
    are shown as `PickledValue`.

    Args:
        place: its folder, or its address in a store, from which they are fetched anew, however
            often, and never into a folder in which the experiment ran.
        identity: the beginning of the experiment's id.
        trainable, metric, mode: those that were submitted.

    Raises:
        ConfigError: there is none, or it is another one.
        JournalError: its journal cannot be read.
        StoreError: its store cannot be reached.
    """
    folder = _fetched(canonical_address(place), identity) if is_remote(place) else _local(place)
    store = read_header(Path(folder) / FILE_NAME).store
    return _results(folder, store, trainable, metric=metric, mode=mode, is_foreign=True)


def _results(
    folder: str,
    store: str,
    trainable: Any,
    *,
    metric: str | None,
    mode: str | None,
    is_foreign: bool = False,
) -> ResultGrid:
    journal = Path(folder) / FILE_NAME
    may_run = is_being_written(journal)  # asked first: the search may end while it is read
    recovered = recover(journal)
    plan = ExperimentPlan(
        experiment=os.path.basename(folder),
        experiment_id=recovered.header.experiment_id,
        events_key="",
        folder=folder,
        trainable_name=_name_of(trainable),
        code=BlobRef("", 0, ""),
        environment=Environment("", (), {}, ()),
        store=store,
        is_foreign=is_foreign,
    )
    runner = replay_recovered(recovered)
    may_run = may_run or not runner.is_finished  # a killed one has written its files in part
    return ResultGrid(
        trial_results(runner, plan, may_run=may_run),
        experiment_path=folder,
        metric=metric,
        mode=mode,
    )


# --- checks ---------------------------------------------------------------------------------------


def _loaded(saved: SavedTuner, name: str) -> tuple[Any, ...]:
    """Return the saved argument, to compare the new one with it; nothing if it cannot be loaded."""
    if getattr(saved, name).problem:
        return ()
    try:
        return (saved.get(name),)
    except ConfigError as error:
        _log.warning(
            "The saved %s cannot be loaded (%s), so the new one is not compared with it.",
            name,
            error.__cause__,
        )
        return ()


def _check_trainable(trainable: Any, saved: SavedTuner) -> None:
    name = _name_of(trainable)
    if name != saved.trainable:
        raise ConfigError(
            f"the experiment was run with the trainable {saved.trainable!r}, and Tuner.restore "
            f"got {name!r}; pass the same one."
        )


def _name_of(trainable: Any) -> str:
    return safe_name(trainable_name(attached_to(trainable).original), "trial")


def _check_space(before: Any, given: Any) -> None:
    old = {path_name(path): one for path, one in variables(read_space(before or {}))}
    new = {path_name(path): one for path, one in variables(read_space(given or {}))}
    for name in {**old, **new}:
        if not _same(old.get(name), new.get(name)):
            raise _other(f"param_space: {name}", old.get(name), new.get(name))


def _same(one: Domain | None, other: Domain | None) -> bool:
    if isinstance(one, Function) and isinstance(other, Function):
        return True  # its code may have been corrected
    # Values such as arrays cannot be compared.
    return type(one) is type(other) and (same(one, other) or repr_of(one) == repr_of(other))


def _check_tune(before: TuneConfig, given: TuneConfig) -> None:
    for name in ("metric", "direction", "nonfinite"):
        old, new = getattr(before, name), getattr(given, name)
        if old != new:
            raise _other(f"TuneConfig({name.replace('direction', 'mode')})", old, new)
    for name in ("search_alg", "scheduler"):
        old, new = _kind(getattr(before, name)), _kind(getattr(given, name))
        if old != new:
            raise _other(f"TuneConfig({name})", old, new)


def _check_run(before: RunConfig, given: RunConfig, *, is_own_code: bool) -> None:
    old, new = before.resume_from_checkpoint, given.resume_from_checkpoint
    if before.checkpoint_config != given.checkpoint_config:
        raise _other(
            "RunConfig(checkpoint_config)", before.checkpoint_config, given.checkpoint_config
        )
    # The journal has the checkpoint from which the search's trials begin.
    if old != new and new is not None and not is_own_code:
        raise _other("RunConfig(resume_from_checkpoint)", old, new)


def _kind(algorithm: Any) -> str:
    return algorithm if isinstance(algorithm, str) else type(algorithm).__name__


def _other(what: str, before: object, given: object) -> ConfigError:
    return ConfigError(
        f"{what} was {before!r} when the experiment was run, and is {given!r} now; trials of "
        "both could not be compared. Leave it as it was, or begin a new experiment."
    )


# --- location -------------------------------------------------------------------------------------


def _local(place: str) -> str:
    return os.path.abspath(os.path.expanduser(place.removeprefix("file://")))


def _fetched(address: str, read_only: str | None) -> str:
    """Return a local folder of the experiment at an address: an existing one, or a copy.

    A folder in which the experiment ran has its own state. One that was only fetched is outdated as
    soon as the experiment continues, and is fetched again.
    """
    check_allowed(address, "Tuner.restore(path)")
    shown = without_settings(address).rstrip("/")
    name = shown.rpartition("/")[2]
    storage = results_folder(None)
    with open_objects(address) as objects:
        identity = _stored_id(objects)
        if read_only is not None and identity and not identity.startswith(read_only):
            raise ConfigError(
                f"{shown} has the results of experiment {repr_of(identity)}, and the id of {name} "
                f"on the farm begins with {read_only!r}: another search has used that address "
                f"({last_heard(objects, journal_signer())}). Read the results on the scheduler's "
                f"machine, or run `tunemq show {name}`."
            )
    folders = _folders(storage, name, shown, identity)
    here = next(filter(is_only_fetched, folders), "") if identity else ""
    ran = [folder for folder in folders if not is_only_fetched(folder)]
    if ran and read_only is None:
        newest = max(ran, key=lambda folder: recover(Path(folder) / FILE_NAME).turn)
        _check_newest(address, newest)
        return newest
    folder = here or make_experiment_folder(storage, name, is_new=True)
    try:
        with _fetching_alone(folder):
            lost = bring_experiment(address, folder, journal_signer())
    except BaseException:  # passed on; a partial copy is useless
        if not here:
            remove_tree(folder)
        raise
    if lost:
        _log.warning("%s", lost)
    return folder


@contextlib.contextmanager
def _fetching_alone(folder: str) -> Iterator[None]:
    """Wait until no other process or thread fetches into the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _stored_id(objects: ObjectStore) -> str:
    """Return the id of the experiment in a store; "" if it has neither a journal nor a record."""
    try:
        return copied_id(objects, journal_signer())
    except NoSuchObject:
        record = stored_record(objects, journal_signer())
        return "" if record is None else record.experiment_id


def _folders(storage: str, name: str, shown: str, identity: str) -> list[str]:
    """Return the folders of this experiment on this machine.

    Another experiment may have had the name, so that this one has a number behind it.
    """
    folders = [
        os.path.join(storage, name),
        *glob.glob(os.path.join(glob.escape(storage), f"{glob.escape(name)}_[0-9]*")),
    ]
    return [folder for folder in folders if _is_of(folder, shown, identity)]


def _check_newest(address: str, folder: str) -> None:
    """Reject a local folder if another machine has continued the experiment since.

    Both would write to the same place in the store, and the other machine's progress would be lost.
    """
    with open_objects(address) as objects:
        if not has_others(objects, Path(folder) / FILE_NAME, journal_signer()):
            return
        raise ConfigError(
            f"the search at {without_settings(address)} continued elsewhere since it was left in "
            f"{folder} ({last_heard(objects, journal_signer())}); rename that folder, so that the "
            "newest state is fetched. To give up everything since, remove journal/ in the store, "
            "and restore the folder itself."
        )


def _is_of(folder: str, shown: str, identity: str) -> bool:
    try:
        header = read_header(Path(folder) / FILE_NAME)
    except JournalError:
        return False
    is_same = without_settings(header.store).rstrip("/") == shown
    is_same = is_same and identity in {"", header.experiment_id}
    return is_same and os.path.isfile(os.path.join(folder, TUNER_FILE))
