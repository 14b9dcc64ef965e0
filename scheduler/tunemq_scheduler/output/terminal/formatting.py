"""Formats values, times and tables as text; makes names from users safe for a terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tunemq_shared.base.safe_text import plain_number, text_of

#: Spaces between two columns of a table.
GAP: Final = 2
#: Characters to examine for each terminal column: some characters have no width.
_LOOKED_AT: Final = 20


class TableColumn(msgspec.Struct, kw_only=True):
    """A column of a table.

    Attributes:
        header, cells: clean text.
        right: whether to align right, as for numbers.
        rank: columns with the highest rank are dropped first if the terminal is too narrow.
        is_main: whether it shows the metric to optimise.
        least_width: the width to which its cells may be cut, for texts; 0 if they may not.
    """

    header: str
    cells: list[str]
    right: bool = False
    rank: int = 0
    is_main: bool = False
    least_width: int = 0

    @property
    def width(self) -> int:
        """The width of its widest cell."""
        return max((cell_width(text) for text in (self.header, *self.cells)), default=0)

    @property
    def needed_width(self) -> int:
        """The width that it needs at least."""
        return min(self.width, self.least_width) if self.least_width else self.width


def clean(text: object, limit: int | None = None) -> str:
    """Return ``text`` in one line, without control characters, cut to ``limit`` columns."""
    whole = text_of(text)
    # Examine only the beginning of a long text, which may have megabytes.
    begin = whole if limit is None else whole[: _LOOKED_AT * limit]
    kept = "".join(
        " " if char in "\t\n\r" else char
        for char in begin
        if char in "\t\n\r"
        or unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    ).strip()
    if limit is None or (cell_width(kept) <= limit and len(begin) == len(whole)):
        return kept
    while cell_width(kept) > limit - 1:
        kept = kept[:-1]
    return f"{kept}…"


def cell_width(text: str) -> int:
    """Return how many terminal columns ``text`` takes."""
    if text.isascii():
        return len(text)
    return sum(
        2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char)
        for char in text
    )


def value(item: Any, limit: int = 20) -> str:
    """Format a metric or parameter: numbers with four significant digits, other values cut."""
    if item is None:
        return ""
    item = plain_number(item)
    if isinstance(item, bool) or not isinstance(item, int | float):
        return clean(item, limit)
    if isinstance(item, int):
        return str(item) if abs(item) < 10**12 else f"{item:.4g}"
    if not math.isfinite(item):
        return str(float(item))
    if item != 0 and not 1e-4 <= abs(item) < 1e6:
        return f"{item:.3e}"
    return f"{item:.4g}" if abs(item) < 1000 else f"{item:.1f}"


def duration(seconds: float) -> str:
    """Format a time span: ``0.42s``, ``12.3s``, ``1m 05s``, ``2h 03m``, ``3d 04h``."""
    if seconds < 1:
        return f"{max(0.0, seconds):.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def clock(seconds: float) -> str:
    """Format a time since the start: ``00:01:05``."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def parameters(config: Mapping[str, Any], limit: int = 20, most: int = 8) -> str:
    """Format the first few parameters in one line: ``lr=0.01 layers=3``."""
    shown = [f"{clean(key, limit)}={value(config[key], limit)}" for key in list(config)[:most]]
    more = [f"and {len(config) - most} more"] if len(config) > most else []
    return " ".join([*shown, *more])


def resources(used: Mapping[str, float], total: Mapping[str, float]) -> str:
    """Format resources in use: ``cpu 2/4  gpu 0.5/1``; omit those that no node has."""
    return "  ".join(
        f"{clean(name)} {used.get(name, 0):g}/{amount:g}"
        for name, amount in total.items()
        if amount > 0 and name != "memory"
    )


def fit(columns: Sequence[TableColumn], width: int) -> list[TableColumn]:
    """Return the columns that fit side by side in ``width``, lowest ranks first, in order.

    Columns of texts that may be cut share the width that the others leave, from left to right.
    """
    kept = list(columns)
    while len(kept) > 1 and (left := width - _needed(kept)) < 0:
        kept.remove(max(reversed(kept), key=lambda column: column.rank))
    left = max(0, width - _needed(kept))
    for place, column in enumerate(kept):
        if column.least_width:
            most = column.needed_width + left
            left -= min(column.width, most) - column.needed_width
            cells = [clean(cell, most) for cell in column.cells]
            kept[place] = msgspec.structs.replace(column, cells=cells)
    return kept


def _needed(columns: Sequence[TableColumn]) -> int:
    return sum(column.needed_width for column in columns) + GAP * (len(columns) - 1)


def text_table(columns: Sequence[TableColumn]) -> list[str]:
    """Return the lines of a plain table: headers, a rule, rows."""
    widths = [column.width for column in columns]

    def line(texts: Sequence[str]) -> str:
        padded = []
        for column, width, text in zip(columns, widths, texts, strict=True):
            room = " " * (width - cell_width(text))
            padded.append(room + text if column.right else text + room)
        return (" " * GAP).join(padded).rstrip()

    rows = zip(*(column.cells for column in columns), strict=True)
    rule = (" " * GAP).join("-" * width for width in widths)
    return [line([column.header for column in columns]), rule, *(line(row) for row in rows)]
