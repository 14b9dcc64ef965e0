"""`ResultRebuild`: restores ``result.json`` and ``progress.csv`` that a trial's code changed.

A trial's code may truncate these files, write into them, or replace them. The changed file is kept
as ``result.foreign.json`` or ``progress.foreign.csv``. The restored file keeps its rows of the
search; missing ones come from the journal. Rows of turns that the journal has replaced by a
snapshot exist only in these files: if they are missing they are lost, and `ResultRebuild.notices`
names them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, Final

from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.output.result_rows import FileContents, read_rows, results_in
from tunemq_scheduler.output.unsynced_files import UnsyncedFiles
from tunemq_scheduler.results.csv_cells import flatten, row_of
from tunemq_scheduler.storage.folders import PROGRESS_CSV, RESULT_JSON, replace_file
from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_to_read

#: The most files that a message names.
_NAMED: Final = 5
_FOREIGN: Final = "foreign"


class ResultRebuild:
    """Restore trials' files, and remember which.

    Attributes:
        folders: the folders of trials with a restored file.

    Args:
        unsynced: records which files are changed.
        first: the number of the first result of each trial.
    """

    def __init__(self, unsynced: UnsyncedFiles, first: int = 1) -> None:
        self.folders: dict[str, None] = {}
        self._unsynced, self._first = unsynced, first
        self._rebuilt: dict[str, None] = {}
        #: The lost steps, by file.
        self._lost: dict[str, list[tuple[int, int]]] = {}

    def whole(self, folder: str, name: str, trial: str, had: int) -> FileContents:
        """Return a file's contents, after restoring it if it has other data than its trial's rows.

        Args:
            folder, name: the file.
            trial: the trial's ID.
            had: the last step that the file must have; 0 for none.

        Raises:
            StoreError: the file cannot be read or written.
        """
        path = os.path.join(folder, name)
        found = read_rows(path, trial)
        missing = found.steps.missing(self._first, had)
        if name == PROGRESS_CSV and missing:
            rows = read_rows(os.path.join(folder, RESULT_JSON), trial)
            is_short = rows.steps.missing(self._first, had) != missing
        else:
            is_short = False
        if is_short or not found.is_own:
            found = self.rebuild(folder, name, trial)
        elif found.torn:
            _cut_behind(path, found.end)
        if name == RESULT_JSON and missing:
            self._lost[path] = missing
        return found

    def rebuild(
        self, folder: str, name: str, trial: str, *, below: float = math.inf
    ) -> FileContents:
        """Rename a file, and write a new one with its trial's rows in ascending order.

        The rows of ``progress.csv`` come from ``result.json``.

        Args:
            below: leave out rows of this step and later ones.

        Raises:
            StoreError: a file cannot be read or written.
        """
        path = os.path.join(folder, name)
        if name == RESULT_JSON:
            content = _rows_in(path, read_rows(path, trial), below)
        else:
            results = list(results_in(os.path.join(folder, RESULT_JSON), trial, below))
            content = _table_of(results)
        replace_file(path, content, when_written=lambda: _set_aside(path))
        self._unsynced.note(path)
        self._rebuilt[path] = self.folders[folder] = None
        return read_rows(path, trial)

    def notices(self) -> list[str]:
        """Return messages about the files restored since the last call."""
        rebuilt, self._rebuilt = self._rebuilt, {}
        lost, self._lost = self._lost, {}
        notices = []
        if rebuilt:
            notices.append(
                f"The code of a trial, or somebody else, changed {_named(rebuilt)}. Rebuilt from "
                f"the journal; the files *.{_FOREIGN}.* beside them have what was there. Trials "
                f"must not write files called {RESULT_JSON} or {PROGRESS_CSV} into their folders."
            )
        if lost:
            told = (f"{path} (step {_spelt(lost[path])})" for path in sorted(lost))
            notices.append(
                f"Results are missing from {_named(told)}: the journal does not have them any more."
            )
        return notices


def _cut_behind(path: str, end: int) -> None:
    try:
        os.truncate(path, end)
    except OSError as error:
        raise StoreError(f"{path} cannot be cut: {error.strerror}.") from error


def first_step(runner: TrialRunner) -> int:
    """Return the number of each trial's first result; higher after an imported checkpoint."""
    return 1 + max((ref.step for ref in runner.settings.restore), default=0)


def foreign_path(path: str) -> str:
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
    try:
        aside = foreign_path(path)
        try:
            os.link(path, aside, follow_symlinks=False)
        except OSError:  # not all file systems have links
            os.rename(path, aside)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"{path} cannot be renamed: {error.strerror}.") from error


def _rows_in(path: str, found: FileContents, below: float) -> bytes:
    """Return the lines of the trial's rows below a step."""
    rows = [row for row in found.rows if row.step < below]
    if not rows:
        return b""
    try:
        with open_to_read(path, restores_rights=True) as file:
            lines = []
            for row in rows:
                file.seek(row.begin)
                lines.append(file.read(row.end - row.begin))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    return b"\n".join([*lines, b""])


def _table_of(results: list[dict[str, Any]]) -> bytes:
    """Return results as a table like `CSVLoggerCallback`'s; empty without results."""
    if not results:
        return b""
    flat = [flatten(result) for result in results]
    columns = dict.fromkeys(key for one in flat for key in one)
    rows = (row_of(one.get(column) for column in columns) for one in flat)
    return b"\n".join([row_of(columns), *rows, b""])


def _named(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    return ", ".join(known[:_NAMED]) + more


def _spelt(ranges: list[tuple[int, int]]) -> str:
    return ", ".join(f"{one}" if one == last else f"{one} to {last}" for one, last in ranges)
