"""`ResultRebuild`: makes ``result.json`` and ``progress.csv`` of trials whole again.

A trial's code may truncate these files, write into them, or put files of its own in their place.
What is there then stays beside the file, as ``result.foreign.json`` or ``progress.foreign.csv``.
The file keeps its rows of the search; those that are missing follow from the journal. Rows of turns
that a snapshot of the journal stands for exist only in these files: where they are missing they are
lost, and `ResultRebuild.notices` names them.
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

#: How many files a message names.
_NAMED: Final = 5
_FOREIGN: Final = "foreign"


class ResultRebuild:
    """Rebuilds files of trials, and remembers which.

    Attributes:
        folders: of the trials of which a file was rebuilt.

    Args:
        unsynced: told which files are changed.
        first: the number of the first result of each trial.
    """

    def __init__(self, unsynced: UnsyncedFiles, first: int = 1) -> None:
        self.folders: dict[str, None] = {}
        self._unsynced, self._first = unsynced, first
        self._rebuilt: dict[str, None] = {}
        #: The steps that are lost, by file.
        self._lost: dict[str, list[tuple[int, int]]] = {}

    def whole(self, folder: str, name: str, trial: str, had: int) -> FileContents:
        """What a file holds, once nothing is in it but rows of its trial, ascending.

        Args:
            folder, name: of the file.
            trial: its id.
            had: the last step that the file must have; 0 where there is none.

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
        """Put a file aside, and write it with its rows of its trial, ascending.

        Those of ``progress.csv`` come from ``result.json``.

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
        """What a person should know of what was rebuilt since the last call."""
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
    """The number of the first result of each trial; those that begin from a checkpoint count on."""
    return 1 + max((ref.step for ref in runner.settings.restore), default=0)


def foreign_path(path: str) -> str:
    """What a file that is put aside is called: the first name of its kind that is free."""
    base, extension = os.path.splitext(path)
    aside, number = f"{base}.{_FOREIGN}{extension}", 1
    while os.path.lexists(aside):
        number += 1
        aside = f"{base}.{_FOREIGN}-{number}{extension}"
    return aside


def _set_aside(path: str) -> None:
    """Give a file a second name; the first is about to be that of another.

    A trial that has it open goes on writing into the one that is put aside.
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
    """The lines of these rows of lower steps."""
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
    """A table of results as `CSVLoggerCallback` writes it; empty where there are none."""
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
