"""`DiskJobs`: runs slow disk jobs of a node in a thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from tunemq_workers.runtime.reactor import Reactor, do_nothing

#: A job that takes longer, with those before it, is late.
_LATE_S: Final = 30.0

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class DiskJobs:
    """Run disk jobs one after another in a thread; the reactor gets their results.

    The thread starts with the first job.
    """

    def __init__(self, reactor: Reactor) -> None:
        #: Takes a warning when jobs are late, once until they are not.
        self.on_late: Callable[[str], object] = do_nothing
        self._reactor = reactor
        #: When each job that is not done was queued.
        self._queued: deque[float] = deque()
        self._is_watched = self._is_late = False
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="disk jobs", daemon=True)

    def run(
        self,
        job: Callable[[], _T],
        then: Callable[[_T], object],
        failed: Callable[[OSError], object] | None = None,
    ) -> None:
        """Queue ``job``; afterwards the reactor calls ``then`` with its result, or ``failed``."""

        def perform() -> None:
            try:
                result = job()
            except OSError as problem:
                call = partial(failed or _log_failure, problem)
            else:
                call = partial(then, result)
            self._reactor.post(partial(self._done, call))

        if not self._thread.is_alive():
            self._thread.start()
        self._queued.append(time.monotonic())
        self._jobs.put(perform)
        if not self._is_watched:
            self._is_watched = True
            self._reactor.after(_LATE_S, self._look)

    def _done(self, call: Callable[[], object]) -> None:
        self._queued.popleft()
        call()

    def _look(self) -> None:
        was_late = self._is_late
        self._is_late = bool(self._queued) and time.monotonic() - self._queued[0] >= _LATE_S
        if self._is_late and not was_late:
            _log.warning("disk.late jobs=%d", len(self._queued))
            self.on_late(
                f"The disk jobs of this node take longer than {_LATE_S:g} s, and its trials wait"
                " for them: its disk is slow, or a trial makes very many files."
            )
        self._is_watched = bool(self._queued)
        if self._is_watched:
            self._reactor.after(_LATE_S, self._look)

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def _log_failure(problem: OSError) -> None:
    _log.error("cache.disk_failed problem=%r", str(problem))
