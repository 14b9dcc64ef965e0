"""`OutputCaps`: keep the output files of a node's trials below a size while they are written."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Collection
from typing import Final

from tunemq_workers.logs import output_files
from tunemq_workers.runtime.reactor import Reactor

#: Seconds between two checks; in between a file may exceed its limit.
PERIOD_S: Final = 3.0

_log = logging.getLogger(__name__)


class OutputCaps:
    """Check the files periodically in a thread, because shortening one takes a while.

    Args:
        reactor: runs the timer.
        folders: returns the folders of the running trials; called by the loop.
        period_s: seconds between two checks.
        limit_bytes: size above which a file is cut to its newest half.
    """

    def __init__(
        self,
        reactor: Reactor,
        folders: Callable[[], Collection[str]],
        *,
        period_s: float = PERIOD_S,
        limit_bytes: int = output_files.LIMIT_BYTES,
    ) -> None:
        self._reactor, self._folders = reactor, folders
        self._period_s, self._limit_bytes = period_s, limit_bytes
        self._before: frozenset[str] = frozenset()
        self._orders: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="output caps", daemon=True)

    def start(self) -> None:
        """Check from now on, until the process ends."""
        self._thread.start()
        self._reactor.after(self._period_s, self._look)

    def look_at(self, folder: str) -> None:
        """Check a folder now, because its trial process ended before it could do so itself."""
        self._orders.put(frozenset({folder}))

    def _look(self) -> None:
        self._reactor.after(self._period_s, self._look)
        now = frozenset(self._folders())
        # Check once more after a process ended: its children may have printed much since the last
        # check.
        due, self._before = now | self._before, now
        if due and self._orders.empty():
            self._orders.put(due)

    def _run(self) -> None:
        while True:
            for folder in self._orders.get():
                for name in (output_files.STDOUT, output_files.STDERR):
                    self._cap(os.path.join(folder, name))

    def _cap(self, path: str) -> None:
        try:
            output_files.cap(path, self._limit_bytes)
        except FileNotFoundError:  # nothing was printed yet, or the file was removed
            return
        except OSError as problem:
            _log.warning("output.not_capped path=%s problem=%r", path, str(problem))
