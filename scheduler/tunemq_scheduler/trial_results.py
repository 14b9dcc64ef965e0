"""All trials of a search as views and as results, made of what the runner knows when asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.core.trial import ERROR, TrialSummary
from tunemq_scheduler.failures import failure_of
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.result import Result
from tunemq_scheduler.trial_view import TrialView
from tunemq_shared.checkpoint import Checkpoint, RecordedCheckpoint
from tunemq_shared.errors import StoreError, TrialError
from tunemq_shared.manifest import FILES
from tunemq_shared.messages import CheckpointCommitted
from tunemq_shared.results import TRAINING_ITERATION
from tunemq_shared.store import Store
from tunemq_shared.stored_checkpoint import StoredCheckpoint
from tunemq_shared.stores import open_store


def _in_order(runner: TrialRunner) -> list[str]:
    """The ids of all trials, in the order in which they were suggested."""
    return sorted([*runner.finished, *runner.live], key=lambda trial: int(trial.rpartition("_")[2]))


class AllTrials(Sequence[TrialView]):
    """The views of all trials of a search, in its order, each made when it is asked for."""

    def __init__(self, runner: TrialRunner, plan: ExperimentPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._trials = _in_order(runner)

    def __len__(self) -> int:
        return len(self._trials)

    @overload
    def __getitem__(self, index: int) -> TrialView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TrialView]: ...
    def __getitem__(self, index: int | slice) -> TrialView | Sequence[TrialView]:
        if isinstance(index, slice):
            return [self._view(trial) for trial in self._trials[index]]
        return self._view(self._trials[index])

    def _view(self, trial: str) -> TrialView:
        return TrialView(trial, self._runner.summary(trial), self._plan)


class TrialResults(Sequence[Result]):
    """The results of all trials of a search, in its order, each made when it is asked for."""

    def __init__(self, runner: TrialRunner, plan: ExperimentPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._trials = _in_order(runner)
        self._place = _Place(plan)

    def __len__(self) -> int:
        return len(self._trials)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Result]: ...
    def __getitem__(self, index: int | slice) -> Result | Sequence[Result]:
        if isinstance(index, slice):
            return [self._result(trial) for trial in self._trials[index]]
        return self._result(self._trials[index])

    def _result(self, trial: str) -> Result:
        summary, plan = self._runner.summary(trial), self._plan
        view = TrialView(trial, summary, plan)
        kept = summary.checkpoints
        return Result(
            metrics=view.last_result,
            checkpoint=self._place.checkpoint(kept[-1]) if kept else None,
            error=_error(view, summary) if summary.status == ERROR else None,
            path=view.local_path,
            trial_id=trial,
            trial_name=view.trial_name,
            status=summary.status,
            best_checkpoints=_Checkpoints(self._place, view.local_path, kept),
            trial_config=view.config,
            devices_used=summary.devices_used,
        )


class _Place:
    """Where the checkpoints of a search are; nothing is read before it is asked for.

    Attributes:
        is_remote: whether reading from there may take its time, or not be possible now.
    """

    def __init__(self, plan: ExperimentPlan) -> None:
        self._plan = plan
        self.is_remote = bool(plan.store)

    @cached_property
    def _store(self) -> Store:
        return open_store(self._plan.store_address)

    def checkpoint(self, kept: CheckpointCommitted) -> Checkpoint:
        """One of them; what is in a bucket is downloaded when somebody wants its files."""
        plan = self._plan
        if plan.store:
            return StoredCheckpoint(plan.store, kept.key, kept.sha256)
        return RecordedCheckpoint(os.path.join(plan.folder, kept.key, FILES))

    def metrics(self, kept: CheckpointCommitted) -> dict[str, Any]:
        """The result that it contains, from its manifest."""
        return self._store.read_manifest(kept.key, kept.sha256).metrics


class _Checkpoints(Sequence[tuple[Checkpoint, dict[str, Any]]]):
    """A trial's kept checkpoints, each with its result, which is read when somebody asks."""

    def __init__(self, place: _Place, folder: str, kept: Sequence[CheckpointCommitted]) -> None:
        self._place = place
        self._folder = folder
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> tuple[Checkpoint, dict[str, Any]]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Checkpoint, dict[str, Any]]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._one(one) for one in self._kept[index]]
        return self._one(self._kept[index])

    def _one(self, kept: CheckpointCommitted) -> tuple[Checkpoint, dict[str, Any]]:
        return self._place.checkpoint(kept), self._metrics(kept)

    def _metrics(self, kept: CheckpointCommitted) -> dict[str, Any]:
        if self._place.is_remote:
            return self._recorded.get(kept.step) or self._place.metrics(kept)
        try:
            return self._place.metrics(kept)
        except StoreError:  # its folder was removed; its result is in the trial's file
            return self._recorded.get(kept.step, {})

    @cached_property
    def _recorded(self) -> dict[int, dict[str, Any]]:
        """What this machine's files say of each step; a store is asked about the others only."""
        history = Result(metrics={}, path=self._folder).history
        return {result[TRAINING_ITERATION]: result for result in history}


def _error(view: TrialView, summary: TrialSummary) -> TrialError:
    """What ended a trial in ERROR."""
    if summary.failure is None:
        return TrialError(f"{view.trial_name}: {summary.reason}")
    failure = failure_of(
        summary.failure,
        trial=view.trial_name,
        hostname=summary.failed_on,
        number=summary.num_failures,
        retried=False,
        verdict=summary.reason.partition(": ")[2],  # behind the class
    )
    where = f" on {failure.hostname}" if failure.hostname else ""
    told = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
    then = f"\n({failure.consequence})" if failure.consequence else ""
    return TrialError(f"{failure.trial}{where}: {failure.error}{told}{then}")
