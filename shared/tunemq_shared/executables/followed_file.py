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

_CHUNK: Final = 2**20
#: How many bytes at each end of what was read are compared at each look.
_COMPARED: Final = 4096


class FollowedFile:
    """The JSON objects in a file, as a program appends them.

    An existing file, from an earlier attempt, is renamed, so that nothing is read twice. A program
    may write all lines anew each time: those that were read before are skipped. Or the file has one
    line, and the next result replaces it. What an earlier attempt wrote is not compared: equal
    lines, or equal numbers in them, may be new results. An object is complete when it can be read,
    as ``json.dump`` writes no line end.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._splitter = LineSplitter()
        self._offset = self._lines = self._inode = 0
        #: The first and the last bytes that were read: other ones mean that it is written anew.
        self._head = self._tail = b""
        #: The hashes of the lines that were read, in their order.
        self._read_before: list[int] = []
        self._put_aside()

    def _put_aside(self) -> None:
        number = 1
        while os.path.lexists(f"{self._path}.{number}"):
            number += 1
        with suppress(FileNotFoundError):
            os.rename(self._path, f"{self._path}.{number}")

    def new_objects(self, *, is_last: bool = False) -> Iterator[dict[str, Any]]:
        """Read the objects since the last call; with ``is_last`` the rest has to be one, too.

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
            if self._is_written_anew(file.fileno(), status):
                self._offset = self._lines = 0
                self._head = self._tail = b""
                self._splitter.last()
            self._inode = status.st_ino
            file.seek(self._offset)
            while self._offset < status.st_size and (piece := file.read(_CHUNK)):
                self._offset += len(piece)
                self._head = self._head or piece[:_COMPARED]
                self._tail = (self._tail + piece)[-_COMPARED:]
                yield from self._objects(self._splitter.split(piece))
        if is_last or _is_object(self._splitter.rest):
            yield from self._objects(self._splitter.last())

    def _is_written_anew(self, descriptor: int, status: os.stat_result) -> bool:
        if status.st_ino != self._inode or status.st_size < self._offset:
            return self._offset > 0
        tail_at = self._offset - len(self._tail)
        return (
            os.pread(descriptor, len(self._head), 0) != self._head
            or os.pread(descriptor, len(self._tail), tail_at) != self._tail
        )

    def _objects(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for line in filter(None, map(bytes.strip, lines)):
            place, found = self._lines, hash(line)
            self._lines += 1
            if place < len(self._read_before):
                if self._read_before[place] == found:
                    continue
                if len(self._read_before) > 1:
                    raise MetricError(
                        f"{self._path}, line {place + 1} is another one than was read before:"
                        " append lines, or write earlier ones again as they were; or replace the"
                        " result in a file of one line."
                    )
                self._read_before.clear()
            self._read_before.append(found)
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


def _is_object(text: bytes) -> bool:
    """Whether it is a whole JSON object: no more text makes it another one."""
    if not text.rstrip().endswith(b"}"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except NO_JSON:
        return False
