"""`CheckpointGarbageCollector`: removes from the store what is kept no longer, beside the loop.

Removing takes its time and may fail; neither is ever the search's trouble. Each removal may be done
twice, and they may be done in any order: a key that was condemned is never referred to again.
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

#: An order to remove something.
Removal = c.DeleteCheckpoint | c.DeleteObjects

#: The pause after a failure; it doubles with each further one, up to the longest.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
#: How often somebody who waits looks whether that is still wanted.
_POLL_INTERVAL_S: Final = 0.05
#: How long a removal that is being carried out may hold up the end.
_LAST_S: Final = 0.5


class CheckpointGarbageCollector:
    """Carries out removals in a thread of its own, which the first one starts.

    **Threads.** All methods are called by the thread that runs the loop, and none waits for the
    store but `finish`.

    **Failures** are told as `notices`, once until all is removed; what failed is tried again.

    Args:
        store: whose checkpoints they are; closed by whoever opened it.
        check: called before each removal; raises `RunSuperseded` where another run has the store,
            whose checkpoints are not this run's to remove.
        first_pause_s: seconds after the first failure.
    """

    def __init__(
        self,
        store: CheckpointStore,
        check: Callable[[], None] = lambda: None,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._store, self._check = store, check
        self._first_pause_s = first_pause_s
        self._changed = threading.Condition()
        self._orders: deque[Removal] = deque()
        self._notices: list[str] = []
        self._pause_s = 0.0
        #: How many orders were carried out.
        self._removed = 0
        self._has_told = False
        self._is_ending = False
        self._in_haste = False
        self._thread: threading.Thread | None = None

    def discard(self, removal: Removal) -> None:
        """Have something removed some time."""
        with self._changed:
            self._orders.append(removal)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="store watchdog", daemon=True)
            self._thread.start()

    def notices(self) -> list[str]:
        """What happened since the last call that a person should know."""
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
        """Wait until all is removed, and end; returns the keys of what is left.

        Args:
            within: seconds at most.
            is_enough: asked now and then; where it says yes, nothing is waited for any longer.
            without_success: seconds at most in which nothing is removed; None: as ``within``.
        """
        deadline = time.monotonic() + within
        timeout_s = within if without_success is None else without_success
        with self._changed:
            self._in_haste = True  # whatever waits before its next try is tried now
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
        """The next order, which stays in the list until it is carried out; None at the end."""
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
                    "What is kept no longer cannot be removed from the store, which is tried "
                    f"again: {error}"
                )
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or self._first_pause_s)
            # One that can never be carried out must not keep the others waiting.
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
