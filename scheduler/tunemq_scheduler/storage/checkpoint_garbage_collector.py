"""`CheckpointGarbageCollector`: deletes expired checkpoints from the store in a thread.

Deletions may be slow or fail; neither affects the search. Each deletion may be repeated, and their
order does not matter: no new reference to a condemned key appears.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from tunemq_scheduler.core import commands as c
from tunemq_shared.base.errors import RunSuperseded, StoreError
from tunemq_shared.checkpoints.store import CheckpointStore

#: A command to delete something.
Removal = c.DeleteCheckpoint | c.DeleteObjects

#: Seconds to pause after the first failure, and at most; each further failure doubles it.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
#: Seconds between checks whether to continue waiting.
_POLL_INTERVAL_S: Final = 0.05
#: Seconds for which a deletion in progress may delay the end.
_LAST_S: Final = 0.5


class CheckpointGarbageCollector:
    """Executes deletions in its own thread, which the first one starts.

    **Threads.** The thread of the loop calls all methods, and only `finish` waits for the store.

    **Failures** produce one notice until everything is deleted; failed deletions are retried.

    Args:
        store: the store with the checkpoints; the caller closes it.
        check: called before each deletion; raises `RunSuperseded` if another run has the store,
            whose checkpoints this run must not delete.
    """

    def __init__(
        self,
        store: CheckpointStore,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._check = store, check
        self._changed = threading.Condition()
        self._orders: deque[Removal] = deque()
        self._notices: list[str] = []
        self._pause_s = 0.0
        #: The number of executed deletions.
        self._removed = 0
        self._has_told = False
        self._is_ending = False
        self._in_haste = False
        self._thread: threading.Thread | None = None

    def discard(self, removal: Removal) -> None:
        """Queue a deletion."""
        with self._changed:
            self._orders.append(removal)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="store watchdog", daemon=True)
            self._thread.start()

    def notices(self) -> list[str]:
        """Return the new notices for the user."""
        with self._changed:
            notices, self._notices = self._notices, []
        return notices

    def finish(
        self,
        within: float,
        is_enough: Callable[[], bool] = lambda: False,
        *,
        without_success: float | None = None,
    ) -> list[str]:
        """Wait for all deletions, then end; return the keys that remain.

        Args:
            within: the most seconds to wait.
            is_enough: checked now and then; True ends the waiting.
            without_success: the most seconds to wait while nothing is deleted; None: as ``within``.
        """
        deadline = time.monotonic() + within
        timeout_s = within if without_success is None else without_success
        with self._changed:
            self._in_haste = True  # pending retries start now
            self._changed.notify_all()
            removed, due = self._removed, time.monotonic() + timeout_s
            while self._orders and time.monotonic() < min(deadline, due) and not is_enough():
                self._changed.wait(_POLL_INTERVAL_S)
                if self._removed != removed:
                    removed, due = self._removed, time.monotonic() + timeout_s
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_S)
        with self._changed:
            return [_name(removal) for removal in self._orders]

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (removal := self._next()) is not None:
            try:
                self._check()
                self._carry_out(removal)
            except RunSuperseded:
                with self._changed:
                    self._orders.clear()
            except StoreError as error:
                self._failed(removal, error)
            else:
                self._succeeded(removal)

    def _next(self) -> Removal | None:
        """Return the next deletion, which stays queued until it is done; None at the end."""
        with self._changed:
            if self._pause_s:
                pause = self._pause_s * random.uniform(0.5, 1.0)
                self._changed.wait_for(lambda: self._is_ending or self._in_haste, pause)
                self._in_haste = False
            self._changed.wait_for(lambda: self._is_ending or self._orders)
            return None if self._is_ending else self._orders[0]

    def _carry_out(self, removal: Removal) -> None:
        if isinstance(removal, c.DeleteCheckpoint):
            self._store.delete_checkpoint(removal.key, removal.keep)
        else:
            self._store.delete_objects(removal.keys)

    def _failed(self, removal: Removal, error: StoreError) -> None:
        with self._changed:
            if not self._has_told:
                self._has_told = True
                self._notices.append(
                    f"Deleting expired checkpoints from the store failed; retrying: {error}"
                )
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
            # A deletion that always fails must not block the others.
            self._orders.remove(removal)
            self._orders.append(removal)

    def _succeeded(self, removal: Removal) -> None:
        with self._changed:
            self._pause_s = 0.0
            self._removed += 1
            self._orders.remove(removal)
            self._has_told = self._has_told and bool(self._orders)
            self._changed.notify_all()


def _name(removal: Removal) -> str:
    return removal.key if isinstance(removal, c.DeleteCheckpoint) else ", ".join(removal.keys)
