"""`TrialResults`: each trial's `Result`, made of what the runner knows when it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.core.trial import ERROR, TERMINATED
from tunemq_scheduler.failures import Failure
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.result import Result
from tunemq_shared.checkpoint import Checkpoint
from tunemq_shared.errors import TrialError
from tunemq_shared.local_store import FILES, MANIFEST
from tunemq_shared.messages import CheckpointCommitted
from tunemq_shared.packing import unpack_config
from tunemq_shared.results import ResultFrame, full_result


class TrialResults(Sequence[Result]):
    """All trials of a search, in the order in which they were suggested."""

    def __init__(
        self, runner: TrialRunner, plan: ExperimentPlan, fatal: Mapping[str, Failure]
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._fatal = fatal
        every = [*runner.finished, *runner.live]
        self._trials = sorted(every, key=lambda trial: int(trial.rpartition("_")[2]))

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
        config = unpack_config(summary.config)
        metrics: dict[str, Any] = {}
        if summary.started is not None and summary.last_result is not None:
            frame = ResultFrame(
                summary.started,
                config,
                experiment_id=plan.experiment_id,
                experiment_tag=summary.tag,
            )
            metrics = full_result(summary.last_result, frame)
            metrics["done"] = summary.status in (TERMINATED, ERROR)
        kept = summary.checkpoints
        failure = self._fatal.get(trial)
        return Result(
            metrics=metrics,
            checkpoint=self._checkpoint(kept[-1]) if kept else None,
            error=_error(failure) if failure is not None else None,
            path=plan.trial_folder(trial),
            trial_id=trial,
            trial_name=plan.trial_name(trial),
            status=summary.status,
            best_checkpoints=_Checkpoints(plan.folder, kept),
            trial_config=config,
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
