"""`LogRepair`: appends the rows that a crash kept from trials' files, from the journal.

Records are written after the journal, so a file has the first rows of those in the journal. A
restart replays the turns behind the last snapshot (`EventDriver.replay`); this module appends the
rows that a file lacks, and none twice. Rows that a trial's code wrote are moved out of the file
before: see `tunemq_scheduler.output.result_rebuild`.
"""

from __future__ import annotations

import os

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.output.loggers import CSVLoggerCallback, JsonLoggerCallback
from tunemq_scheduler.output.result_rebuild import ResultRebuild, first_step, foreign_path
from tunemq_scheduler.output.result_rows import StepRanges, has_rows, is_of_search
from tunemq_scheduler.output.unsynced_files import UnsyncedFiles
from tunemq_scheduler.results.trial_failures import recorded_failure, write_failure
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.storage.folders import (
    ERROR_FILE,
    PARAMS_JSON,
    PARAMS_PICKLE,
    PROGRESS_CSV,
    RESULT_JSON,
    make_trial_folder,
)
from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_to_read


class LogRepair:
    """Append missing rows to trials' files, up to the end of the journal; see `EventDriver.replay`.

    Attributes:
        unsynced: all files of replayed events: a row in a file may not be on the disk yet.
        rebuild: rebuilds files that contain other data than the search's rows.

    Args:
        runner: in the state before the first replayed turn.
    """

    def __init__(self, runner: TrialRunner) -> None:
        self.unsynced = UnsyncedFiles()
        self.rebuild = ResultRebuild(self.unsynced, first_step(runner))
        self._json = JsonLoggerCallback(self.unsynced)
        self._csv = CSVLoggerCallback(self.unsynced)
        #: The steps in each file of a trial; None if the file was renamed.
        self._steps: dict[tuple[str, str], StepRanges | None] = {}
        #: The last step of each trial before the replayed turns.
        self._before = {trial.trial_id: trial.last_step for trial in runner.live.values()}

    def note(self, command: c.NotifyCommand, trial: TrialView) -> None:
        """Process a replayed notification, whose row may or may not be in the files.

        Raises:
            StoreError: a file cannot be read or written.
        """
        match command:
            case c.NotifyTrialAdded():
                make_trial_folder(trial.local_path)
            case c.NotifyTrialRevived():
                self._before[trial.trial_id] = 0 if trial.newest is None else trial.newest.step
                if command.is_anew:
                    put_away(trial.local_path, trial.trial_id, command.lineage, self.unsynced)
                    self._forget(trial)
            case c.NotifyResult():
                self._result(command, trial)
            case c.NotifyFailure():
                self._failure(command, trial)
            case c.NotifyTrialEnd():
                self._json.log_trial_end(trial)
                self._csv.log_trial_end(trial)
                self._forget(trial)
            case _:
                pass

    def finish(self) -> None:
        """Finish after the last replayed notification.

        Raises:
            StoreError: a file cannot be written.
        """
        self._json.on_experiment_end([])
        self._csv.on_experiment_end([])

    def _result(self, command: c.NotifyResult, trial: TrialView) -> None:
        result = trial.full_result(command.result)
        if command.done:
            result = {**result, "done": True}
        step = command.result.step
        for name, logger in ((RESULT_JSON, self._json), (PROGRESS_CSV, self._csv)):
            path = trial.local_path, name
            if path not in self._steps:
                self._steps[path] = self._steps_in(trial, name)
            steps = self._steps[path]
            if steps is None or step in steps:
                continue
            if step < steps.last:  # the file lacks it, and has later ones
                self._json.log_trial_end(trial)
                self._csv.log_trial_end(trial)
                steps = self.rebuild.rebuild(*path, trial.trial_id, below=step).steps
                self._steps[path] = steps
            logger.log_trial_result(0, trial, result)
            steps.add(step)

    def _steps_in(self, trial: TrialView, name: str) -> StepRanges | None:
        """Return the steps in a file, when the first result of a trial is replayed."""
        folder = trial.local_path
        for written in (name, PARAMS_JSON, PARAMS_PICKLE):
            self.unsynced.note(os.path.join(folder, written))
        if has_rows(put_away_as(folder, name, trial.lineage), trial.trial_id):
            return None
        self._json.flush()  # the table may have to be rebuilt from it
        had = self._before.get(trial.trial_id, 0)
        found = self.rebuild.whole(folder, name, trial.trial_id, had)
        return found.steps

    def _failure(self, command: c.NotifyFailure, trial: TrialView) -> None:
        failure = recorded_failure(command, trial.trial_name, trial.num_failures)
        trial.error_file = path = os.path.join(trial.local_path, ERROR_FILE)
        self.unsynced.note(path)
        try:
            with open_to_read(path, restores_rights=True) as file:
                told = file.read().decode(errors="replace")
        except FileNotFoundError:
            told = ""
        if f"Failure # {failure.number} (" not in told:
            write_failure(trial.local_path, failure)

    def _forget(self, trial: TrialView) -> None:
        for name in (RESULT_JSON, PROGRESS_CSV):
            self._steps.pop((trial.local_path, name), None)


def put_away(folder: str, trial: str, lineage: int, unsynced: UnsyncedFiles) -> None:
    """Rename a trial's result files because the trial restarts from nothing; idempotent.

    Args:
        trial: its ID.
        lineage: the lineage that the files belong to.
        unsynced: records what was renamed.

    Raises:
        StoreError: they cannot be renamed.
    """
    for name in (RESULT_JSON, PROGRESS_CSV):
        kept = put_away_as(folder, name, lineage - 1)
        path = os.path.join(folder, name)
        unsynced.note(kept)
        if not os.path.exists(path) or is_of_search(kept, trial):
            continue
        try:
            if os.path.lexists(kept):  # the trial's code used that name
                os.rename(kept, foreign_path(kept))
            os.rename(path, kept)
        except OSError as error:
            raise StoreError(f"{path} cannot be renamed: {error.strerror}.") from error


def put_away_as(folder: str, name: str, lineage: int) -> str:
    """Return the name of a lineage's file after the trial restarted from nothing."""
    base, extension = os.path.splitext(name)
    return os.path.join(folder, f"{base}.{lineage}{extension}")
