"""`UnrecordedRows`: removes rows that the journal lacks from trials' files.

A result is journalled before a logger writes it. So files have more than the journal only if the
journal lost turns: its end was cut off, `tunemq journal salvage` left out a damaged part, or an
older copy replaced it. The search repeats those turns; without this removal, their rows would be in
the files twice. Rows of ``result.json`` and failures of ``error.txt`` are moved to
``result.unrecorded.json`` and ``error.unrecorded.txt``; ``progress.csv`` has the same rows, which
are cut off.

A search may have many finished trials with long files that will not grow. So this module examines
only the files of trials that may continue or that the journal does not know. Only if one of these
shows that turns were lost does it examine the files of all trials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.journal import FILE_NAME
from tunemq_scheduler.journal.journal_layout import DAMAGED_INFIX
from tunemq_scheduler.output.log_repair import put_away_as
from tunemq_scheduler.output.result_rebuild import ResultRebuild, first_step, foreign_path
from tunemq_scheduler.output.result_rows import (
    NO_ROWS,
    TrailingRows,
    ends_with,
    has_rows,
    read_rows,
)
from tunemq_scheduler.output.unsynced_files import UnsyncedFiles
from tunemq_scheduler.storage.folders import ERROR_FILE, PROGRESS_CSV, RESULT_JSON
from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_to_read, open_to_write

#: The most files that a message names.
_NAMED: Final = 5
_UNRECORDED: Final = "unrecorded"
_FAILURE: Final = re.compile(rb"^Failure # (\d{1,9}) \(occurred at ", re.MULTILINE)


class UnrecordedRows:
    """Compare trials' files with the state at the end of the journal.

    Attributes:
        folders: the folders of trials with a changed file, also by ``rebuild``.
        news: messages for the user, one for each time that files were changed.
        turns_were_lost: whether the search did more than its journal says.

    Args:
        runner: in the state at the end of the journal.
        plan: the experiment's plan.
        unsynced: records which files are changed.
        rebuild: restores files that contain other data than the search's rows.
    """

    def __init__(
        self,
        runner: TrialRunner,
        plan: ExperimentPlan,
        unsynced: UnsyncedFiles,
        rebuild: ResultRebuild | None = None,
    ) -> None:
        self._rebuild = rebuild or ResultRebuild(unsynced, first_step(runner))
        self.folders = self._rebuild.folders
        self.notices: list[str] = []
        self._runner, self._plan, self._unsynced = runner, plan, unsynced
        self._seen: set[str] = set()
        #: The number of rows or failures removed from each file.
        self._removed: dict[str, int] = {}
        damaged = f"{FILE_NAME}{DAMAGED_INFIX}"
        self.turns_were_lost = any(name.startswith(damaged) for name in os.listdir(plan.folder))

    def remove(self) -> None:
        """Remove what the journal lacks.

        Raises:
            StoreError: a file cannot be read or written.
        """
        runner = self._runner
        for trial in self._unknown_trials():
            self._follow(trial, lineage=-1, step=0, failures=0)
        self._remove_from(runner.live)
        self._remove_from(runner.errored(), only_ends=True)
        if self.turns_were_lost:
            self._remove_from(runner.finished, only_ends=True)
        self._tell()

    def remove_from(self, trials: Iterable[str]) -> None:
        """Remove it from the files of finished trials that are about to continue.

        Raises:
            StoreError: a file cannot be read or written.
        """
        self._remove_from(trials)
        self._tell()

    def _remove_from(self, trials: Iterable[str], *, only_ends: bool = False) -> None:
        for trial in trials:
            if trial not in self._seen:
                if not only_ends:
                    self._seen.add(trial)
                summary = self._runner.summary(trial)
                self._follow(
                    trial,
                    lineage=summary.lineage,
                    step=summary.last_result.step if summary.last_result is not None else 0,
                    failures=summary.num_failures,
                    only_ends=only_ends,
                )

    def _unknown_trials(self) -> list[str]:
        """Return the trials of this experiment that have a folder but are not in the journal."""
        plan, runner = self._plan, self._runner
        prefix = plan.experiment_id[:5]
        name = re.compile(re.escape(plan.trial_name(prefix)) + r"_(\d{5,9})")
        found = [one for one in map(name.fullmatch, os.listdir(plan.folder)) if one is not None]
        return [f"{prefix}_{one[1]}" for one in found if int(one[1]) >= runner.suggested]

    def _tell(self) -> None:
        self.notices += self._rebuild.notices()
        removed, self._removed = self._removed, {}
        if removed:
            paths = sorted(removed)
            named = ", ".join(f"{path} ({removed[path]})" for path in paths[:_NAMED])
            more = f" and {len(paths) - _NAMED} more files" if len(paths) > _NAMED else ""
            self.notices.append(
                f"The journal lost its last turns: removed {sum(removed.values())} rows that it "
                f"does not have from {named}{more}. The files *.{_UNRECORDED}.* beside them have "
                "these rows; the search reports these steps again."
            )

    # --- the files of one trial -------------------------------------------------------------------

    def _follow(
        self, trial: str, *, lineage: int, step: int, failures: int, only_ends: bool = False
    ) -> None:
        """Cut the files of one trial to where the journal ends.

        Args:
            only_ends: if a file ends there, do not read the rest of it.
        """
        folder = self._plan.trial_folder(trial)
        try:
            for name in (RESULT_JSON, PROGRESS_CSV):
                self._follow_lineage(folder, name, trial, lineage)
                path = os.path.join(folder, name)
                if not (only_ends and ends_with(path, trial, step)):
                    found = self._rebuild.whole(folder, name, trial, step)
                    self._cut(path, found.behind(step))
            path = os.path.join(folder, ERROR_FILE)
            self._cut(path, _failures_behind(path, failures))
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{error.filename or folder} cannot be brought to where the journal ends: "
                f"{error.strerror}. Make it readable and writable, then restore the experiment."
            ) from error

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
            if not found.is_own and os.path.lexists(beyond):
                os.rename(beyond, foreign_path(beyond))
            self._cut(beyond, found.behind(0) if found.is_own else NO_ROWS, into=path)
            if os.path.exists(beyond):
                os.unlink(beyond)
        before = put_away_as(folder, name, lineage)
        if os.path.exists(before):
            os.rename(before, path)
            self._unsynced.note(path)
        self.folders[folder] = None

    def _cut(self, path: str, rows: TrailingRows, into: str | None = None) -> None:
        """Move the last rows of a file to its file of unrecorded rows.

        Those of ``progress.csv`` are in ``result.json``, too.
        """
        if not rows.number:
            return
        base, extension = os.path.splitext(into or path)
        if extension != ".csv":
            with open_to_read(path, restores_rights=True) as file:
                file.seek(rows.begin)
                moved = file.read(rows.end - rows.begin)
            aside = open_to_write(f"{base}.{_UNRECORDED}{extension}", os.O_WRONLY | os.O_APPEND)
            with open(aside, "ab") as file:
                file.write(moved)
                file.flush()
                os.fsync(file.fileno())
        os.truncate(path, rows.begin)
        self._unsynced.note(path)
        self.folders[os.path.dirname(path)] = None
        self._removed[path] = self._removed.get(path, 0) + rows.number
        self.turns_were_lost = True


def _failures_behind(path: str, number: int) -> TrailingRows:
    """Return the failures in a trial's ``error.txt`` with greater numbers than this."""
    try:
        with open_to_read(path, restores_rights=True) as file:
            told = file.read()
    except FileNotFoundError:
        return TrailingRows(0, 0, 0)
    begins = [one.start() for one in _FAILURE.finditer(told) if int(one[1]) > number]
    return TrailingRows(len(begins), begins[0], len(told)) if begins else TrailingRows(0, 0, 0)
