"""All trials of a search as views and as results, made of what the runner knows when asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.failures import Failure
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.result import Result
from tunemq_scheduler.trial_view import TrialView
from tunemq_shared.checkpoint import Checkpoint
from tunemq_shared.errors import TrialError
from tunemq_shared.local_store import FILES, MANIFEST
from tunemq_shared.messages import CheckpointCommitted


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
        return TrialView.of(trial, self._runner.summary(trial), self._plan)


class TrialResults(Sequence[Result]):
    """The results of all trials of a search, in its order, each made when it is asked for."""

    def __init__(
        self, runner: TrialRunner, plan: ExperimentPlan, fatal: Mapping[str, Failure]
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._fatal = fatal
        self._trials = _in_order(runner)

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
        view = TrialView.of(trial, summary, plan)
        kept = summary.checkpoints
        failure = self._fatal.get(trial)
        return Result(
            metrics=view.last_result,
            checkpoint=self._checkpoint(kept[-1]) if kept else None,
            error=_error(failure) if failure is not None else None,
            path=view.local_path,
            trial_id=trial,
            trial_name=view.trial_name,
            status=summary.status,
            best_checkpoints=_Checkpoints(plan.folder, kept),
            trial_config=view.config,
        )

    def _checkpoint(self, committed: CheckpointCommitted) -> Checkpoint:
        return _checkpoint_at(self._plan.folder, committed.key)


class _Checkpoints(Sequence[tuple[Checkpoint, dict[str, Any]]]):
    """A trial's kept checkpoints, each with its result, read from its manifest when asked."""

    def __init__(self, folder: str, kept: Sequence[CheckpointCommitted]) -> None:
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
        with open(os.path.join(self._folder, kept.key, MANIFEST), "rb") as file:
            metrics: dict[str, Any] = json.load(file)["metrics"]
        return _checkpoint_at(self._folder, kept.key), metrics


def _checkpoint_at(folder: str, key: str) -> Checkpoint:
    return Checkpoint.from_directory(os.path.join(folder, key, FILES))


def _error(failure: Failure) -> TrialError:
    where = f" on {failure.hostname}" if failure.hostname else ""
    told = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
    return TrialError(f"{failure.trial}{where}: {failure.error}{told}")
