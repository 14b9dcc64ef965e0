"""`FailureOutput`: add the end of a trial's output to the event of its failure.

The node adds it, because a trial process that dies cannot, and does not see its children's output.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from msgspec.structs import replace

from tunemq_shared.protocol import messages
from tunemq_workers.logs.last_output import as_text, read_last
from tunemq_workers.logs.log_watch import BEGINS, FAILS, tag_of
from tunemq_workers.runtime.trial_process_state import AttemptId, Emit

#: Seconds that the loop may wait for a disk in each `PERIOD_S`: enough for a recently written page.
#: A forkserver's death, which fails many trials at once, must not block the loop for longer.
TIMEOUT_S: Final = 0.25
PERIOD_S: Final = 5.0
_MATTERS: Final = frozenset({BEGINS, *FAILS, b"freed"})

_Printed: TypeAlias = tuple[int, int]
_Read: TypeAlias = Callable[[str, _Printed], dict[str, bytes]]


class FailureOutput:
    """Pass events on, and add the output to failures. Owned by the node's loop.

    Args:
        emit: takes (events stream, encoded event).
        read: returns the end of a trial's output; see `read_last`.
    """

    def __init__(self, emit: Emit, read: _Read = read_last) -> None:
        #: Returns the trials that have a trial process.
        self.running_trials: Callable[[], Iterable[tuple[AttemptId, messages.TrialSpec]]] = tuple
        self._emit, self._read = emit, read
        self._printed: dict[tuple[str, AttemptId], _Printed] = {}
        self._orders: queue.SimpleQueue[tuple[str, _Printed] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Number of requests that were not answered in time: the disk hangs.
        self._owed = 0
        #: Seconds that the loop has waited in this period, and the period's start (monotonic).
        self._waited_s, self._since = 0.0, -math.inf

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)

    def emit(self, events_key: str, event: bytes) -> None:
        """Pass on an event of a trial process, or of the node about one."""
        tag = tag_of(event)
        if tag in _MATTERS:
            event = self._heard(events_key, event)
        self._emit(events_key, event)

    def _heard(self, events_key: str, event: bytes) -> bytes:
        match said := messages.decode_node_event(event):
            case messages.TrialStarted(trial, attempt):
                self._printed[events_key, (trial, attempt)] = said.printed
            case messages.SlotFreed(trial, attempt):
                self._printed.pop((events_key, (trial, attempt)), None)
            case messages.TrialFailed(trial, attempt) | messages.TrialProcessDied(trial, attempt):
                key = trial, attempt
                starts = [start for one, start in self.running_trials() if one == key]
                folder = next((one.folder for one in starts if one.events_key == events_key), None)
                if folder is not None:
                    printed = self._printed.get((events_key, key), (0, 0))
                    return messages.encode(replace(said, output=self._output(folder, printed)))
            case _:
                pass
        return event

    def _output(self, folder: str, printed: _Printed) -> str:
        """Return the end of the output; "" if the disk does not answer in time."""
        while self._owed and not self._answers.empty():
            self._answers.get()
            self._owed -= 1
        began = time.monotonic()
        if began >= self._since + PERIOD_S:
            self._waited_s, self._since = 0.0, began
        if self._owed or self._waited_s >= TIMEOUT_S:
            return ""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="last words", daemon=True)
            self._thread.start()
        self._orders.put((folder, printed))
        try:
            return self._answers.get(timeout=TIMEOUT_S - self._waited_s)
        except queue.Empty:
            self._owed += 1
            return ""
        finally:
            self._waited_s += time.monotonic() - began

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._answers.put(as_text(self._read(*order)))
