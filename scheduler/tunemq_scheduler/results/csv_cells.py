"""Writes and reads CSV cells and rows: each row is one line, and no cell is a formula.

A text that a spreadsheet would execute as a formula gets a leading apostrophe.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.safe_text import plain_number, text_of

#: Characters that begin a formula in some spreadsheet.
_FORMULA: Final = frozenset("=+-@\t\uff1d\uff0b\uff0d\uff20")
#: A cell, for rows that have a longer one than `csv` reads.
_CELL: Final = re.compile(r'(?:^|,)("[^"]*(?:""[^"]*)*"|[^,"]*)(?=,|$)')
#: An empty cell.
EMPTY: Final = msgspec.Raw(b"")


def flatten(result: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts, joining keys with slashes; an empty dict leaves no key."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def row_of(values: Iterable[Any]) -> bytes:
    """Return a row without its line end."""
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow([_in_one_line(value) for value in values])
    return written.getvalue().encode(errors="backslashreplace")


def columns_of(line: bytes) -> list[str]:
    """Return the column names in a file's first line.

    Raises:
        StoreError: the line is not a row of such a file.
    """
    if not line:
        return []
    try:
        names = cells_of(line.decode(errors="replace"))
    except csv.Error as error:
        raise StoreError(f"the first line of a CSV file is none: {error}.") from error
    return [_as_named(name) for name in names]


def cells_of(line: str) -> list[str]:
    """Return a row's cells.

    Raises:
        csv.Error: the line is not a row.
    """
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        found = list(_CELL.finditer(line))
        if "".join(one[0] for one in found) != line:
            raise
        return [_unquoted(one[1]) for one in found]


@lru_cache(maxsize=4096)
def cell(value: str | bool | None) -> msgspec.Raw:
    """Return one encoded cell."""
    if value is None:
        return EMPTY
    # Encode two cells, because the writer quotes an empty string that is alone in its row.
    return msgspec.Raw(row_of(("", value))[1:])


def _in_one_line(value: Any) -> Any:
    value = plain_number(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    text = text_of(value).replace("\r", "\\r").replace("\n", "\\n")
    return f"'{text}" if _would_run(text) and not _is_number(text) else text


def _unquoted(cell: str) -> str:
    return cell[1:-1].replace('""', '"') if cell.startswith('"') else cell


def _as_named(column: str) -> str:
    """Return a column's name as it was before it was escaped."""
    return column[1:] if column.startswith("'") and _would_run(column) else column


def _would_run(text: str) -> bool:
    """Return whether a text, without leading apostrophes, would be a formula."""
    return text.lstrip("'")[:1] in _FORMULA


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
