"""Cells and rows of a CSV file of which every row is one line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

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
    """The column names in a file's first line."""
    return next(csv.reader([line.decode()]), []) if line else []


@lru_cache(maxsize=4096)
def cell(value: str | bool | None) -> msgspec.Raw:
    """One rendered cell."""
    if value is None:
        return EMPTY
    # Rendered beside another, because the writer quotes an empty string that is alone in its row.
    return msgspec.Raw(row_of(("", value))[1:])


def _in_one_line(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).replace("\r", "\\r").replace("\n", "\\n")
