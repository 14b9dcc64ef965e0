"""`OutputStreamer`: sends what trials print to the scheduler while they run.

Once per second it reads the new part of each output file and hands it to the event publisher. It
reads nothing while the publisher is still sending the last part. If a file grows faster than that,
the older text is skipped; the files have all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

from tunemq_shared.protocol.output_chunks import OutputChunk, encode
from tunemq_shared.system.plain_files import open_to_read
from tunemq_workers.broker.publisher_messages import SendOutput
from tunemq_workers.logs.output_files import STDERR, STDOUT
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor

PERIOD_S: Final = 1.0
#: The most bytes of one file that are sent at once; older ones are skipped.
CHUNK_BYTES: Final = 16 * 2**10


class OutputSource(NamedTuple):
    """A trial that writes its output to files in this folder."""

    events_key: str
    trial: str
    attempt: int
    folder: str


class _ReadPosition(NamedTuple):
    """How far a file was read, and how often it was truncated before."""

    turn: int
    offset: int


class OutputStreamer:
    """Reads growing output files. Used by the node's loop only.

    Args:
        timers: for the next look.
        disk: reads files.
        send: hands output to the event publisher.
        may_send: returns whether the publisher has room for output.
        printing: returns the trials that print now.
    """

    def __init__(
        self,
        timers: Reactor,
        disk: DiskJobs,
        send: Callable[[SendOutput], None],
        may_send: Callable[[], bool],
        printing: Callable[[], Iterable[OutputSource]],
    ) -> None:
        self._timers, self._disk, self._send, self._may_send = timers, disk, send, may_send
        self._printing = printing
        #: By folder and file name.
        self._offsets: dict[tuple[str, str], _ReadPosition] = {}
        self._completed: list[OutputSource] = []
        self._is_under_way = False

    def start(self) -> None:
        """Look at all files now and once per second."""
        self._look()
        self._timers.after(PERIOD_S, self.start)

    def complete(self, printed: OutputSource) -> None:
        """Send the rest of a trial's output: its process has ended."""
        self._completed.append(printed)
        self._look()

    def forget(self, folder: str) -> None:
        """Forget a folder that is about to be removed."""
        for name in (STDOUT, STDERR):
            self._offsets.pop((folder, name), None)

    def sent(self) -> None:
        """Note that the publisher sent the last output, or gave it up."""
        self._is_under_way = False
        if self._completed:
            self._look()

    def _look(self) -> None:
        if self._is_under_way or not self._may_send():
            return
        due = list(dict.fromkeys([*self._printing(), *self._completed]))
        self._completed.clear()
        if due:
            self._is_under_way = True
            self._disk.run("output", partial(_read, due, dict(self._offsets)), self._read)

    def _read(self, chunks: list[tuple[str, str, OutputChunk]]) -> None:
        for folder, _, chunk in chunks:
            place = _ReadPosition(chunk.round, chunk.offset + len(chunk.data))
            self._offsets[folder, chunk.name] = place
        if chunks:
            self._send(SendOutput(tuple((key, encode(chunk)) for _, key, chunk in chunks)))
        else:
            self.sent()


def _read(
    due: list[OutputSource], offsets: dict[tuple[str, str], _ReadPosition]
) -> list[tuple[str, str, OutputChunk]]:
    """Return the new part of each file, with its folder and its experiment's stream."""
    found = []
    for key, trial, attempt, folder in due:
        for name in (STDOUT, STDERR):
            read = offsets.get((folder, name), _ReadPosition(0, 0))
            (turn, offset), data = _notices_of(os.path.join(folder, name), read)
            if data:
                short = os.path.basename(folder)
                chunk = OutputChunk(trial, attempt, short, name, offset, data, turn)
                found.append((folder, key, chunk))
    return found


def _notices_of(path: str, read: _ReadPosition) -> tuple[_ReadPosition, bytes]:
    turn, offset = read
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < offset:  # the file was truncated
                turn, offset = turn + 1, 0
            offset = max(offset, size - CHUNK_BYTES)
            return _ReadPosition(turn, offset), os.pread(file.fileno(), CHUNK_BYTES, offset)
    except OSError:  # no output yet, or not a plain file
        return read, b""
