"""Runs one experiment from its checked input to its results: puts the parts together."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.embedded.warm import embedded_farm
from tunemq_scheduler.executors.executor import TrialExecutor
from tunemq_scheduler.executors.in_process import InProcessExecutor
from tunemq_scheduler.failures import FailureGroup
from tunemq_scheduler.folders import experiment_name, make_experiment_folder, results_folder
from tunemq_scheduler.installed_packages import installed_packages_first
from tunemq_scheduler.journal import FILE_NAME, JOURNAL_VERSION, Journal, JournalHeader
from tunemq_scheduler.loggers import CSVLoggerCallback, JsonLoggerCallback
from tunemq_scheduler.loop import ExperimentLoop
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.prepare import Prepared
from tunemq_scheduler.records import Records
from tunemq_scheduler.report.display import Display
from tunemq_scheduler.report.reporter import display_for
from tunemq_scheduler.result_grid import ResultGrid
from tunemq_scheduler.signals import StopSignals
from tunemq_scheduler.trial_results import AllTrials, TrialResults
from tunemq_scheduler.trial_view import TrialView
from tunemq_shared import wire
from tunemq_shared.blobs import BlobFolder
from tunemq_shared.errors import TrialError, WireUnavailable
from tunemq_shared.shipping import ship
from tunemq_shared.stores import open_store


class Experiment:
    """One experiment of this script.

    Args:
        prepared: its checked input.
        folder: its results folder, which exists.
        name: its name.
    """

    def __init__(self, prepared: Prepared, name: str, folder: str) -> None:
        self.prepared = prepared
        self.name = name
        self.folder = folder
        self._id = uuid.uuid4().hex[:8]
        self._started = time.monotonic()
        self._killed = False

    def run(self) -> ResultGrid:
        """Run it on this script's own farm.

        Raises:
            KeyboardInterrupt: Ctrl-C; everything is saved.
            TuneError: the search could not go on; what it had is saved.
        """
        with embedded_farm(prewarm=self.prepared.environment()) as farm:
            # Celery takes 0.1 s to import: meanwhile the farm starts.
            with installed_packages_first("celery", "kombu", "redis"):
                from tunemq_scheduler.executors.celery_executor import CeleryTrialExecutor

            plan = self._plan(BlobFolder(Path(farm.folder) / "blobs"))
            farm.wait_until_ready()
            executor = CeleryTrialExecutor(farm.url, term=farm.new_term(), backing=farm)
            loop, records, display = self._loop(plan, executor)
            view = _View(self, loop, records)

            def stop_now() -> None:
                self._killed = True
                farm.end_now()
                executor.wake()

            with StopSignals(loop.interrupt, stop_now), self._shown(display, view, loop, records):
                try:
                    executor.open(plan)
                    loop.run(until=lambda: self._killed)
                except WireUnavailable:
                    if not self._killed:  # else it went at our word, faster than the loop
                        raise
                finally:
                    executor.close(now=self._killed)
            return self._results(loop, records)

    def run_here(self) -> ResultGrid:
        """Run its first trial in this process and thread, for debuggers."""
        with ExitStack() as stack:
            blobs = BlobFolder(Path(self.folder) / ".debug")
            plan = self._plan(blobs)
            executor = InProcessExecutor({"cpu": float(os.cpu_count() or 1), "gpu": 1.0})
            loop, records, display = self._loop(plan, executor, max_trials=1)
            stack.enter_context(self._shown(display, _View(self, loop, records), loop, records))
            failed: list[BaseException] = []

            def turn() -> None:
                try:
                    executor.open(plan)
                    loop.run()
                except BaseException as error:  # noqa: BLE001  raised by the thread that serves
                    failed.append(error)
                finally:
                    executor.close()

            thread = threading.Thread(target=turn, name="experiment loop")
            thread.start()
            try:
                executor.serve()
            except BaseException:
                loop.interrupt("the script's thread left its trial")
                raise
            finally:
                thread.join()
            if failed:
                raise failed[0]
            return self._results(loop, records)

    # --- the parts --------------------------------------------------------------------------------

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
        )

    def _loop(
        self, plan: ExperimentPlan, executor: TrialExecutor, max_trials: int | None = None
    ) -> tuple[ExperimentLoop, Records, Display]:
        prepared, tune = self.prepared, self.prepared.tune
        display = display_for(prepared.run.progress_reporter, verbose=prepared.run.verbose)
        records = Records(
            [JsonLoggerCallback(), CSVLoggerCallback(), *(prepared.run.callbacks or ())],
            display,
            open_store(plan.folder),
            tune.metric,
            tune.direction,
        )
        header = JournalHeader(
            version=JOURNAL_VERSION,
            experiment=self.name,
            experiment_id=self._id,
            started=time.time(),
            settings=prepared.settings,
        )
        loop = ExperimentLoop(
            runner=TrialRunner(prepared.settings),
            plan=plan,
            algorithms=prepared.algorithms(),
            executor=executor,
            journal=Journal(Path(self.folder) / FILE_NAME, header),
            records=records,
            resources_for=prepared.resources_for,
            trial_prefix=self._id[:5],
            clock=self.elapsed,
            time_budget_s=tune.budget_s,
            max_trials=max_trials,
        )
        records.trials = loop.trials.values
        return loop, records, display

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    @contextmanager
    def _shown(
        self, display: Display, view: _View, loop: ExperimentLoop, records: Records
    ) -> Iterator[None]:
        """Show the search while it runs, and what became of it, however it ends."""
        tune = self.prepared.tune
        records.setup(
            stop=self.prepared.run.stop,
            num_samples=tune.num_samples,
            total_num_samples=self.prepared.trials,
        )
        records.show = lambda: display.update(view)
        display.begin(view)
        try:
            yield
        finally:
            try:
                loop.close()
                records.finish(AllTrials(loop.runner, loop.plan))
            finally:
                if not self._killed:
                    display.end(view, self._trial_results(loop, records))
                display.close()

    def _trial_results(self, loop: ExperimentLoop, records: Records) -> TrialResults:
        return TrialResults(loop.runner, loop.plan, records.fatal)

    def _results(self, loop: ExperimentLoop, records: Records) -> ResultGrid:
        tune, results = self.prepared.tune, self._trial_results(loop, records)
        if self.prepared.run.failure_config.fail_fast == "raise" and records.fatal:
            error = next(one.error for one in results if one.error is not None)
            raise TrialError(str(error)) from error
        return ResultGrid(
            results, experiment_path=self.folder, metric=tune.metric, mode=tune.direction
        )


class _View:
    """The search as displays see it; see `tunemq_scheduler.report.view.SearchView`."""

    def __init__(self, experiment: Experiment, loop: ExperimentLoop, records: Records) -> None:
        self._experiment = experiment
        self._loop = loop
        self._records = records
        self.name = experiment.name
        self.path = experiment.folder
        self.metric = experiment.prepared.tune.metric
        self.mode = experiment.prepared.tune.direction
        self.num_trials = experiment.prepared.trials

    @property
    def elapsed_s(self) -> float:
        return self._experiment.elapsed()

    @property
    def counts(self) -> Mapping[str, int]:
        return self._loop.runner.counts

    @property
    def live(self) -> Iterable[TrialView]:
        return self._loop.trials.values()

    @property
    def resources_used(self) -> Mapping[str, float]:
        placement = self._loop.runner.placement
        free = placement.free
        return {name: total - free.get(name, 0.0) for name, total in placement.total.items()}

    @property
    def resources_total(self) -> Mapping[str, float]:
        return self._loop.runner.placement.total

    @property
    def best(self) -> tuple[str, float, Mapping[str, Any]] | None:
        return self._records.best

    @property
    def outcome(self) -> str:
        runner = self._loop.runner
        if runner.interrupted:
            return f"was interrupted ({runner.interrupted}); what is PENDING was not finished"
        if runner.stopping:
            return f"was stopped: {runner.stopping}"
        return "is over" if runner.is_finished else "broke off"

    @property
    def notes(self) -> Sequence[str]:
        return self._loop.executor.notes()

    @property
    def failures(self) -> Sequence[FailureGroup]:
        return self._records.failures.groups()


def new_experiment(prepared: Prepared) -> Experiment:
    """An experiment with a folder of its own; a name that is taken gets a number behind it.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    run = prepared.run
    name = run.name or experiment_name(prepared.trainable_name, time.time())
    folder = make_experiment_folder(results_folder(run.storage_path), name, is_new=True)
    return Experiment(prepared, os.path.basename(folder), folder)
