"""Find metrics in a program's output: ``name=value``, ``name: value``, and JSON objects.

A line is a result if it has all metrics that the search reads; then its other metrics are reported
too. So log lines may stand between results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.protocol.result_conditions import lookup
from tunemq_shared.trial.results import DONE

#: Possessive, since going back over a long run of digits takes quadratic time.
_NUMBER: Final = (
    r"[-+]?(?:\d++(?:\.\d*+)?+(?:[eE][-+]?\d++)?+|\.\d++(?:[eE][-+]?\d++)?+|nan|inf(?:inity)?)"
)
#: Names may be quoted, so that printed Python dicts work too. In `1,234.5`, `0,3`, `3/10`
#: and `12:30` no number is read: the first one would be another than was meant.
_PAIR: Final = re.compile(
    rf"""(?<![\w./:@-])['"]?([^\W\d][\w./-]*)['"]?\s*[=:]\s*({_NUMBER})(?!\w|[.,:/']\d)""",
    re.IGNORECASE,
)
_WHOLE: Final = re.compile(r"[-+]?\d{1,18}")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: The beginning of a longer line is dropped.
_LONGEST: Final = 1 << 20
#: How many names of other metrics an error message shows.
_SEEN: Final = 20


class LineSplitter:
    """Splits a stream of bytes into lines."""

    def __init__(self) -> None:
        #: The bytes after the last line end.
        self.rest = b""

    def split(self, piece: bytes) -> list[bytes]:
        """Add bytes and return the lines that are complete now."""
        *lines, self.rest = (self.rest + piece).split(b"\n")
        if len(self.rest) > _LONGEST:
            self.rest = self.rest[-_LONGEST // 2 :]
        return lines

    def last(self) -> list[bytes]:
        """Return the bytes after the last line end as a line, if there are any."""
        rest, self.rest = self.rest, b""
        return [rest] if rest else []


class MetricLines:
    """Finds results among lines.

    Args:
        expected: The metrics that every result has.
        pattern: A regular expression with named groups, instead of pairs and JSON.
    """

    def __init__(self, expected: Iterable[str], pattern: str | None = None) -> None:
        self._expected = tuple(expected)
        self._pattern = re.compile(pattern) if pattern is not None else None
        # Searching the bytes first skips most log lines cheaply; with a pattern, a line need not
        # contain the metric's name.
        leaves = (name.rpartition("/")[2] for name in self._expected)
        self._marks = [leaf.encode() for leaf in leaves if leaf.isascii()] if not pattern else []
        #: Names of metrics on lines that were not results.
        self.seen: dict[str, None] = {}

    def result_in(self, line: bytes) -> dict[str, Any] | None:
        """The metrics of a line if it is a result, else None."""
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
    """The line as a terminal shows it: the part after the last carriage return, without colours."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = shown.decode("utf-8", "replace")
    return (_COLOURS.sub("", text) if "\x1b" in text else text).strip()


def metrics_in(text: str) -> dict[str, Any]:
    """The object if the line is JSON; else the numbers that have a name."""
    if text.startswith("{") and text.endswith("}"):
        try:
            found = json.loads(text)
        except NO_JSON:
            pass  # for instance a printed Python dict
        else:
            if isinstance(found, dict):
                return found
    found = {name: as_value(number) for name, number in _PAIR.findall(text)}
    found.pop(DONE, None)  # it would end the trial; `done=25%` is meant otherwise
    return found


def as_value(text: str) -> int | float | str:
    """Convert the text to a number if it is one; else return it."""
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
