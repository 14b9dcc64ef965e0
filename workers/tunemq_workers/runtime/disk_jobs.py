"""`DiskJobs`: runs slow disk jobs of a node in a thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tunemq_workers.runtime.reactor import Reactor

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class DiskJobs:
    """Run disk jobs one after another in a thread; the reactor gets their results.

    The thread starts with the first job.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
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
                self._reactor.post(partial(failed or _log_failure, problem))
            else:
                self._reactor.post(partial(then, result))

        if not self._thread.is_alive():
            self._thread.start()
        self._jobs.put(perform)

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def _log_failure(problem: OSError) -> None:
    _log.error("cache.disk_failed problem=%r", str(problem))
