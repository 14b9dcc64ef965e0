"""`FollowedFile`: a file of JSON lines, read while a program writes it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import MetricError
from tunemq_shared.executables.metric_lines import LineSplitter
from tunemq_shared.system.plain_files import open_to_read

_CHUNK: Final = 2**20


class FollowedFile:
    """The JSON objects in a file, as a program appends them.

    An existing file, from an earlier attempt, is renamed, so that nothing is read twice. A program
    may write all lines anew each time: those that were read before are skipped. So are, at the
    beginning, the lines of the renamed file, if all of the results before the checkpoint from which
    the trial continues are there.

    Args:
        path: of the file.
        results: the number of results before that checkpoint.
    """

    def __init__(self, path: str, results: int = 0) -> None:
        self._path = path
        self._splitter = LineSplitter()
        self._offset = self._lines = 0
        #: The hashes of the lines that were read, in their order.
        self._read_before: list[int] = []
        #: The first lines of an earlier attempt's file, and those of this file that equal them.
        self._earlier = _first_results(self._put_aside(), results)
        self._equal: list[bytes] = []

    def _put_aside(self) -> str:
        number = 1
        while os.path.lexists(f"{self._path}.{number}"):
            number += 1
        aside = f"{self._path}.{number}"
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return ""
        return aside

    def new_objects(self, *, is_last: bool = False) -> Iterator[dict[str, Any]]:
        """Read the objects since the last call; with ``is_last`` also a line without its line end.

        Raises:
            MetricError: A line is not a JSON object, or the file is not a regular one.
        """
        try:
            # O_NONBLOCK: a FIFO must not wait for its writer.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MetricError(f"{self._path} is not a regular file; write JSON lines to one.")
            if status.st_size < self._offset:  # the program truncated it
                self._offset = self._lines = 0
                self._equal.clear()
                self._splitter.last()
            file.seek(self._offset)
            while self._offset < status.st_size and (piece := file.read(_CHUNK)):
                self._offset += len(piece)
                yield from self._objects(self._splitter.split(piece))
        if is_last:
            yield from self._objects(self._splitter.last())
            self._earlier = []
            yield from self._objects(())

    def _objects(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for line in self._without_earlier(lines):
            place, found = self._lines, hash(line)
            self._lines += 1
            if place < len(self._read_before):
                if self._read_before[place] == found:
                    continue
                del self._read_before[place:]  # the file has other lines from here on
            self._read_before.append(found)
            if line.strip():
                yield self._read(line)

    def _without_earlier(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Leave out the earlier attempt's lines if the file begins with all of them."""
        for line in lines:
            place = len(self._equal)
            if place < len(self._earlier) and line == self._earlier[place]:
                self._equal.append(line)
                if place + 1 == len(self._earlier):
                    self._read_before = [hash(one) for one in self._equal]
                    self._lines, self._equal, self._earlier = len(self._equal), [], []
                continue
            yield from self._not_equal()
            yield line
        if not self._earlier:
            yield from self._not_equal()

    def _not_equal(self) -> Iterator[bytes]:
        """Return the lines that were held back; the file does not begin with all earlier ones."""
        held, self._equal, self._earlier = self._equal, [], []
        return iter(held)

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


def _first_results(path: str, results: int) -> list[bytes]:
    """Return the lines of a file up to this result; nothing if it has fewer results."""
    if not (path and results):
        return []
    found, lines = 0, []
    with suppress(OSError), open_to_read(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            lines.append(line.removesuffix(b"\n"))
            found += bool(line.strip())
            if found == results:
                return lines
    return []
