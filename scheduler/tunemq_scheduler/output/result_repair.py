"""`ResultRepair`: brings trials' files to where the journal ends, at a restart.

A result is journalled before a logger writes it. So a file may lack rows of the replayed turns, and
has rows that the journal lacks only if the journal lost turns: its end was cut off, `tunemq journal
salvage` left out a damaged part, or an older copy replaced it. A trial's code runs in the folder of
these files, so it may also truncate them, write into them, or replace them.

``result.json`` gets exactly the rows that the journal knows, each once. Rows that the journal lacks
are moved to ``result.unrecorded.json``; a file with other data is kept as ``result.foreign.json``.
Rows of turns that a snapshot has replaced exist only in the file: if they are missing they are
lost, and a notice names them. ``progress.csv`` then gets the rows that it lacks from
``result.json``. Failures of ``error.txt`` follow the journal likewise.

A search may have many finished trials with long files that will not grow. So this module examines
only the files of trials that may continue, that have replayed results, or that the journal does not
know. Only if one of these shows that turns were lost does it examine the files of all trials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final, TypeAlias

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import TrialSummary
from tunemq_scheduler.journal.journal_files import DAMAGED_INFIX, FILE_NAME
from tunemq_scheduler.output.loggers.csv_logger import CSVLoggerCallback
from tunemq_scheduler.output.loggers.json_logger import write_params
from tunemq_scheduler.output.pending_fsyncs import UnsyncedFiles
from tunemq_scheduler.output.result_file_reader import (
    RowPlace,
    ends_with,
    has_rows,
    is_of_search,
    lines_in,
    read_rows,
    results_in,
)
from tunemq_scheduler.results.decision_rows import result_row
from tunemq_scheduler.results.json_encoding import to_json
from tunemq_scheduler.results.trial_failures import recorded_failure, write_failure
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.storage.folders import (
    ERROR_FILE,
    PARAMS_JSON,
    PARAMS_PICKLE,
    PROGRESS_CSV,
    RESULT_JSON,
    make_trial_folder,
    replace_file,
)
from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_to_read, open_to_write
from tunemq_shared.trial.results import LINEAGE

#: The most files that a message names.
_NAMED: Final = 5
_FOREIGN: Final = "foreign"
_UNRECORDED: Final = "unrecorded"
#: The place before all rows.
_NOTHING: Final = (0, 0)
_FAILURE: Final = re.compile(rb"^Failure # (\d{1,9}) \(occurred at ", re.MULTILINE)


#: A trial, and the lines of its replayed results by place.
_ReplayedResults: TypeAlias = tuple[TrialView, dict[RowPlace, bytes]]


class ResultRepair:
    """Append, move and restore rows of trials' files; pass `note` to `EventDriver.replay`.

    Attributes:
        unsynced: all changed files, and those of replayed events: a row in a file may not be on the
            disk yet.
        folders: the folders of trials with a file that had other contents than the journal.
        notices: messages for the user, one for each time that files were changed.
        turns_were_lost: whether the search did more than its journal says.

    Args:
        runner: the state, which the replay changes.
        plan: the experiment's plan.
    """

    def __init__(self, runner: TrialRunner, plan: ExperimentPlan) -> None:
        self.unsynced = UnsyncedFiles()
        self.folders: dict[str, None] = {}
        self.notices: list[str] = []
        damaged = f"{FILE_NAME}{DAMAGED_INFIX}"
        self.turns_were_lost = any(name.startswith(damaged) for name in os.listdir(plan.folder))
        self._runner, self._plan = runner, plan
        self._csv = CSVLoggerCallback(self.unsynced)
        #: The number of each trial's first result; higher after an imported checkpoint.
        self._first = 1 + max((ref.step for ref in runner.settings.restore), default=0)
        #: The trials with replayed results, and the lines of these by place.
        self._replayed: dict[str, _ReplayedResults] = {}
        self._seen: set[str] = set()
        self._rebuilt: dict[str, None] = {}
        #: The lost steps of each file, and the number of rows or failures removed from it.
        self._lost: dict[str, str] = {}
        self._removed: dict[str, int] = {}

    # --- the replay -------------------------------------------------------------------------------

    def note(self, command: c.NotifyCommand, trial: TrialView) -> None:
        """Process a replayed notification, whose row may or may not be in the files.

        Raises:
            StoreError: a file cannot be read or written.
        """
        match command:
            case c.NotifyTrialAdded():
                make_trial_folder(trial.local_path)
            case c.NotifyTrialRevived(is_anew=True):
                self._finish_lineage(trial, command.lineage)
            case c.NotifyResult():
                result = result_row(trial, command)
                lines = self._replayed.setdefault(trial.trial_id, (trial, {}))[1]
                lines[result[LINEAGE], command.result.step] = to_json(result)
            case c.NotifyFailure():
                self._failure(command, trial)
            case _:
                pass

    def _finish_lineage(self, trial: TrialView, lineage: int) -> None:
        """Complete the files of a trial that restarts from nothing, and rename them."""
        folder, replayed = trial.local_path, self._replayed.pop(trial.trial_id, None)
        kept = put_away_as(folder, RESULT_JSON, lineage - 1)
        if replayed is not None and not has_rows(kept, trial.trial_id):
            end, first = max(replayed[1]), self._first
            if end[0]:  # it may have begun from the state of another trial
                first = min(step for lineage, step in replayed[1] if lineage == end[0])
            self._repair(trial.trial_id, end, replayed, first)
        put_away(folder, trial.trial_id, lineage, self.unsynced)

    def _failure(self, command: c.NotifyFailure, trial: TrialView) -> None:
        failure = recorded_failure(command, trial.trial_name, trial.num_failures)
        trial.error_file = path = os.path.join(trial.local_path, ERROR_FILE)
        self.unsynced.note(path)
        if f"Failure # {failure.number} (".encode() not in _content(path):
            write_failure(trial.local_path, failure)

    # --- the end of the replay --------------------------------------------------------------------

    def finish(self) -> None:
        """Compare the files with the state at the end of the journal.

        Raises:
            StoreError: a file cannot be read or written.
        """
        runner = self._runner
        for trial in self._unknown_trials():
            self._follow(trial, TrialSummary(0, b"", "", {}, lineage=-1))
        self._follow_all([*runner.live, *self._replayed])
        self._follow_all(runner.errored(), only_ends=True)
        if self.turns_were_lost:
            self._follow_all(runner.finished, only_ends=True)
        self._tell()

    def follow(self, trials: Iterable[str]) -> None:
        """Compare the files of finished trials that are about to continue.

        Raises:
            StoreError: a file cannot be read or written.
        """
        self._follow_all(trials)
        self._tell()

    def _follow_all(self, trials: Iterable[str], *, only_ends: bool = False) -> None:
        for trial in trials:
            if trial not in self._seen:
                if not only_ends:
                    self._seen.add(trial)
                self._follow(trial, self._runner.summary(trial), only_ends=only_ends)

    def _unknown_trials(self) -> list[str]:
        """Return the trials of this experiment that have a folder but are not in the journal."""
        plan, runner = self._plan, self._runner
        prefix = plan.experiment_id[:5]
        name = re.compile(re.escape(plan.trial_name(prefix)) + r"_(\d{5,9})")
        found = [one for one in map(name.fullmatch, os.listdir(plan.folder)) if one is not None]
        return [f"{prefix}_{one[1]}" for one in found if int(one[1]) >= runner.suggested]

    def _tell(self) -> None:
        if self._rebuilt:
            self.notices.append(
                f"The code of a trial or another process changed {_named(self._rebuilt)}. They "
                f"were rebuilt from the journal; the files *.{_FOREIGN}.* beside them have the "
                f"former content. Trials must not write files called {RESULT_JSON} or "
                f"{PROGRESS_CSV} into their folders."
            )
        if self._lost:
            told = _named(f"{path} (step {steps})" for path, steps in self._lost.items())
            self.notices.append(
                f"Results are missing from {told}: the journal does not have them any more."
            )
        if removed := self._removed:
            told = _named(f"{path} ({number})" for path, number in removed.items())
            self.notices.append(
                f"The journal lost its last turns: removed {sum(removed.values())} rows that it "
                f"does not have from {told}. The files *.{_UNRECORDED}.* beside them have these "
                "rows; the search reports these steps again."
            )
        self._rebuilt, self._lost, self._removed = {}, {}, {}

    # --- the files of one trial -------------------------------------------------------------------

    def _follow(self, trial: str, summary: TrialSummary, *, only_ends: bool = False) -> None:
        """Bring the files of one trial to where the journal ends.

        Args:
            only_ends: if a file ends there, do not read the rest of it.
        """
        begins, end = _extent(summary)
        folder = self._plan.trial_folder(trial)
        paths = [os.path.join(folder, name) for name in (RESULT_JSON, PROGRESS_CSV)]
        try:
            for name in (RESULT_JSON, PROGRESS_CSV):
                self._follow_lineage(folder, name, trial, summary.lineage)
            if not (only_ends and all(ends_with(path, trial, end) for path in paths)):
                first = self._first if begins is None else begins
                self._repair(trial, end or _NOTHING, self._replayed.pop(trial, None), first)
            path = os.path.join(folder, ERROR_FILE)
            told = _content(path)
            known = summary.num_failures
            later = [one.start() for one in _FAILURE.finditer(told) if int(one[1]) > known]
            if later:
                self._keep_unrecorded(path, [told[later[0] :]], len(later))
                os.truncate(path, later[0])
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{error.filename or folder} cannot be brought to where the journal ends: "
                f"{error.strerror}. Make it readable and writable, then restore the experiment."
            ) from error

    def _repair(
        self, trial: str, end: RowPlace, replayed: _ReplayedResults | None, first: int
    ) -> None:
        """Give both result files of a trial their rows up to a place.

        Args:
            first: the first step of the lineage of ``end``.
        """
        folder, lines = self._plan.trial_folder(trial), replayed[1] if replayed is not None else {}
        path = os.path.join(folder, RESULT_JSON)
        found = read_rows(path, trial)
        wanted = sorted({one for one in found.rows if one <= end} | lines.keys())
        if replayed is not None:
            for name in (RESULT_JSON, PROGRESS_CSV, PARAMS_JSON, PARAMS_PICKLE):
                self.unsynced.note(os.path.join(folder, name))
            if not found.rows.keys() >= lines.keys():
                make_trial_folder(folder)
                config = replayed[0].config
                write_params(folder, trial, config, to_json(config))
        if found.torn or not found.is_own or wanted != [*found.rows]:
            own = dict(zip(found.rows, lines_in(path, found.rows.values()), strict=True))
            if unrecorded := [line for one, line in own.items() if one > end]:
                self._keep_unrecorded(path, unrecorded, len(unrecorded))
            content = b"".join(own.get(one) or lines[one] + b"\n" for one in wanted)
            self._replace(path, content, is_foreign=not found.is_own)
        if missing := _gaps(wanted, self._first, (end[0], first), end):
            self._lost[path] = missing
        self._repair_table(folder, trial, end, wanted)

    def _repair_table(self, folder: str, trial: str, end: RowPlace, wanted: list[RowPlace]) -> None:
        """Give ``progress.csv`` the rows of ``result.json`` up to a place."""
        path = os.path.join(folder, PROGRESS_CSV)
        found = read_rows(path, trial)
        later = [one for one in found.rows if one > end]
        lacking = {one for one in wanted if one not in found.rows}
        if not found.is_own or any(one < max(found.rows, default=_NOTHING) for one in lacking):
            self._replace(path, b"", is_foreign=True)
            lacking = {*wanted}
        elif later:
            self._keep_unrecorded(path, (), len(later))
            os.truncate(path, found.rows[later[0]].begin)
        elif found.torn:
            self.unsynced.note(path)
            os.truncate(path, found.end)
        if lacking:
            for result in results_in(os.path.join(folder, RESULT_JSON), trial, lacking):
                self._csv.write_row(trial, folder, result)
            self._csv.on_experiment_end([])

    def _replace(self, path: str, content: bytes, *, is_foreign: bool) -> None:
        """Replace a file; one with data that is not of the search gets another name."""
        replace_file(path, content, when_written=lambda: _set_aside(path) if is_foreign else None)
        self.unsynced.note(path)
        if is_foreign:
            self._rebuilt[path] = self.folders[os.path.dirname(path)] = None

    def _follow_lineage(self, folder: str, name: str, trial: str, lineage: int) -> None:
        """Restore the earlier files of a trial whose restart was in the lost turns."""
        base, _, extension = name.partition(".")
        pattern = re.compile(rf"{base}\.(\d{{1,9}})\.{extension}")
        names = os.listdir(folder) if os.path.isdir(folder) else []
        # The trial's code may have files of such names, too.
        later = sorted(
            int(one[1])
            for one in map(pattern.fullmatch, names)
            if one and int(one[1]) >= lineage and has_rows(os.path.join(folder, one[0]), trial)
        )
        if not later:
            return
        path = os.path.join(folder, name)
        for number in [*later[lineage >= 0 and later[0] == lineage :], None]:
            beyond = path if number is None else put_away_as(folder, name, number)
            found = read_rows(beyond, trial)
            if not found.is_own:
                os.rename(beyond, _foreign_path(beyond))
            elif found.rows:
                self._keep_unrecorded(path, lines_in(beyond, found.rows.values()), len(found.rows))
            if os.path.exists(beyond):
                os.unlink(beyond)
        before = put_away_as(folder, name, lineage)
        if os.path.exists(before):
            os.rename(before, path)
            self.unsynced.note(path)
        self.folders[folder] = None

    def _keep_unrecorded(self, path: str, lines: Iterable[bytes], number: int) -> None:
        """Append rows of a file to its file of unrecorded rows.

        Those of ``progress.csv`` are in ``result.json``, too.
        """
        base, extension = os.path.splitext(path)
        if extension != ".csv":
            aside = open_to_write(f"{base}.{_UNRECORDED}{extension}", os.O_WRONLY | os.O_APPEND)
            with open(aside, "ab") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
        self.unsynced.note(path)
        self.folders[os.path.dirname(path)] = None
        self._removed[path] = self._removed.get(path, 0) + number
        self.turns_were_lost = True


def put_away(folder: str, trial: str, lineage: int, unsynced: UnsyncedFiles) -> None:
    """Rename a trial's result files because the trial restarts from nothing; idempotent.

    Args:
        trial: its ID.
        lineage: the lineage that begins.
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
                os.rename(kept, _foreign_path(kept))
            os.rename(path, kept)
        except OSError as error:
            raise StoreError(f"{path} cannot be renamed: {error.strerror}.") from error


def put_away_as(folder: str, name: str, lineage: int) -> str:
    """Return the name of a lineage's file after the trial restarted from nothing."""
    base, extension = os.path.splitext(name)
    return os.path.join(folder, f"{base}.{lineage}{extension}")


def _foreign_path(path: str) -> str:
    """Return a free name for a changed file, such as ``result.foreign.json``."""
    base, extension = os.path.splitext(path)
    aside, number = f"{base}.{_FOREIGN}{extension}", 1
    while os.path.lexists(aside):
        number += 1
        aside = f"{base}.{_FOREIGN}-{number}{extension}"
    return aside


def _set_aside(path: str) -> None:
    """Give a file a second name, because another file is about to take its first.

    A trial that has it open continues to write into the renamed file.
    """
    aside = _foreign_path(path)
    try:
        try:
            os.link(path, aside, follow_symlinks=False)
        except OSError:  # not all file systems have links
            os.rename(path, aside)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"{path} cannot be renamed: {error.strerror}.") from error


def _content(path: str) -> bytes:
    """Return a trial's file; empty if there is none."""
    try:
        with open_to_read(path, restores_rights=True) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _extent(summary: TrialSummary) -> tuple[int | None, RowPlace | None]:
    """Return the first step of a trial's lineage, and the place of its last row.

    The first step is None in a lineage that began from nothing, and the place if there is no row.
    Until a lineage that continues another state has a row, the place is before its first step.
    """
    last, inherited = summary.last_result, summary.inherited
    first = None if inherited is None else inherited.step + 1
    if inherited is not None and (last is None or last.attempt <= inherited.attempt):
        return first, (summary.lineage, inherited.step)
    return first, None if last is None else (summary.lineage, last.step)


def _gaps(places: Iterable[RowPlace], first: int, begin: RowPlace, end: RowPlace) -> str:
    """Spell the missing steps.

    Args:
        places: the rows that are there, in order.
        first: the first step of the first lineage.
        begin, end: the first and the last place of the newest lineage.
    """
    by_lineage: dict[int, list[int]] = {0: [], end[0]: []}
    for lineage, step in places:
        by_lineage.setdefault(lineage, []).append(step)
    gaps = []
    for lineage, steps in sorted(by_lineage.items()):
        if lineage == end[0]:
            found = _missing(steps, begin[1], end[1])
        elif steps:  # of a former lineage only the steps between two others are known to be missing
            found = _missing(steps, steps[0] if lineage else first, steps[-1])
        else:
            continue
        gaps += [f"{one} of lineage {lineage}" if lineage else one for one in found]
    return ", ".join(gaps)


def _missing(steps: Iterable[int], first: int, last: int) -> list[str]:
    """Spell the missing ranges between ``first`` and ``last``."""
    gaps = []
    for step in [*steps, last + 1]:
        if first < step:
            gaps.append(f"{first}" if first == step - 1 else f"{first} to {step - 1}")
        first = max(first, step + 1)
    return gaps


def _named(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    return ", ".join(known[:_NAMED]) + more
