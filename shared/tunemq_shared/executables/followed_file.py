"""`FollowedFile`: a file of JSON lines, read while a program writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tunemq_shared.base.errors import MetricError
from tunemq_shared.base.undecodable import NO_JSON
from tunemq_shared.executables.metric_lines import LineSplitter


class FollowedFile:
    """The JSON objects in a file, as a program appends them.

    An existing file, from an earlier attempt, is renamed, so that nothing is read twice.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._splitter = LineSplitter()
        self._offset = self._lines = 0
        self._put_aside()

    def _put_aside(self) -> None:
        number = 1
        while os.path.lexists(f"{self._path}.{number}"):
            number += 1
        with suppress(FileNotFoundError):
            os.rename(self._path, f"{self._path}.{number}")

    def new_objects(self, *, is_last: bool = False) -> Iterator[dict[str, Any]]:
        """Read the objects since the last call; with ``is_last`` also a line without its line end.

        Raises:
            MetricError: A line is not a JSON object.
        """
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # the program truncated it
                    self._offset = self._lines = 0
                    self._splitter.last()
                file.seek(self._offset)
                piece = file.read()
        except FileNotFoundError:
            return
        self._offset += len(piece)
        lines = self._splitter.split(piece)
        for line in [*lines, *(self._splitter.last() if is_last else [])]:
            self._lines += 1
            if line.strip():
                yield self._read(line)

    def _read(self, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except NO_JSON as error:
            raise self._unusable(line, str(error)) from error
        if not isinstance(found, dict):
            raise self._unusable(line, "it is no object")
        return found

    def _unusable(self, line: bytes, reason: str) -> MetricError:
        return MetricError(
            f"{self._path}, line {self._lines}: {line[:200].decode('utf-8', 'replace')!r} cannot be"
            f' read ({reason}); each line has to be a JSON object such as {{"loss": 0.3}}.'
        )
