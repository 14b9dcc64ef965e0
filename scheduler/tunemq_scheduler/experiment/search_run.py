"""`SearchRun`: a running search, built from the checked input and an open experiment."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import DeleteCheckpoint
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.experiment.experiment_view import ExperimentView, UploadNotice
from tunemq_scheduler.experiment.final_cleanup import settle_store
from tunemq_scheduler.experiment.open_experiment import OpenExperiment
from tunemq_scheduler.experiment.select_syncer import copier_of
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.journal.journal_copy import SHORT_S, JournalCopy
from tunemq_scheduler.output.callback_dispatcher import CallbackDispatcher
from tunemq_scheduler.output.callback_states import CallbackStates
from tunemq_scheduler.output.loggers import CSVLoggerCallback, JsonLoggerCallback
from tunemq_scheduler.output.terminal.reporter import display_for
from tunemq_scheduler.results.callback import Callback
from tunemq_scheduler.results.lazy_results import all_trials, trial_results
from tunemq_scheduler.results.result import Result
from tunemq_scheduler.results.result_grid import ResultGrid
from tunemq_scheduler.settings.storage_settings import StorageLocation
from tunemq_scheduler.storage.checkpoint_garbage_collector import (
    CheckpointGarbageCollector,
    Removal,
)
from tunemq_scheduler.storage.store_claim import StoreClaim
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.base.errors import TrialError
from tunemq_shared.checkpoints.open_store import open_store
from tunemq_shared.objects.store_address import without_settings

#: The most seconds for the rest of the journal's copy when the scheduler ends.
_HANDOVER_S: Final = 3.0


class SearchRun:
    """The parts of a running search.

    Attributes:
        is_over: whether the loop has ended.
        is_killed: whether to skip everything that remains; set by `drop`.
        is_copied: whether the store has all of the ended search.

    Args:
        prepared: its checked input.
        plan: the complete plan, which nodes receive.
        executor: runs its trials; opened and closed by the caller.
        opened: the experiment.
        claim: this run's claim to the experiment's store.
        copy: the copy of the journal there, if it has a store. A checkpoint is deleted once the
            copy no longer refers to it.
        max_trials, nodes_may_come: see `ExperimentLoop`.
    """

    def __init__(
        self,
        prepared: PreparedSearch,
        plan: ExperimentPlan,
        executor: TrialExecutor,
        opened: OpenExperiment,
        claim: StoreClaim,
        copy: JournalCopy | None = None,
        *,
        max_trials: int | None = None,
        nodes_may_come: bool = False,
    ) -> None:
        run, tune = prepared.run, prepared.tune
        self.is_over = self.is_killed = self.is_copied = self._has_given_up = False
        self._prepared, self._opened, self._claim = prepared, opened, claim
        self._copy = copy
        #: Deletions, each with the turn that must be in the journal's copy first.
        self._removals: deque[tuple[int, Removal]] = deque()
        #: When the newest snapshot was taken, and the newest one that the journal's copy may
        #: begin with: what trials reported before it is in their folders in the store.
        self._snapshot_at, self._mirrored_snapshot = -math.inf, 0
        self.display = display_for(run.progress_reporter, verbose=run.verbose)
        callbacks: list[Callback] = [
            JsonLoggerCallback(opened.unsynced),
            CSVLoggerCallback(opened.unsynced),
            *(run.callbacks or ()),
        ]
        self._states = CallbackStates(plan.folder, run.callbacks or ())
        self._copier = copier_of(
            run.sync_config, plan.experiment, StorageLocation(plan.folder, plan.store)
        )
        if self._copier is not None:
            self._copier.check = claim.check
            if copy is not None:
                copy.may_copy = lambda snapshot: snapshot <= self._mirrored_snapshot
            callbacks.append(self._copier)  # after those that write what it copies
        self.dispatcher = CallbackDispatcher(
            callbacks, self.display, tune.metric, tune.direction, opened.unsynced
        )
        self.store = open_store(plan.store_address)
        self.collector = CheckpointGarbageCollector(self.store, claim.check)
        self.loop = ExperimentLoop(
            driver=opened.driver,
            plan=plan,
            executor=executor,
            journal=opened.journal,
            dispatcher=self.dispatcher,
            resources_for=prepared.resources_for,
            trial_prefix=plan.experiment_id[:5],
            clock=opened.elapsed,
            discard=self._discard,
            time_budget_s=tune.budget_s,
            max_trials=max_trials,
            nodes_may_come=nodes_may_come,
            after_turn=self._turn_ended,
        )
        self.dispatcher.trials = self.loop.trials.values
        self.dispatcher.take_up(all_trials(opened.runner, plan))

    @contextmanager
    def shown(self, is_enough: Callable[[], bool]) -> Iterator[None]:
        """Show the search while it runs, and its outcome, however it ends.

        Args:
            is_enough: whether the user wants it to end now.
        """
        dispatcher, display = self.dispatcher, self.display
        view = ExperimentView(self.loop, dispatcher, self._prepared, self._opened.elapsed)
        uploads = UploadNotice(view, dispatcher.notices)

        def show() -> None:
            for text in self.collector.notices():
                dispatcher.notices(text)
            uploads.look()
            display.update(view)

        self._states.take_back()
        dispatcher.setup(
            stop=self._prepared.run.stop,
            num_samples=self._prepared.tune.num_samples,
            total_num_samples=self._prepared.trials,
        )
        dispatcher.show = show
        display.begin(view)
        if (repair := self._opened.repair) is not None:
            for text in repair.notices:
                dispatcher.notices(text)
            if self._copier is not None:
                self._copier.copy_again(repair.folders)
        try:
            yield
        finally:
            self.is_over = True
            try:
                self._end_copy()
                self._claim.expire()  # the end deletes and copies the most, so check the claim anew
                settle_store(
                    self.loop,
                    self.store,
                    self.collector,
                    dispatcher.notices,
                    lambda: self.is_killed or is_enough(),
                    self._claim.check,
                    may_collect=not self._removals,
                )
                self._finish_records()
                self._states.write()
            finally:
                self._opened.unsynced.close()
                if not self.is_killed:
                    display.end(view, self._trial_results())
                display.close()

    def interrupt(self, reason: str) -> None:
        """Interrupt the search; after its end, stop waiting for copies.

        Safe in signal handlers.
        """
        self.loop.interrupt(reason)
        if self.is_over:
            self._give_up_copying()

    def copy_all_trials(self) -> None:
        """Copy the files of all trials, because an earlier run may not have done it."""
        if self._copier is not None:
            for trial in all_trials(self.loop.runner, self.loop.plan):
                if os.path.isdir(trial.local_path):
                    self._copier.copy_again((trial.local_path,), are_ended=trial.is_finished)

    def drop(self) -> None:
        """Leave everything as it is, without the last copies; safe in signal handlers."""
        self.is_killed = True
        self._give_up_copying()

    def complete_copy(self) -> None:
        """Copy the rest of the journal, so that another machine can take over all of the search."""
        if self._copy is not None:
            self._copy.close(_HANDOVER_S)

    def _give_up_copying(self) -> None:
        self._has_given_up = True
        if self._copy is not None:
            self._copy.give_up()
        if self._copier is not None:
            self._copier.give_up()

    def results(self) -> ResultGrid:
        """Return the results of all trials.

        Raises:
            RunSuperseded: another run has the experiment's store, and this run noticed.
            TrialError: a trial is in ERROR and ``fail_fast`` is "raise".
        """
        self._claim.check_known()
        results = self._trial_results()
        if self._prepared.run.failure_config.fail_fast == "raise" and self.dispatcher.fatal:
            error = next(one.error for one in results if one.error is not None)
            raise TrialError(str(error)) from error
        return grid_of(results, self._prepared, self.loop.plan)

    def _turn_ended(self) -> None:
        self._claim.check_known()
        is_taken = self._opened.take_snapshot()
        if self._copier is not None:
            if is_taken:
                self._snapshot_at = self._copier.copy_changed()
            newest = self._opened.journal.position.snapshot
            if newest > self._mirrored_snapshot and self._copier.has_copied(self._snapshot_at):
                self._mirrored_snapshot = newest
        self._states.turn_ended()
        self._remove_copied()

    def _discard(self, removal: Removal) -> None:
        self._removals.append((self._opened.journal.turn, removal))

    def _remove_copied(self) -> None:
        """Carry out the deletions whose turns are in the journal's copy, if there is one."""
        if self._copy is not None:
            for text in self._copy.notices():
                self.dispatcher.notices(text)
        while self._removals and (self._copy is None or self._removals[0][0] <= self._copy.turn):
            self._remove(self._removals.popleft()[1])

    def _end_copy(self) -> None:
        """Complete the journal's copy; keep the checkpoints that it still refers to."""
        if self._copy is None or self.is_killed:
            self._remove_copied()
            return
        plan = self.loop.plan
        is_interrupted = self.loop.runner.interrupted or self._has_given_up
        is_whole = self._copy.close(
            SHORT_S if is_interrupted else plan.sync_timeout_s, tell=self.dispatcher.notices
        )
        self.is_copied = is_whole
        self._remove_copied()
        if not (is_whole or self._claim.is_superseded):
            self._has_given_up = True  # the store is away, so do not wait as long for it again
            self.dispatcher.notices(
                f"The copy of the journal in {without_settings(plan.store_address)} lacks the last"
                " turns. Expired checkpoints stay there; `tunemq checkpoints rm` removes them."
            )

    def _remove(self, removal: Removal) -> None:
        self.collector.discard(removal)
        if self._copier is not None and isinstance(removal, DeleteCheckpoint):
            self._copier.delete_checkpoint(removal.key)

    def _finish_records(self) -> None:
        """Notify callbacks of the end; after an interrupt or an outage, limit the copies."""
        timer = threading.Timer(SHORT_S, self._give_up_copying)
        is_brief = self.loop.runner.interrupted or self._has_given_up
        if self._copier is not None and is_brief:
            timer.daemon = True
            timer.start()
        try:
            self.dispatcher.finish(all_trials(self.loop.runner, self.loop.plan))
        finally:
            timer.cancel()
        self.is_copied &= self._copier is None or self._copier.is_complete

    def _trial_results(self) -> Sequence[Result]:
        return trial_results(self.loop.runner, self.loop.plan)


def grid_of(
    results: Sequence[Result], prepared: PreparedSearch, plan: ExperimentPlan
) -> ResultGrid:
    """Make the result of `Tuner.fit`."""
    tune = prepared.tune
    return ResultGrid(results, experiment_path=plan.folder, metric=tune.metric, mode=tune.direction)
