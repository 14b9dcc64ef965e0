"""Creates views and results of all trials on demand, from the runner's state."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar, overload

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import ERROR, TrialSummary
from tunemq_scheduler.results.result import Result
from tunemq_scheduler.results.trial_failures import failure_of
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.storage.stored_checkpoint import StoredCheckpoint
from tunemq_shared.base.errors import StoreError, TrialError
from tunemq_shared.checkpoints.checkpoint import Checkpoint, RecordedCheckpoint
from tunemq_shared.checkpoints.manifest import FILES
from tunemq_shared.checkpoints.open_store import open_store
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.protocol.messages import CheckpointCommitted, CheckpointRef
from tunemq_shared.trial.results import TRAINING_ITERATION

K = TypeVar("K")
T = TypeVar("T")


def _in_order(runner: TrialRunner) -> list[str]:
    """Return the IDs of all trials, in the order of their suggestions."""
    return sorted([*runner.finished, *runner.live], key=lambda trial: int(trial.rpartition("_")[2]))


class MadeWhenAsked(Sequence[T]):
    """A sequence that creates each item from its key when it is accessed."""

    def __init__(self, keys: Sequence[K], make: Callable[[K], T]) -> None:
        self._keys, self._make = keys, make

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._make(key) for key in self._keys[index]]
        return self._make(self._keys[index])

    def __repr__(self) -> str:
        """Return what the repr of a list of all items is."""
        return repr(list(self))


def all_trials(runner: TrialRunner, plan: ExperimentPlan) -> Sequence[TrialView]:
    """Return the views of all trials of a search, in order."""
    return MadeWhenAsked(
        _in_order(runner), lambda trial: TrialView(trial, runner.summary(trial), plan)
    )


def trial_results(
    runner: TrialRunner, plan: ExperimentPlan, *, may_run: bool = False
) -> Sequence[Result]:
    """Return the results of all trials of a search, in order.

    Args:
        may_run: whether another process may be running the search and writing files.
    """
    source = _CheckpointSource(plan)

    def result(trial: str) -> Result:
        summary = runner.summary(trial)
        view = TrialView(trial, summary, plan)
        kept = summary.checkpoints
        history = cache(lambda: _results_by_step(view.local_path))
        # The checkpoint of a repeated step contains another result than that step's first one.
        # Lineages have results of the same steps; rows of the newest one come last.
        first = 0 if summary.inherited is None else summary.inherited.attempt + 1

        def metrics(one: CheckpointCommitted) -> dict[str, Any]:
            is_from_store = summary.repeated > 0 or one.attempt < first
            return source.metrics(one, history=history, is_from_store=is_from_store)

        return Result(
            metrics=(newest_result := view.last_result),
            checkpoint=source.checkpoint(newest) if (newest := summary.checkpoint) else None,
            error=_error(view, summary) if summary.status == ERROR else None,
            path=view.local_path,
            trial_id=trial,
            trial_name=view.trial_name,
            status=summary.status,
            best_checkpoints=MadeWhenAsked(
                kept, lambda one: (source.checkpoint(one), metrics(one))
            ),
            # It may have got another one since, which has no result.
            trial_config=newest_result.get("config", view.config),
            devices_used=summary.devices_used,
            decisions=summary.decisions,
            has_ended=view.is_finished and not may_run,
        )

    return MadeWhenAsked(_in_order(runner), result)


class _CheckpointSource:
    """Provides the checkpoints of a search; reads nothing before it is needed."""

    def __init__(self, plan: ExperimentPlan) -> None:
        self._plan = plan

    @cached_property
    def _store(self) -> CheckpointStore:
        return open_store(self._plan.store_address)

    def checkpoint(self, kept: CheckpointCommitted | CheckpointRef) -> Checkpoint:
        """Return a checkpoint; one in a bucket is downloaded when its files are needed."""
        plan = self._plan
        if plan.store:
            return StoredCheckpoint(plan.store, kept.key, kept.sha256)
        return RecordedCheckpoint(os.path.join(plan.folder, kept.key, FILES))

    def metrics(
        self,
        kept: CheckpointCommitted,
        *,
        history: Callable[[], dict[int, dict[str, Any]]],
        is_from_store: bool,
    ) -> dict[str, Any]:
        """Return a checkpoint's result.

        This machine's files are read in place of a bucket's, unless ``is_from_store``.
        """
        is_here = self._plan.store and not is_from_store
        if is_here and (recorded := history().get(kept.step)):
            return recorded
        try:
            return self._store.read_manifest(kept.key, kept.sha256).metrics
        except StoreError:
            if self._plan.store:
                raise
            return history().get(kept.step, {})  # its folder was deleted, the file has its result


def _results_by_step(folder: str) -> dict[int, dict[str, Any]]:
    """Return the results in a trial's folder on this machine."""
    return {one[TRAINING_ITERATION]: one for one in Result(metrics={}, path=folder).history}


def _error(view: TrialView, summary: TrialSummary) -> TrialError:
    """Return the error that put a trial into ERROR."""
    if summary.failure is None:
        return TrialError(f"{view.trial_name}: {summary.reason}")
    failure = failure_of(
        summary.failure,
        trial=view.trial_name,
        hostname=summary.failed_on,
        number=summary.num_failures,
        retried=False,
        verdict=summary.reason.partition(": ")[2],  # without the failure class
    )
    where = f" on {failure.hostname}" if failure.hostname else ""
    told = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
    then = f"\n({failure.consequence})" if failure.consequence else ""
    return TrialError(f"{failure.trial}{where}: {failure.error}{told}{then}")
