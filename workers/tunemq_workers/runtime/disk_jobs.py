"""`DiskJobs`: runs slow disk jobs of a node in threads, one for each place."""

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

#: A job that takes longer, with those before it at its place, is late.
_LATE_S: Final = 30.0
#: Seconds until a thread is tried again that the system refused.
_RETRY_S: Final = 1.0

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class _Place:
    """The jobs at one place, and the thread that runs them one after another."""

    def __init__(self) -> None:
        #: When each job that is not done was queued.
        self.queued: deque[float] = deque()
        self.is_late = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system refuses another thread.
        """
        threading.Thread(target=self._work, name="disk jobs", daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        self.queued.append(time.monotonic())
        self._jobs.put(job)

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class DiskJobs:
    """Run disk jobs in threads; the reactor gets their results.

    Jobs at one place, such as a search's cache, run one after another. Jobs at other places do not
    wait for them: a trial can make files that take long to look at.
    """

    def __init__(self, reactor: Reactor) -> None:
        #: Takes a warning when jobs are late, once at each place until they are not.
        self.on_late: Callable[[str], object] = do_nothing
        self._reactor = reactor
        #: The places that have jobs.
        self._places: dict[str, _Place] = {}
        self._is_watched = False

    def run(
        self,
        place: str,
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
            self._reactor.post(partial(self._done, place, call))

        if place not in self._places:
            self._places[place] = _Place()
            self._start(place)
        self._places[place].put(perform)
        if not self._is_watched:
            self._is_watched = True
            self._reactor.after(_LATE_S, self._look)

    def _start(self, place: str) -> None:
        try:
            self._places[place].start()
        except RuntimeError as problem:  # a trial may have used up the processes of a container
            _log.warning("disk.no_thread place=%s problem=%r", place, str(problem))
            self._reactor.after(_RETRY_S, partial(self._start, place))

    def _done(self, place: str, call: Callable[[], object]) -> None:
        jobs = self._places[place]
        jobs.queued.popleft()
        call()
        if not jobs.queued:
            jobs.end()
            del self._places[place]

    def _look(self) -> None:
        for place, jobs in self._places.items():
            was_late = jobs.is_late
            jobs.is_late = time.monotonic() - jobs.queued[0] >= _LATE_S
            if jobs.is_late and not was_late:
                _log.warning("disk.late place=%s jobs=%d", place, len(jobs.queued))
                self.on_late(
                    f"The disk jobs of this node at {place} take longer than {_LATE_S:g} s, and"
                    " trials wait for them: its disk is slow, or a trial makes very many files."
                )
        self._is_watched = bool(self._places)
        if self._is_watched:
            self._reactor.after(_LATE_S, self._look)


def _log_failure(problem: OSError) -> None:
    _log.error("cache.disk_failed problem=%r", str(problem))
