"""Metrics in what a program prints: ``name=value``, ``name: value``, and JSON objects.

A line counts as a result when all metrics are in it that the search reads; then everything else in
it that looks like a metric goes along. So log lines may stand between results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from tunemq_shared.base.undecodable import NO_JSON
from tunemq_shared.protocol.conditions import lookup

_NUMBER: Final = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
#: Names may be quoted, so that dicts which Python prints are understood as well.
_PAIR: Final = re.compile(
    rf"""(?<![\w./:@-])['"]?([^\W\d][\w./-]*)['"]?\s*[=:]\s*({_NUMBER})(?!\w|\.\d)""", re.IGNORECASE
)
_WHOLE: Final = re.compile(r"[-+]?\d{1,18}")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Of a longer line the beginning is dropped.
_LONGEST: Final = 1 << 20
#: How many names of other metrics are kept for an error message.
_SEEN: Final = 20


class LineSplitter:
    """Makes lines of pieces of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, piece: bytes) -> list[bytes]:
        """The lines that are complete now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = self._rest[-_LONGEST // 2 :]
        return lines

    def last(self) -> list[bytes]:
        """What stands behind the last line's end, as a line."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class MetricLines:
    """Finds results among lines.

    Args:
        expected: the metrics of which each result has all.
        pattern: a regular expression with named groups, instead of pairs and JSON.
    """

    def __init__(self, expected: Iterable[str], pattern: str | None = None) -> None:
        self._expected = tuple(expected)
        self._pattern = re.compile(pattern) if pattern is not None else None
        # A look at the bytes spares most log lines the rest; with a pattern the name need not be
        # there.
        leaves = (name.rpartition("/")[2] for name in self._expected)
        self._marks = [leaf.encode() for leaf in leaves if leaf.isascii()] if not pattern else []
        #: Names of metrics on lines that were no results.
        self.seen: dict[str, None] = {}

    def result_in(self, line: bytes) -> dict[str, Any] | None:
        """The metrics of a line, if it is a result."""
        if not self._expected or not all(mark in line for mark in self._marks):
            self._note(line)
            return None
        text = visible(line)
        found = metrics_in(text) if self._pattern is None else self._matched(text)
        if all(lookup(found, name) is not None for name in self._expected):
            return found
        self._remember(found)
        return None

    def _matched(self, text: str) -> dict[str, Any]:
        match = self._pattern.search(text) if self._pattern is not None else None
        groups = match.groupdict() if match is not None else {}
        return {name: as_value(found) for name, found in groups.items() if found is not None}

    def _note(self, line: bytes) -> None:
        if len(self.seen) < _SEEN and len(line) < _LONGEST // 64 and (b"=" in line or b":" in line):
            self._remember(metrics_in(visible(line)))

    def _remember(self, found: dict[str, Any]) -> None:
        for name in list(found)[: _SEEN - len(self.seen)]:
            self.seen[name] = None


def visible(line: bytes) -> str:
    """What a terminal would show of a line: what stands behind the last return, without colours."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = shown.decode("utf-8", "replace")
    return (_COLOURS.sub("", text) if "\x1b" in text else text).strip()


def metrics_in(text: str) -> dict[str, Any]:
    """The object, if the line is one in JSON; else the numbers that have a name."""
    if text.startswith("{") and text.endswith("}"):
        try:
            found = json.loads(text)
        except NO_JSON:
            pass  # a dict as Python prints it, say
        else:
            if isinstance(found, dict):
                return found
    return {name: as_value(number) for name, number in _PAIR.findall(text)}


def as_value(text: str) -> int | float | str:
    """A number, if the text is one."""
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
