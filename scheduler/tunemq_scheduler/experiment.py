"""Runs one experiment from its checked input to its results: puts the parts together."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tunemq_scheduler.callback import Callback
from tunemq_scheduler.collecting import settle_store
from tunemq_scheduler.copies import copier_of
from tunemq_scheduler.core.commands import DeleteCheckpoint
from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.embedded.warm import embedded_farm
from tunemq_scheduler.executors.executor import TrialExecutor
from tunemq_scheduler.executors.in_process import InProcessExecutor
from tunemq_scheduler.experiment_view import ExperimentView, UploadNews
from tunemq_scheduler.folders import experiment_name
from tunemq_scheduler.installed_packages import installed_packages_first
from tunemq_scheduler.journal import FILE_NAME, JOURNAL_VERSION, Journal, JournalHeader
from tunemq_scheduler.loggers import CSVLoggerCallback, JsonLoggerCallback
from tunemq_scheduler.loop import ExperimentLoop
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.prepare import Prepared
from tunemq_scheduler.records import Records
from tunemq_scheduler.report.display import Display
from tunemq_scheduler.report.reporter import display_for
from tunemq_scheduler.restored import import_checkpoint
from tunemq_scheduler.result_grid import ResultGrid
from tunemq_scheduler.signals import StopSignals
from tunemq_scheduler.storage import Storage, make_storage, storage_of
from tunemq_scheduler.store_keeper import Removal, StoreKeeper
from tunemq_scheduler.trial_results import AllTrials, TrialResults
from tunemq_shared import wire
from tunemq_shared.blobs import BlobFolder
from tunemq_shared.errors import TrialError, WireUnavailable
from tunemq_shared.shipping import ship
from tunemq_shared.store import Store
from tunemq_shared.stores import open_store

if TYPE_CHECKING:
    from tunemq_scheduler.syncing.callback import SyncerCallback

#: The folder with a machine's own copies of checkpoints, in the experiment's.
CACHE: Final = ".cache"
#: How long an interrupted search goes on copying what it wrote to its store.
INTERRUPTED_COPY_S: Final = 5.0


class _Search(NamedTuple):
    """The parts of a search that runs."""

    loop: ExperimentLoop
    records: Records
    display: Display
    store: Store
    keeper: StoreKeeper
    copier: SyncerCallback | None

    def give_up_copying(self) -> None:
        """Let the last copies be; for signal handlers, too."""
        if self.copier is not None:
            self.copier.give_up()

    def finish_records(self) -> None:
        """Tell callbacks that the search is over; whoever interrupted it waits for few copies."""
        timer = threading.Timer(INTERRUPTED_COPY_S, self.give_up_copying)
        if self.copier is not None and self.loop.runner.interrupted:
            timer.daemon = True
            timer.start()
        try:
            self.records.finish(AllTrials(self.loop.runner, self.loop.plan))
        finally:
            timer.cancel()


class Experiment:
    """One experiment of this script.

    Args:
        prepared: its checked input.
        storage: its own folder, which exists, and its store.
    """

    def __init__(self, prepared: Prepared, storage: Storage) -> None:
        self.prepared = prepared
        self.folder, self._store_address = storage
        self.name = os.path.basename(storage.folder)
        self._settings = prepared.settings
        self._id = uuid.uuid4().hex[:8]
        self._started = time.monotonic()
        #: Whether no turn of the loop follows, and whether everything was killed.
        self._is_over = self._killed = False

    def run(self) -> ResultGrid:
        """Run it on this script's own farm.

        Raises:
            KeyboardInterrupt: Ctrl-C; everything is saved.
            TuneError: the search could not go on; what it had is saved.
        """
        self._take_checkpoint()
        with embedded_farm(prewarm=self.prepared.environment()) as farm:
            # Celery takes 0.1 s to import: meanwhile the farm starts.
            with installed_packages_first("celery", "kombu", "redis"):
                from tunemq_scheduler.executors.celery_executor import CeleryTrialExecutor

            plan = self._plan(BlobFolder(Path(farm.folder) / "blobs"))
            farm.wait_until_ready()
            executor = CeleryTrialExecutor(farm.url, term=farm.new_term(), backing=farm)
            search = self._search(plan, executor)

            def stop(reason: str) -> None:
                search.loop.interrupt(reason)
                if self._is_over:
                    search.give_up_copying()

            def stop_now() -> None:
                self._killed = True
                farm.end_now()
                executor.wake()
                search.give_up_copying()

            signals = StopSignals(stop, stop_now)
            with signals, self._shown(search, lambda: signals.received is not None):
                try:
                    executor.open(plan)
                    search.loop.run(until=lambda: self._killed)
                except WireUnavailable:
                    if not self._killed:  # else it went at our word, faster than the loop
                        raise
                finally:
                    executor.close(now=self._killed)
            return self._results(search)

    def run_here(self) -> ResultGrid:
        """Run its first trial in this process and thread, for debuggers."""
        self._take_checkpoint()
        plan = self._plan(BlobFolder(Path(self.folder) / ".debug"))
        executor = InProcessExecutor({"cpu": float(os.cpu_count() or 1), "gpu": 1.0})
        search = self._search(plan, executor, max_trials=1)
        with self._shown(search, lambda: False):
            failed: list[BaseException] = []

            def turn() -> None:
                try:
                    executor.open(plan)
                    search.loop.run()
                except BaseException as error:  # noqa: BLE001  kept, and raised below by the thread that serves
                    failed.append(error)
                finally:
                    executor.close()

            thread = threading.Thread(target=turn, name="experiment loop")
            thread.start()
            try:
                executor.serve()
            except BaseException:  # passed on to the script; the loop journals why it ends
                search.loop.interrupt("the script's thread left its trial")
                raise
            finally:
                thread.join()
            if failed:
                raise failed[0]
        return self._results(search)

    # --- the parts --------------------------------------------------------------------------------

    def _take_checkpoint(self) -> None:
        """Have all trials begin from the user's checkpoint, if one was given."""
        given = self.prepared.run.resume_from_checkpoint
        if given is not None:
            with closing(open_store(self._store_address or self.folder)) as store:
                ref = import_checkpoint(given, store)
            self._settings = msgspec.structs.replace(self._settings, restore=(ref,))

    def _plan(self, blobs: BlobFolder) -> ExperimentPlan:
        prepared = self.prepared
        code = ship(prepared.trainable, blobs, pickled=prepared.pickled)
        checkpoints = prepared.run.checkpoint_config
        return ExperimentPlan(
            experiment=self.name,
            experiment_id=self._id,
            events_key=wire.events(self._id),
            folder=self.folder,
            trainable_name=prepared.trainable_name,
            code=code,
            environment=prepared.environment(code),
            stop=prepared.stop,
            required_metrics=prepared.required_metrics,
            finite_metrics=prepared.finite_metrics,
            checkpoint_frequency=checkpoints.checkpoint_frequency,
            checkpoint_at_end=checkpoints.checkpoint_at_end,
            seed=prepared.seed,
            reuse=prepared.tune.reuse_actors,
            store=self._store_address,
            cache=os.path.join(self.folder, CACHE) if self._store_address else "",
            sync_timeout_s=prepared.run.sync_config.sync_timeout,
            uploads_waiting=prepared.run.sync_config.uploads_waiting,
        )

    def _search(
        self, plan: ExperimentPlan, executor: TrialExecutor, max_trials: int | None = None
    ) -> _Search:
        prepared, tune = self.prepared, self.prepared.tune
        run = prepared.run
        display = display_for(run.progress_reporter, verbose=run.verbose)
        callbacks: list[Callback] = [
            JsonLoggerCallback(),
            CSVLoggerCallback(),
            *(run.callbacks or ()),
        ]
        copier = copier_of(run.sync_config, plan)
        if copier is not None:
            callbacks.append(copier)  # behind those that write what it copies
        records = Records(callbacks, display, tune.metric, tune.direction)
        header = JournalHeader(
            version=JOURNAL_VERSION,
            experiment=self.name,
            experiment_id=self._id,
            started=time.time(),
            settings=self._settings,
            store=plan.store,
        )
        store = open_store(plan.store_address)
        keeper = StoreKeeper(store)

        def discard(removal: Removal) -> None:
            keeper.discard(removal)
            if copier is not None and isinstance(removal, DeleteCheckpoint):
                copier.delete_checkpoint(removal.key)

        loop = ExperimentLoop(
            runner=TrialRunner(self._settings),
            plan=plan,
            algorithms=prepared.algorithms(),
            executor=executor,
            journal=Journal(Path(self.folder) / FILE_NAME, header),
            records=records,
            resources_for=prepared.resources_for,
            trial_prefix=self._id[:5],
            clock=self.elapsed,
            discard=discard,
            time_budget_s=tune.budget_s,
            max_trials=max_trials,
        )
        records.trials = loop.trials.values
        return _Search(loop, records, display, store, keeper, copier)

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    @contextmanager
    def _shown(self, search: _Search, is_enough: Callable[[], bool]) -> Iterator[None]:
        """Show the search while it runs, and what became of it, however it ends.

        Args:
            is_enough: whether the person at the terminal wants it to end now.
        """
        loop, records, display, store, keeper, _ = search
        view = ExperimentView(loop, records, self.prepared, self.elapsed)
        uploads = UploadNews(view, records.news)

        def show() -> None:
            for text in keeper.news():
                records.news(text)
            uploads.look()
            display.update(view)

        tune = self.prepared.tune
        records.setup(
            stop=self.prepared.run.stop,
            num_samples=tune.num_samples,
            total_num_samples=self.prepared.trials,
        )
        records.show = show
        display.begin(view)
        try:
            yield
        finally:
            self._is_over = True
            try:
                loop.close()
                settle_store(loop, store, keeper, records.news, lambda: self._killed or is_enough())
                search.finish_records()
            finally:
                if not self._killed:
                    display.end(view, self._trial_results(search))
                display.close()

    def _trial_results(self, search: _Search) -> TrialResults:
        return TrialResults(search.loop.runner, search.loop.plan, search.records.fatal)

    def _results(self, search: _Search) -> ResultGrid:
        tune, results = self.prepared.tune, self._trial_results(search)
        if self.prepared.run.failure_config.fail_fast == "raise" and search.records.fatal:
            error = next(one.error for one in results if one.error is not None)
            raise TrialError(str(error)) from error
        return ResultGrid(
            results, experiment_path=self.folder, metric=tune.metric, mode=tune.direction
        )


def new_experiment(prepared: Prepared) -> Experiment:
    """An experiment with a place of its own; a name that is taken gets a number behind it.

    Raises:
        ConfigError: its folder cannot be made or written, or its store's address is not usable.
        StoreError: its store cannot be used; nothing was made.
    """
    run = prepared.run
    name = run.name or experiment_name(prepared.trainable_name, time.time())
    return Experiment(prepared, make_storage(storage_of(run), name))
