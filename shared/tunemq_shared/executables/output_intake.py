"""`ProgramResultReader`: reads a program's results in its own thread.

So the program can print while its checkpoint is saved, and a checkpoint is taken at the moment when
its result is printed. Results wait in a queue for the thread that runs the trial; when the queue is
full, the program waits.
"""

from __future__ import annotations

import fcntl
import os
import queue
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any, Final, NamedTuple

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.executables.checkpoint_inbox import CheckpointInbox
from tunemq_shared.executables.followed_file import FollowedFile
from tunemq_shared.executables.metric_lines import LineSplitter, MetricLines
from tunemq_shared.executables.report_line import ReportCall
from tunemq_shared.protocol.conditions import lookup

#: Seconds between two reads of a file.
_POLL_INTERVAL_S: Final = 0.1
_WAITING: Final = 256
_CHUNK: Final = 65536


class ProgramResult(NamedTuple):
    """A result, the folder of its checkpoint, and the ``tunemq report`` call that waits for it."""

    metrics: dict[str, Any]
    checkpoint: str | None
    call: ReportCall | None = None


class ResultSources(NamedTuple):
    """The sources of a program's results.

    ``lines`` is None if lines of stdout are not results.
    """

    lines: MetricLines | None
    file: FollowedFile | None
    listener: socket.socket
    inbox: CheckpointInbox
    expected: tuple[str, ...]


class ProgramResultReader:
    """Reads a program's stdout, its file and its ``tunemq report`` calls until it ends.

    Args:
        stdout: Descriptor of its output; copied to this process's stdout.
        ended: Descriptor that becomes readable when it ends.
        sources: The sources of results.
    """

    def __init__(self, stdout: int, ended: int, sources: ResultSources) -> None:
        self._stdout, self._ended, self._sources = stdout, ended, sources
        self._splitter = LineSplitter()
        self._printed_results = self._called = False
        self._findings: queue.Queue[ProgramResult | Exception | None] = queue.Queue(_WAITING)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tunemq-intake", daemon=True)
        os.set_blocking(stdout, False)
        self._thread.start()

    def next(self, timeout_s: float) -> ProgramResult | None:
        """Wait for the next result; None when the program has ended.

        Raises:
            queue.Empty: There was no result within ``timeout_s`` seconds.
            TuneError: The program's output or call is invalid.
        """
        found = self._findings.get(timeout=timeout_s)
        if isinstance(found, Exception):
            raise found
        return found

    def discard(self) -> None:
        """Keep reading, so that the program can print while it ends, but drop results."""
        self._is_over.set()
        while True:
            try:
                found = self._findings.get_nowait()
            except queue.Empty:
                return
            if isinstance(found, ProgramResult) and found.call is not None:
                found.call.close()

    def join(self) -> None:
        """Wait until all output is read; the program must have ended."""
        self._thread.join()
        self.discard()

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_to_the_end()
        except Exception as problem:  # noqa: BLE001  `next` raises it in the trial's thread
            self._put(problem)
        self._put(None)

    def _read_to_the_end(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in (self._stdout, self._ended, self._sources.listener):
                selector.register(source, selectors.EVENT_READ)
            timeout_s = _POLL_INTERVAL_S if self._sources.file is not None else None
            while True:
                ready = {key.fileobj for key, _ in selector.select(timeout_s)}
                if self._stdout in ready and self._read_stdout() == b"":
                    selector.unregister(self._stdout)
                self._look_at_file()
                if self._sources.listener in ready:
                    self._take_call()
                if self._ended in ready:
                    break
        # A child of the program may hold the pipe open and print on, so end of file is not awaited.
        left = fcntl.fcntl(self._stdout, fcntl.F_GETPIPE_SZ)
        while left > 0 and (piece := self._read_stdout()):
            left -= len(piece)
        for line in self._splitter.last():
            self._take_line(line)
        self._look_at_file(is_last=True)

    def _read_stdout(self) -> bytes | None:
        """Read what stdout has now; b"" at its end, None if there is nothing yet."""
        try:
            piece = os.read(self._stdout, _CHUNK)
        except BlockingIOError:
            return None
        _copy(piece)
        for line in self._splitter.split(piece):
            self._take_line(line)
        return piece

    def _take_line(self, line: bytes) -> None:
        lines = self._sources.lines
        metrics = lines.result_in(line) if lines is not None and not self._called else None
        if metrics is not None:
            self._printed_results = True
            self._put(ProgramResult(metrics, self._sources.inbox.take()))

    def _look_at_file(self, *, is_last: bool = False) -> None:
        if self._sources.file is None:
            return
        for metrics in self._sources.file.new_objects(is_last=is_last):
            if all(lookup(metrics, name) is not None for name in self._sources.expected):
                self._printed_results = True
                self._put(ProgramResult(metrics, self._sources.inbox.take()))

    def _take_call(self) -> None:
        line, _ = self._sources.listener.accept()
        call = ReportCall.read(line)
        if call is None:
            return
        if self._printed_results:
            problem = TrainableError(
                f"the program gives its results twice: `tunemq report` was called, and "
                f"{'a file' if self._sources.file is not None else 'printed lines'} had results "
                f"before. Say which count: with metrics_from='report' (--metrics-from report) only "
                "those that are reported do."
            )
            call.answer(str(problem))
            raise problem
        self._called = True
        inbox = self._sources.inbox
        taken = inbox.take_named(call.checkpoint) if call.checkpoint else inbox.take()
        self._put(ProgramResult(call.metrics, taken, call))

    def _put(self, found: ProgramResult | Exception | None) -> None:
        while not self._is_over.is_set():
            try:
                self._findings.put(found, timeout=_POLL_INTERVAL_S)
                return
            except queue.Full:
                continue
        if isinstance(found, ProgramResult) and found.call is not None:
            found.call.close()


def _copy(piece: bytes) -> None:
    """Print the program's output; a full disk loses it, as it does a Python trial's."""
    rest = memoryview(piece)
    with suppress(OSError):
        while rest:
            rest = rest[os.write(1, rest) :]
