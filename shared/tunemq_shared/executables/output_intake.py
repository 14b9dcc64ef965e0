"""Takes in what a program says, beside the thread that reports it.

A thread reads, so that the program never waits for its checkpoint to be kept before it may print,
and so that a checkpoint is taken in the moment in which its result is printed. Findings wait in a
queue for who runs the trial; when that is full, the program waits.
"""

from __future__ import annotations

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

#: Between two looks at a file.
_POLL_INTERVAL_S: Final = 0.1
_WAITING: Final = 256
_CHUNK: Final = 65536


class ProgramResult(NamedTuple):
    """A result, its checkpoint if there is one, and the call that waits for it to be taken."""

    metrics: dict[str, Any]
    checkpoint: str | None
    call: ReportCall | None = None


class ResultSources(NamedTuple):
    """Where results come from.

    ``lines`` is None where those of stdout do not count.
    """

    lines: MetricLines | None
    file: FollowedFile | None
    listener: socket.socket
    inbox: CheckpointInbox
    expected: tuple[str, ...]


class ProgramResultReader:
    """Reads a program's stdout, its file and its calls until it has ended.

    Args:
        stdout: what it prints; copied to this process's stdout.
        ended: readable when it has ended.
        sources: where results come from.
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
        """The next result; None when there will be none.

        Raises:
            queue.Empty: none has come in time.
            TuneError: what came cannot be used.
        """
        found = self._findings.get(timeout=timeout_s)
        if isinstance(found, Exception):
            raise found
        return found

    def discard(self) -> None:
        """Go on reading, so that the program can print while it ends, but keep no results."""
        self._is_over.set()
        while True:
            try:
                found = self._findings.get_nowait()
            except queue.Empty:
                return
            if isinstance(found, ProgramResult) and found.call is not None:
                found.call.close()

    def join(self) -> None:
        """Wait until all is read; the program has ended."""
        self._thread.join()
        self.discard()

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_to_the_end()
        except Exception as problem:  # noqa: BLE001  `next` raises it where the trial is run
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
        # What it has started may hold the pipe open, so its end is not waited for.
        while self._read_stdout():
            continue
        for line in self._splitter.last():
            self._take_line(line)
        self._look_at_file(is_last=True)

    def _read_stdout(self) -> bytes | None:
        """Take in what there is on stdout; nothing at its end, None where nothing is there yet."""
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
    """Print what the program has printed; a full disk loses it, as it does a trial's own."""
    rest = memoryview(piece)
    with suppress(OSError):
        while rest:
            rest = rest[os.write(1, rest) :]
