"""`Experiment`: runs one experiment on an embedded farm or in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.base.import_precedence import installed_packages_first
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.base.stop_signals import StopSignals
from tunemq_scheduler.core.placement.resource_request import needs_of
from tunemq_scheduler.embedded.warm_farms import embedded_farm
from tunemq_scheduler.experiment.bring_experiment import bring_newest, check_newest_here
from tunemq_scheduler.experiment.code_package import CodePackage, environment_of, package_code
from tunemq_scheduler.experiment.open_experiment import (
    ATTEMPTS_BEYOND,
    KeepTuner,
    OpenExperiment,
    ResumeOptions,
    has_work,
    open_new,
    resumption,
    take_up,
)
from tunemq_scheduler.experiment.search_run import SearchRun, grid_of
from tunemq_scheduler.experiment.select_syncer import copier_of
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_headers import JournalHeader
from tunemq_scheduler.results.lazy_results import trial_results
from tunemq_scheduler.results.result_grid import ResultGrid
from tunemq_scheduler.settings.import_checkpoint import import_checkpoint
from tunemq_scheduler.settings.storage_settings import StorageLocation, make_storage, storage_of
from tunemq_scheduler.storage.folders import experiment_name
from tunemq_scheduler.storage.last_run import RunRecord, read_record, write_record
from tunemq_scheduler.storage.local_checkpoint_recovery import recover_local_checkpoints
from tunemq_scheduler.storage.store_claim import StoreClaim
from tunemq_scheduler.transport.in_process_executor import InProcessExecutor
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.base.errors import (
    ConfigError,
    JournalError,
    RedisUnavailable,
    RunSuperseded,
)
from tunemq_shared.broker import redis_keys
from tunemq_shared.checkpoints.open_store import open_objects, open_store
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.protocol.messages import BlobRef, Environment, ExperimentResumed
from tunemq_shared.signing.key_files import journal_signer

#: The name of the experiment's subfolder with this machine's own copies of checkpoints.
CACHE: Final = ".cache"
_log = logging.getLogger(__name__)
_NO_CODE: Final = BlobRef("", 0, "")
_NO_ENVIRONMENT: Final = Environment("", (), {}, ())


class Experiment:
    """One experiment of this script.

    Args:
        prepared: its checked input.
        storage: its existing folder, and its store.
        resume: how to resume the experiment in that folder; None for a new one.
        keep: saves the Tuner, when the experiment is open and before it starts.
        brought_from: the address from which it was restored; empty if from a folder.
    """

    def __init__(
        self,
        prepared: PreparedSearch,
        storage: StorageLocation,
        resume: ResumeOptions | None = None,
        *,
        keep: KeepTuner = lambda _: None,
        brought_from: str = "",
    ) -> None:
        self.prepared = prepared
        self.folder, self._store_address = storage
        self.name = os.path.basename(storage.folder)
        self.is_resumed = resume is not None
        self._resume = resume
        self._keep = keep
        self._brought_from = brought_from
        self._settings = prepared.settings
        self._id = uuid.uuid4().hex[:8]
        self._event: ExperimentResumed | None = None
        self._message_signer = journal_signer()
        self._run_number = 1
        #: In all records of this run: another token means another run.
        self._holder = LeaseHolder.this_process()
        #: This run's record, once it is written.
        self._own_record: RunRecord | None = None
        #: The newest search, and whether the store has all of an ended one.
        self._search_run: SearchRun | None = None
        self._is_copied = False

    def run(self) -> ResultGrid:
        """Run it on an embedded farm.

        Raises:
            KeyboardInterrupt: Ctrl-C; everything is saved.
            RunSuperseded: another run claimed the experiment's store.
            TuneError: the search failed; its results so far are saved.
        """
        opened = self._open()
        with opened.journal, self._noted_end():
            if self._event is not None and not has_work(opened, self._event, self.prepared):
                return self._is_over_already(opened, self._event)
            return self._run_on_own_farm(opened)

    def _run_on_own_farm(self, opened: OpenExperiment) -> ResultGrid:
        prewarm, gpus = environment_of(self.prepared), self._may_ask_for_gpus(opened)
        with embedded_farm(prewarm=prewarm, gpus=gpus) as farm:
            # Celery takes 0.1 s to import; the farm starts meanwhile.
            with installed_packages_first("celery", "kombu", "redis"):
                from tunemq_scheduler.transport.celery_executor import CeleryTrialExecutor

            plan = self._plan(CodePackage(blobs=BlobFolder(Path(farm.folder) / "blobs")))
            farm.wait_until_ready()
            executor = CeleryTrialExecutor(farm.url, term=farm.new_term(), backing=farm)
            with self._copied(opened) as copy:
                search = self._search(plan, executor, opened, copy)

                def stop_now() -> None:
                    search.drop()
                    farm.end_now()
                    executor.wake()

                signals = StopSignals(search.interrupt, stop_now)
                with signals, search.shown(lambda: signals.received is not None):
                    try:
                        executor.open(plan)
                        self._begin(search)
                        search.loop.run(until=lambda: search.is_killed)
                    except RunSuperseded:
                        search.drop()
                        raise
                    except RedisUnavailable:
                        if not search.is_killed:  # otherwise the farm ended on request
                            raise
                    finally:
                        executor.close(now=search.is_killed)
            return search.results()

    def _may_ask_for_gpus(self, opened: OpenExperiment) -> bool:
        """Whether some trial, new or restored, may request GPUs."""
        restored = [trial.resources for trial in opened.runner.live.values()]
        asked = [self._settings.request, *restored]
        return any(request is None or needs_of(request).names_device for request in asked)

    def run_here(self) -> ResultGrid:
        """Run its first trial in this process and thread, for debuggers."""
        opened = self._open()
        with opened.journal, self._noted_end(), self._copied(opened) as copy:
            return self._run_in_process(opened, copy)

    def _run_in_process(self, opened: OpenExperiment, copy: JournalCopy | None) -> ResultGrid:
        plan = self._plan(CodePackage(blobs=BlobFolder(Path(self.folder) / ".debug")))
        executor = InProcessExecutor({"cpu": float(os.cpu_count() or 1), "gpu": 1.0})
        search = self._search(plan, executor, opened, copy, max_trials=1)
        with search.shown(lambda: False):
            failed: list[BaseException] = []

            def turn() -> None:
                try:
                    executor.open(plan)
                    self._begin(search)
                    search.loop.run()
                except BaseException as error:  # noqa: BLE001  kept, and raised below by the thread that serves
                    failed.append(error)
                finally:
                    executor.close()

            thread = threading.Thread(target=turn, name="experiment loop")
            thread.start()
            try:
                executor.serve()
            except BaseException:  # passed on to the script; the loop journals the reason
                search.loop.interrupt("the script's thread left its trial")
                raise
            finally:
                thread.join()
            if failed:
                raise failed[0]
        return search.results()

    # --- parts ------------------------------------------------------------------------------------

    def _open(self) -> OpenExperiment:
        if self._resume is not None:
            if at := self._brought_from:
                if lost := bring_newest(at, self.folder, self._message_signer):
                    _log.warning("%s", lost)
            elif self._store_address:
                check_newest_here(self._store_address, self.folder, self._message_signer)
            opened = take_up(Path(self.folder), self.prepared, self._outline, self._keep)
            try:
                self._event = self._resumption(opened, self._resume)
            except BaseException:  # passed on to the script
                opened.journal.close()
                raise
            self._run_number = self._event.run
            return opened
        self._keep(self._run_number)
        self._take_checkpoint()
        header = JournalHeader(
            experiment=self.name,
            experiment_id=self._id,
            started=time.time(),
            settings=self._settings,
            store=self._store_address,
        )
        return open_new(Path(self.folder), header, self.prepared, self._outline(header))

    def _resumption(self, opened: OpenExperiment, options: ResumeOptions) -> ExperimentResumed:
        """Make the event with which this run begins.

        Raises:
            JournalError, StoreError: the record of the previous run cannot be read.
        """
        event = resumption(opened, options, self._settings)
        before = read_record(self.folder)
        self._is_copied = before is not None and before.is_copied
        is_over = before is not None and (before.is_over or before.holder.is_gone)
        if is_over or not self._store_address:
            return event
        # Another run may be alive on another machine, with attempts that write to the same store.
        stored = self._claim.stored()
        run = max(event.run, 0 if stored is None else stored.run + 1)
        return msgspec.structs.replace(event, run=run, attempts_from=run * ATTEMPTS_BEYOND)

    def _write_record(self, record: RunRecord) -> None:
        """Store this run's record, by which other runs detect it.

        Raises:
            JournalError, StoreError: it cannot be written.
            RunSuperseded: another run has the store.
        """
        write_record(self.folder, record)  # first: a store ahead of the folder means another run
        self._claim.write(record)
        self._own_record = record

    @contextlib.contextmanager
    def _noted_end(self) -> Iterator[None]:
        """Record in the folder that the run has ended, so that the next one need not check."""
        try:
            yield
        finally:
            if self._own_record is not None:
                over = msgspec.structs.replace(
                    self._own_record, is_over=True, is_copied=self._is_copied
                )
                with contextlib.suppress(JournalError):  # a full disk: the next run checks
                    write_record(self.folder, over)

    def _begin(self, search: SearchRun) -> None:
        """Run the first turn of a further run."""
        if self._event is not None:
            if not self._is_copied:
                search.copy_all_trials()
            recovered_events = recover_local_checkpoints(
                search.loop.runner, search.loop.plan, search.dispatcher.notices
            )
            search.loop.resume(self._event, recovered_events)

    def _is_over_already(self, opened: OpenExperiment, event: ExperimentResumed) -> ResultGrid:
        """Return the results of an experiment without remaining work; end unwanted trials."""
        runner, repair = opened.runner, opened.repair
        has_notices = repair is not None and bool(repair.notices)
        is_copied = self._is_copied or not self._store_address
        is_all_finished = all(trial.is_finished for trial in runner.live.values())
        if has_notices or not (is_copied and is_all_finished):
            with self._copied(opened) as copy:
                search = self._search(opened.plan, InProcessExecutor({}), opened, copy)
                with search.shown(lambda: True):
                    if not is_copied:
                        search.copy_all_trials()
                    search.loop.resume(event)
        return grid_of(trial_results(runner, opened.plan), self.prepared, opened.plan)

    def _take_checkpoint(self) -> None:
        """Import the user's checkpoint, if given, so that all trials begin from it."""
        given = self.prepared.run.resume_from_checkpoint
        if given is not None:
            with contextlib.closing(open_store(self._store_address or self.folder)) as store:
                ref = import_checkpoint(given, store)
            self._settings = msgspec.structs.replace(self._settings, restore=(ref,))

    def _outline(self, header: JournalHeader) -> ExperimentPlan:
        """Make the plan without the code."""
        prepared = self.prepared
        self._id, self._store_address = header.experiment_id, header.store
        self._claim = StoreClaim(header.store, self._message_signer)
        checkpoints, sync = prepared.run.checkpoint_config, prepared.run.sync_config
        # Each run has its own stream, so that no events of an earlier run can enter it.
        run = f".{uuid.uuid4().hex[:8]}" if self.is_resumed else ""
        self._outlined = ExperimentPlan(
            experiment=self.name,
            experiment_id=self._id,
            events_key=redis_keys.events(f"{self._id}{run}"),
            folder=self.folder,
            trainable_name=prepared.trainable_name,
            code=_NO_CODE,
            environment=_NO_ENVIRONMENT,
            stop=prepared.stop,
            required_metrics=prepared.required_metrics,
            finite_metrics=prepared.finite_metrics,
            checkpoint_frequency=checkpoints.checkpoint_frequency,
            checkpoint_at_end=checkpoints.checkpoint_at_end,
            seed=prepared.seed,
            reuse=prepared.tune.reuse_actors,
            store=self._store_address,
            cache=os.path.join(self.folder, CACHE) if self._store_address else "",
            sync_timeout_s=sync.sync_timeout,
            uploads_waiting=sync.uploads_waiting,
            limits=prepared.run.trial_limits.for_trials(),
            log_patterns=tuple(one.pattern for one in prepared.run.failure_config.log_policies),
            is_resumed=self.is_resumed,
        )
        return self._outlined

    def _plan(self, code_package: CodePackage) -> ExperimentPlan:
        """Make the complete plan, which nodes receive."""
        return package_code(self._outlined, self.prepared, code_package)

    def _search(
        self,
        plan: ExperimentPlan,
        executor: TrialExecutor,
        opened: OpenExperiment,
        copy: JournalCopy | None,
        max_trials: int | None = None,
    ) -> SearchRun:
        self._search_run = SearchRun(
            self.prepared,
            plan,
            executor,
            opened,
            self._claim,
            copy,
            max_trials=max_trials,
            nodes_may_come=self._settings.nodes_may_come,
        )
        return self._search_run

    def _check_anew(self) -> None:
        """Check the claim with a read: another search may have claimed the store at the same time.

        Raises:
            RunSuperseded: it did.
            StoreError: the record cannot be read.
        """
        self._claim.expire()
        self._claim.check()

    @contextlib.contextmanager
    def _copied(
        self, opened: OpenExperiment, wake: Callable[[], None] = lambda: None
    ) -> Iterator[JournalCopy | None]:
        """Claim the experiment's store, if it has one, and keep a copy of the journal there.

        Args:
            opened: the experiment.
            wake: called when the copy has grown.
        """
        if not self._store_address:
            yield None
            return
        if self._own_record is None:
            self._write_record(
                RunRecord(
                    holder=self._holder,
                    term=0,
                    run=self._run_number,
                    is_warm=False,
                    experiment_id=self._id,
                )
            )
        with open_objects(self._store_address) as objects:
            copy = JournalCopy(
                opened.journal,
                objects,
                self._message_signer,
                copied=wake,
                check=self._check_anew,
            )
            try:
                yield copy
            finally:
                copy.close()
                self._is_copied = self._search_run is not None and self._search_run.is_copied


def storage_for(prepared: PreparedSearch) -> StorageLocation:
    """Create the folder of a new experiment; add a number to a name that is taken.

    Raises:
        ConfigError: its folder cannot be created or written, its store's address is invalid, or its
            files cannot be copied as `SyncConfig` says; then no folder remains.
        StoreError: its store cannot be used; no folder was created.
    """
    run = prepared.run
    name = run.name or experiment_name(prepared.trainable_name, time.time())
    storage = make_storage(storage_of(run), name)
    try:
        copier_of(run.sync_config, os.path.basename(storage.folder), storage)
    except ConfigError:
        os.rmdir(storage.folder)
        raise
    return storage
