"""`CSVLoggerCallback`: writes each trial's ``progress.csv``, nested keys joined with slashes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tunemq_scheduler.output.loggers.appended_files import AppendedFile, AppendedFiles
from tunemq_scheduler.output.loggers.logger import LoggerCallback
from tunemq_scheduler.output.pending_fsyncs import UnsyncedFiles
from tunemq_scheduler.results.csv_cells import EMPTY, cell, columns_of, flatten, row_of
from tunemq_scheduler.results.decision_rows import without_decisions
from tunemq_scheduler.storage.folders import PROGRESS_CSV, make_trial_folder, replace_file
from tunemq_shared.system.plain_files import open_to_read

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView


#: The most row plans of a trial; with more different shapes of results, they are rebuilt.
_MOST_PLANS: Final = 64
_WORDS: Final = frozenset((str, bool, type(None)))
_NUMBERS: Final = frozenset((int, float))

_encode = msgspec.json.Encoder().encode


class _Plan:
    """How to encode the row of a result with certain keys and types.

    Attributes:
        words: the positions of values that are encoded here; msgspec encodes numbers.
        pick: selects the row's cells, and an empty one at its end, from the result's values
            followed by an empty cell and the configuration's cells.
    """

    __slots__ = ("pick", "words")

    def __init__(self, words: list[int], order: list[int], empty: int) -> None:
        self.words = words
        self.pick = itemgetter(*order, empty)


class _Table:
    """One trial's file, its columns, and the cells of its configuration."""

    __slots__ = ("cells", "columns", "config", "file", "plans")

    def __init__(self, path: str) -> None:
        self.file = AppendedFile(path)
        self.columns: dict[str, None] = {}
        self.config: Any = None
        self.cells: dict[str, msgspec.Raw] = {}
        self.plans: dict[tuple[Any, ...], _Plan | None] = {}

    def row(self, result: dict[str, Any]) -> bytes | None:
        """Return the row of a result of scalars and its configuration; None for any other.

        A row with ``null`` in it contains a NaN, an infinity or that word, and also takes the slow
        path; so does an empty row, whose only cell must be quoted.
        """
        config = result.get("config")
        if config is not self.config:
            self._take(config)
        values = [*result.values()]
        shape = (*result, *map(type, values))
        try:
            plan = self.plans[shape]
        except KeyError:
            plan = self._plan(shape)
        if plan is None:
            return None
        for index in plan.words:
            values[index] = cell(values[index])
        row = _encode(plan.pick([*values, EMPTY, *self.cells.values()]))[1:-2]
        return None if b"null" in row or not row else row

    def _take(self, config: Any) -> None:
        flat = flatten({"config": config}) if isinstance(config, dict) else {}
        if flat.keys() != self.cells.keys():
            self.plans.clear()
        self.config = config
        self.cells = {key: msgspec.Raw(row_of(("", value))[1:]) for key, value in flat.items()}

    def _plan(self, shape: tuple[Any, ...]) -> _Plan | None:
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        plan = self.plans[shape] = self._new_plan(shape)
        return plan

    def _new_plan(self, shape: tuple[Any, ...]) -> _Plan | None:
        count = len(shape) // 2
        places: dict[str, int] = {}
        words: list[int] = []
        for index, (key, kind) in enumerate(zip(shape[:count], shape[count:], strict=True)):
            if key == "config" and kind is dict:
                continue
            if kind in _WORDS:
                words.append(index)
            elif kind not in _NUMBERS:
                return None
            places[key] = index
        places.update((key, count + 1 + n) for n, key in enumerate(self.cells))
        if not places or not places.keys() <= self.columns.keys():
            return None
        return _Plan(words, [places.get(column, count) for column in self.columns], count)


class CSVLoggerCallback(LoggerCallback):
    r"""Write each result as a row; a key that appears later becomes a new column, losing nothing.

    To add a column, the logger writes a new file and replaces the old one atomically. A trial that
    continues after a restart finds its columns in the file. A line end within a string is written
    as the two characters ``\n``, so that a row is one line.

    Args:
        unsynced: records which files are written.

    Raises:
        StoreError: a file cannot be written.
    """

    def __init__(self, unsynced: UnsyncedFiles | None = None) -> None:
        self._unsynced = UnsyncedFiles() if unsynced is None else unsynced
        self._files = AppendedFiles(self._unsynced)
        self._tables: dict[str, _Table] = {}

    def log_trial_result(self, iteration: int, trial: TrialView, result: dict[str, Any]) -> None:
        """Append the result."""
        del iteration
        self.write_row(trial.trial_id, trial.local_path, result)

    def write_row(self, trial: str, folder: str, result: dict[str, Any]) -> None:
        """Append a result of the trial with this ID and folder, without its decisions."""
        result = without_decisions(result)
        table = self._tables.get(trial)
        if table is None:
            table = self._begin(trial, folder)
        row = table.row(result)
        if row is None:
            flat = flatten(result)
            if not flat.keys() <= table.columns.keys():
                self._add_columns(table, flat)
            row = row_of(flat.get(column) for column in table.columns)
        self._files.append(table.file, row)

    def log_trial_end(self, trial: TrialView, failed: bool = False) -> None:
        """Write buffered results and close the file."""
        del failed
        table = self._tables.pop(trial.trial_id, None)
        if table is not None:
            self._files.close(table.file)

    def flush(self) -> None:
        """Write buffered results."""
        self._files.flush()

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        """Write buffered results and close all files."""
        del trials, info
        self._files.close_all()
        self._tables.clear()

    def _begin(self, trial: str, folder: str) -> _Table:
        make_trial_folder(folder)
        table = self._tables[trial] = _Table(os.path.join(folder, PROGRESS_CSV))
        table.columns.update(dict.fromkeys(columns_of(self._files.first_line(table.file))))
        return table

    def _add_columns(self, table: _Table, keys: Iterable[str]) -> None:
        known = len(table.columns)
        table.columns.update(dict.fromkeys(keys))
        table.plans.clear()
        header = row_of(table.columns)
        if not known:
            self._files.append(table.file, header)
            return
        self._files.close(table.file)
        commas = b"," * (len(table.columns) - known)
        rows = _rows_of(table.file.path)
        self._unsynced.note(table.file.path)
        replace_file(table.file.path, b"\n".join([header, *(row + commas for row in rows), b""]))


def _rows_of(path: str) -> list[bytes]:
    """Return the rows of a table; none if the trial's code deleted it."""
    try:
        with open_to_read(path, restores_rights=True) as file:
            return file.read().splitlines()[1:]
    except FileNotFoundError:
        return []
