"""Cells and rows of a CSV file of which every row is one line, and no cell a formula.

Whoever opens the file with a spreadsheet executes nothing: a text that would be a formula there has
an apostrophe before it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.safe_text import plain_number, text_of

#: What begins a formula, for some spreadsheet.
_FORMULA: Final = frozenset("=+-@\t\uff1d\uff0b\uff0d\uff20")
#: A cell with nothing in it.
EMPTY: Final = msgspec.Raw(b"")


def flatten(result: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, keys joined with slashes; a dict with nothing in it leaves no key."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def row_of(values: Iterable[Any]) -> bytes:
    """A row without its line end."""
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow([_in_one_line(value) for value in values])
    return written.getvalue().encode(errors="backslashreplace")


def columns_of(line: bytes) -> list[str]:
    """The column names in a file's first line.

    Raises:
        StoreError: it is no row of such a file.
    """
    if not line:
        return []
    try:
        names = next(csv.reader([line.decode(errors="replace")]), [])
    except csv.Error as error:
        raise StoreError(f"the first line of a CSV file is none: {error}.") from error
    return [_as_named(name) for name in names]


@lru_cache(maxsize=4096)
def cell(value: str | bool | None) -> msgspec.Raw:
    """One rendered cell."""
    if value is None:
        return EMPTY
    # Rendered beside another, because the writer quotes an empty string that is alone in its row.
    return msgspec.Raw(row_of(("", value))[1:])


def _in_one_line(value: Any) -> Any:
    value = plain_number(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    text = text_of(value).replace("\r", "\\r").replace("\n", "\\n")
    return f"'{text}" if _would_run(text) and not _is_number(text) else text


def _as_named(column: str) -> str:
    """A column's name as it was before it was written."""
    return column[1:] if column.startswith("'") and _would_run(column) else column


def _would_run(text: str) -> bool:
    """Whether it would be a formula, without the apostrophes that may be before it."""
    return text.lstrip("'")[:1] in _FORMULA


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
