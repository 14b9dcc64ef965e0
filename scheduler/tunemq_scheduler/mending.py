"""Making good what a crash kept from the files of trials: the journal has it, they lack it.

Records come after the journal, so what the files have is the beginning of what the journal has. A
restart goes through the turns behind the last snapshot anyhow (`tunemq_scheduler.resuming`); what a
file does not have yet of them is appended, and nothing twice.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.failures import recorded_failure, write_failure
from tunemq_scheduler.folders import ERROR_FILE, make_trial_folder
from tunemq_scheduler.loggers import CSVLoggerCallback, JsonLoggerCallback
from tunemq_scheduler.loggers.csv_logger import PROGRESS_CSV
from tunemq_scheduler.loggers.json_logger import PARAMS_JSON, PARAMS_PICKLE, RESULT_JSON
from tunemq_scheduler.trial_view import TrialView
from tunemq_scheduler.unsynced import UnsyncedFiles
from tunemq_shared.errors import StoreError
from tunemq_shared.plain_files import open_to_read
from tunemq_shared.results import TRAINING_ITERATION
from tunemq_shared.undecodable import NO_JSON

#: The last result is looked for in so many bytes at the end of a file, then in all of it.
_TAIL_BYTES: Final = 2**16


class Mending:
    """Brings the files of trials to where the journal ends; see `Retelling`.

    Attributes:
        unsynced: all that it was told about, for what a file has is not on the disk for that.
    """

    def __init__(self) -> None:
        self.unsynced = UnsyncedFiles()
        self._json = JsonLoggerCallback(self.unsynced)
        self._csv = CSVLoggerCallback(self.unsynced)
        #: The highest step that each of a trial's files has; infinite where it was put away.
        self._steps: dict[tuple[str, str], float] = {}

    def note(self, command: c.RecordCommand, trial: TrialView) -> None:
        """Something is a fact; it may stand in the files or not.

        Raises:
            StoreError: a file cannot be read or written.
        """
        match command:
            case c.RecordTrialAdded():
                make_trial_folder(trial.local_path)
            case c.RecordTrialRevived(is_anew=True):
                put_away(trial.local_path, command.lineage, self.unsynced)
                self._forget(trial)
            case c.RecordResult():
                self._result(command, trial)
            case c.RecordFailure():
                self._failure(command, trial)
            case c.RecordEnd():
                self._json.log_trial_end(trial)
                self._csv.log_trial_end(trial)
                self._forget(trial)
            case _:
                pass

    def finish(self) -> None:
        """All is told.

        Raises:
            StoreError: a file cannot be written.
        """
        self._json.on_experiment_end([])
        self._csv.on_experiment_end([])

    def _result(self, command: c.RecordResult, trial: TrialView) -> None:
        result = trial.full_result(command.result)
        if command.done:
            result = {**result, "done": True}
        for name, logger in ((RESULT_JSON, self._json), (PROGRESS_CSV, self._csv)):
            path = trial.local_path, name
            if path not in self._steps:
                for written in (name, PARAMS_JSON, PARAMS_PICKLE):
                    self.unsynced.note(os.path.join(trial.local_path, written))
                is_away = os.path.exists(put_away_as(*path, trial.lineage))
                self._steps[path] = math.inf if is_away else last_step(os.path.join(*path))
            if command.result.step > self._steps[path]:
                logger.log_trial_result(0, trial, result)
                self._steps[path] = command.result.step

    def _failure(self, command: c.RecordFailure, trial: TrialView) -> None:
        failure = recorded_failure(command, trial.trial_name, trial.num_failures)
        trial.error_file = path = os.path.join(trial.local_path, ERROR_FILE)
        self.unsynced.note(path)
        try:
            with open_to_read(path) as file:
                told = file.read().decode(errors="replace")
        except FileNotFoundError:
            told = ""
        if f"Failure # {failure.number} (" not in told:
            write_failure(trial.local_path, failure)

    def _forget(self, trial: TrialView) -> None:
        for name in (RESULT_JSON, PROGRESS_CSV):
            self._steps.pop((trial.local_path, name), None)


def put_away(folder: str, lineage: int, unsynced: UnsyncedFiles) -> None:
    """A trial begins anew: give the files of its results another name; may be done twice.

    Args:
        unsynced: told what was renamed.

    Raises:
        StoreError: they cannot be renamed.
    """
    for name in (RESULT_JSON, PROGRESS_CSV):
        kept = put_away_as(folder, name, lineage - 1)
        path = os.path.join(folder, name)
        unsynced.note(kept)
        if not os.path.exists(path) or os.path.exists(kept):
            continue
        try:
            os.rename(path, kept)
        except OSError as error:
            raise StoreError(f"{path} cannot be renamed: {error.strerror}.") from error


def put_away_as(folder: str, name: str, lineage: int) -> str:
    """What a file of this lineage is called once the trial has begun anew."""
    base, extension = os.path.splitext(name)
    return os.path.join(folder, f"{base}.{lineage}{extension}")


class Rows(NamedTuple):
    """Rows at the end of a file: how many, and the bytes where they begin and end."""

    number: int
    begin: int
    end: int


def last_step(path: str) -> int:
    """The step of the last whole line of a trial's result file; 0 where there is none.

    Raises:
        StoreError: the file cannot be read.
    """
    for tail in _tails(path):
        if tail.lines:
            return _step_of(tail.lines[-1], tail.header, path)
    return 0


def rows_behind(path: str, step: int) -> Rows:
    """The whole lines of a trial's result file of steps behind this one; they are its last.

    Raises:
        StoreError: the file cannot be read.
    """
    found = Rows(0, 0, 0)
    for tail in _tails(path):
        count, begin = 0, tail.end
        for line in reversed(tail.lines):
            if _step_of(line, tail.header, path) <= step:
                return Rows(count, begin, tail.end)
            count, begin = count + 1, begin - len(line) - 1
        found = Rows(count, begin, tail.end)
    return found


class _Tail(NamedTuple):
    """The last rows of a result file, without their line ends, and where they end."""

    header: bytes
    lines: list[bytes]
    end: int


def _tails(path: str) -> Iterator[_Tail]:
    """The last rows of a file, and then all of them; nothing where there is no file."""
    try:
        with open_to_read(path) as file:
            header = file.readline() if path.endswith(".csv") else b""
            first, size = len(header), file.seek(0, os.SEEK_END)
            for begin in dict.fromkeys((max(first, size - _TAIL_BYTES), first)):
                file.seek(begin)
                *lines, torn = file.read().split(b"\n")
                if begin > first:
                    del lines[:1]  # it may be the end of a longer line
                yield _Tail(header, lines, size - len(torn))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def _step_of(line: bytes, header: bytes, path: str) -> int:
    try:
        if not header:
            return int(json.loads(line)[TRAINING_ITERATION])
        names = next(csv.reader([header.decode()]))
        return int(next(csv.reader([line.decode()]))[names.index(TRAINING_ITERATION)])
    except (*NO_JSON, csv.Error, LookupError, TypeError, OverflowError) as error:
        raise StoreError(f"the last line of {path} is no result: {error}.") from error
