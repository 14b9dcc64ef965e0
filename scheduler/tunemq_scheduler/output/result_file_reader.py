"""Reads a trial's rows from ``result.json`` and ``progress.csv``, and ignores other data there.

A trial's code runs in the folder of these files, so it may append to them, truncate them or replace
them. A row counts only if it names its trial and its step. Its *place* is its lineage and its step:
a trial that continues from the state of another begins a new lineage, whose steps may be lower.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from tunemq_scheduler.results.csv_cells import cells_of, columns_of
from tunemq_shared.base.decoding_errors import NO_JSON, UNDECODABLE
from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_to_read
from tunemq_shared.trial.results import LINEAGE, TRAINING_ITERATION, TRIAL_ID

#: The lineage and the step of a row, which grow in a file.
RowPlace: TypeAlias = tuple[int, int]

#: The longest row: a result has at most 1 MiB, and its JSON is at most a few times as long. The
#: header of a table has the columns of all results.
MOST_ROW_BYTES: Final = 2**28
#: How many bytes at the end of a file are searched for the last row.
_TAIL_BYTES: Final = 2**16
#: The place of a line of the search that is no row.
_NO_ROW: Final = (0, 0)


class _Row(msgspec.Struct):
    training_iteration: int
    trial_id: str
    lineage: int = 0


_decode_row: Final = msgspec.json.Decoder(_Row).decode


class FileRow(NamedTuple):
    """A row of the search in a file: where it begins, and where its line end begins."""

    begin: int
    end: int


class FileContents(NamedTuple):
    """The contents of a result file.

    Attributes:
        rows: the trial's rows by place, ascending.
        end: where the last whole line ends.
        torn: the number of bytes after it.
        is_own: whether the file contains nothing else.
    """

    rows: dict[RowPlace, FileRow]
    end: int
    torn: int
    is_own: bool


def read_rows(path: str, trial: str) -> FileContents:
    """Read a trial's result file; empty if there is no regular file.

    A last line without an end may have been torn by a crash.

    Args:
        trial: its ID.

    Raises:
        StoreError: the file cannot be read.
    """
    rows: dict[RowPlace, FileRow] = {}
    is_own, last, end, torn = True, _NO_ROW, 0, 0
    for line, begin, place in _lines(path, trial):
        if not line.endswith(b"\n"):
            torn, is_own = len(line), is_own and place is not None
            break
        end = begin + len(line)
        if place is None:
            is_own = False
        elif place != _NO_ROW:
            is_own = is_own and place > last
            last = place
            rows.setdefault(place, FileRow(begin, end - 1))
    return FileContents(dict(sorted(rows.items())), end, torn, is_own)


def has_rows(path: str, trial: str) -> bool:
    """Return whether a file exists and has rows of this trial.

    Raises:
        StoreError: the file cannot be read.
    """
    return bool(read_rows(path, trial).rows)


def is_of_search(path: str, trial: str) -> bool:
    """Return whether a file exists and is empty or has only rows of this trial.

    Raises:
        StoreError: the file cannot be read.
    """
    is_file = os.path.isfile(path) and not os.path.islink(path)
    return is_file and read_rows(path, trial).is_own


def ends_with(path: str, trial: str, place: RowPlace | None) -> bool:
    """Return whether the last row of a trial's result file has this place; reads only its end.

    Args:
        place: None if there should be no row.

    Raises:
        StoreError: the file cannot be read.
    """
    is_table = path.endswith(".csv")
    try:
        with open_to_read(path, restores_rights=True) as file:
            head = file.readline(_TAIL_BYTES) if is_table else b""
            size = file.seek(0, os.SEEK_END)
            begin = max(len(head), size - _TAIL_BYTES)
            file.seek(begin)
            *lines, torn = file.read().split(b"\n")
    except FileNotFoundError:
        return place is None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    columns = _columns(head) if is_table else None
    if not lines:
        is_empty = place is None and not torn and size == len(head)
        return is_empty and bool(columns or not head)
    return not torn and place is not None and place_of(lines[-1], columns, trial) == place


def lines_in(path: str, rows: Iterable[FileRow]) -> Iterator[bytes]:
    """Yield these rows of a file as lines.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        with open_to_read(path, restores_rights=True) as file:
            for row in rows:
                file.seek(row.begin)
                yield file.read(row.end - row.begin) + b"\n"
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def results_in(path: str, trial: str, places: Container[RowPlace]) -> Iterator[dict[str, Any]]:
    """Yield the results at these places in ``result.json``, each once, in ascending order.

    Raises:
        StoreError: the file cannot be read.
    """
    rows = read_rows(path, trial).rows
    return map(json.loads, lines_in(path, [row for one, row in rows.items() if one in places]))


def place_of(line: bytes, columns: list[str] | None, trial: str) -> RowPlace | None:
    """Return the place of a trial's row; None if the line is not one.

    Args:
        columns: the table's columns; None for a line of JSON.
    """
    try:
        text = line.decode()
        if columns is None:
            found, whose, lineage = _of_json(line)
        else:
            cells = cells_of(text)
            if len(cells) != len(columns):
                return None
            found = cells[columns.index(TRAINING_ITERATION)]
            whose = cells[columns.index(TRIAL_ID)].lstrip("'")
            lineage = cells[columns.index(LINEAGE)] if LINEAGE in columns else 0
        place = int(lineage), int(found)
    except (*NO_JSON, csv.Error, LookupError, TypeError, OverflowError):
        return None
    return place if whose == trial and place[0] >= 0 and place[1] > 0 else None


def _of_json(line: bytes) -> tuple[Any, Any, Any]:
    try:
        row = _decode_row(line)
    except UNDECODABLE:
        read = json.loads(line)  # NaN and infinities, or no row of ours
        return read[TRAINING_ITERATION], read[TRIAL_ID], read.get(LINEAGE, 0)
    return row.training_iteration, row.trial_id, row.lineage


def _lines(path: str, trial: str) -> Iterator[tuple[bytes, int, RowPlace | None]]:
    """Yield each line with its position and place.

    The place is None for a foreign line, and `_NO_ROW` for a table's header and for a torn line of
    the search.
    """
    is_table = path.endswith(".csv")
    columns: list[str] | None = None
    try:
        with open_to_read(path, restores_rights=True) as file:
            begin = 0
            while line := file.readline(MOST_ROW_BYTES):
                is_head = is_table and not begin
                if not line.endswith(b"\n"):
                    is_own = not is_head if is_table else _may_be_torn(line)
                    yield line, begin, _NO_ROW if is_own else None
                    return
                if is_head:
                    columns = _columns(line)
                place = _NO_ROW if is_head and columns else place_of(line[:-1], columns, trial)
                yield line, begin, place
                begin += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def _columns(line: bytes) -> list[str]:
    """Return the columns of a table with trials' rows; none if the line is not its header."""
    try:
        line.decode()
        columns = columns_of(line[:-1])
    except (StoreError, UnicodeDecodeError):
        return []
    return columns if {TRAINING_ITERATION, TRIAL_ID} <= {*columns} else []


def _may_be_torn(line: bytes) -> bool:
    """Return whether a line may be the beginning of a JSON line that a crash tore."""
    try:
        read = json.loads(line)
    except NO_JSON:
        return line.startswith(b"{")
    return isinstance(read, dict) and TRIAL_ID in read and TRAINING_ITERATION in read
