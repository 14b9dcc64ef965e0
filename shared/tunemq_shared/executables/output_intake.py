"""`ProgramResultReader`: reads a program's results in its own thread.

So the program can print while its checkpoint is saved or the scheduler is away, and a checkpoint is
taken at the moment when its result is printed. Results wait for the thread that runs the trial. If
many wait, only the newest of them keeps its checkpoint; if very many do, the program waits.
"""

from __future__ import annotations

import fcntl
import math
import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final, NamedTuple

from tunemq_shared.base.errors import TrainableError
from tunemq_shared.checkpoints.checkpoint_markers import remove
from tunemq_shared.executables.checkpoint_inbox import CheckpointInbox
from tunemq_shared.executables.followed_file import FollowedFile
from tunemq_shared.executables.metric_lines import LineSplitter, MetricLines
from tunemq_shared.executables.report_socket import ReportCall
from tunemq_shared.protocol.result_conditions import lookup

#: Seconds between two looks at a file; fewer while it grows, so that each checkpoint is taken with
#: the result that it belongs to, and not with one of the next.
_LOOK_S: Final = 0.1
_LOOK_WHILE_IT_GROWS_S: Final = 0.01
#: Seconds for which a file counts as growing after a result.
_GROWS_S: Final = 1.0
#: How many results may wait with their checkpoints, and how many may wait at all.
_WAITING_WITH_FILES: Final = 64
_WAITING: Final = 20_000
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
        self._grew_at = math.inf  # the first result comes at any time
        self._changed = threading.Condition()
        self._findings: deque[ProgramResult | Exception | None] = deque()
        self._is_over = False
        #: Whether results were dropped, because very many were printed while the program ended.
        self.has_dropped = False
        self._thread = threading.Thread(target=self._run, name="tunemq-intake", daemon=True)
        os.set_blocking(stdout, False)
        self._thread.start()

    def next(self, timeout_s: float) -> ProgramResult | None:
        """Wait for the next result; None when the program has ended.

        Raises:
            queue.Empty: There was no result within ``timeout_s`` seconds.
            TuneError: The program's output or call is invalid.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._findings, timeout_s):
                raise queue.Empty
            found = self._findings.popleft()
            self._changed.notify_all()
        if isinstance(found, Exception):
            raise found
        return found

    def end_calls(self) -> None:
        """Answer no ``tunemq report`` call any more, so that the program can end."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            for found in self._findings:
                _close_call(found)

    def join(self) -> list[ProgramResult]:
        """Wait until all output is read, and return the printed results that were not taken.

        The program must have ended.
        """
        self._thread.join()
        left = [found for found in self._findings if isinstance(found, ProgramResult)]
        return [found for found in left if found.call is None]

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
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._next_look_s())}
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
        # The last line of a program that was killed may be cut off: `loss=1` of `loss=1127.9`.
        is_whole = self._has_succeeded()
        if is_whole:
            self._take_lines(self._splitter.last())
        self._look_at_file(is_last=is_whole)

    def _next_look_s(self) -> float | None:
        if self._sources.file is None:
            return None
        grows = time.monotonic() < self._grew_at + _GROWS_S
        return _LOOK_WHILE_IT_GROWS_S if grows else _LOOK_S

    def _has_succeeded(self) -> bool:
        status = os.waitid(os.P_PIDFD, self._ended, os.WEXITED | os.WNOWAIT)
        return status is not None and (status.si_code, status.si_status) == (os.CLD_EXITED, 0)

    def _read_stdout(self) -> bytes | None:
        """Read what stdout has now; b"" at its end, None if there is nothing yet."""
        try:
            piece = os.read(self._stdout, _CHUNK)
        except BlockingIOError:
            return None
        _copy(piece)
        self._take_lines(self._splitter.split(piece))
        return piece

    def _take_lines(self, lines: list[bytes]) -> None:
        source = self._sources.lines
        if source is not None and not self._called:
            found = map(source.result_in, lines)
            self._take_printed([metrics for metrics in found if metrics is not None])

    def _take_printed(self, results: list[dict[str, Any]]) -> None:
        """Take results that were printed one after another; the checkpoint is that of the last."""
        if not results:
            return
        self._printed_results = True
        taken = self._sources.inbox.take()
        for metrics in results[:-1]:
            self._put(ProgramResult(metrics, None))
        self._put(ProgramResult(results[-1], taken))

    def _look_at_file(self, *, is_last: bool = False) -> None:
        if self._sources.file is None:
            return
        found = self._sources.file.new_objects(is_last=is_last)
        results = [metrics for metrics in found if self._is_result(metrics)]
        if results:
            self._grew_at = time.monotonic()
        self._take_printed(results)

    def _is_result(self, metrics: dict[str, Any]) -> bool:
        return all(lookup(metrics, name) is not None for name in self._sources.expected)

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
        with self._changed:
            self._changed.wait_for(lambda: len(self._findings) < _WAITING or self._is_over)
            if self._is_over:
                _close_call(found)
                if len(self._findings) >= _WAITING:
                    self.has_dropped = True
                    return
            if isinstance(found, ProgramResult) and found.checkpoint is not None:
                self._spare_room()
            self._findings.append(found)
            self._changed.notify_all()

    def _spare_room(self) -> None:
        """Remove the checkpoint of a result that waits behind many others: a newer one follows."""
        for place in range(len(self._findings) - 1, _WAITING_WITH_FILES, -1):
            found = self._findings[place]
            if isinstance(found, ProgramResult) and found.checkpoint is not None:
                if self._sources.inbox.is_ours(found.checkpoint):
                    remove(found.checkpoint)
                self._findings[place] = found._replace(checkpoint=None)
                return


def _close_call(found: ProgramResult | Exception | None) -> None:
    if isinstance(found, ProgramResult) and found.call is not None:
        found.call.close()


def _copy(piece: bytes) -> None:
    """Print the program's output; a full disk loses it, as it does a Python trial's."""
    rest = memoryview(piece)
    with suppress(OSError):
        while rest:
            rest = rest[os.write(1, rest) :]
