"""Adds the end of what a trial printed to the news of its failure (`last_output`).

The node adds it, not the host: of most that matters here hosts do not live to tell, and what their
children print they do not see.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from msgspec.structs import replace

from tunemq_shared.protocol.messages import (
    SlotFreed,
    TrialFailed,
    TrialProcessDied,
    TrialSpec,
    TrialStarted,
    decode_node_event,
    encode,
)
from tunemq_workers.logs.last_output import as_text, read_last
from tunemq_workers.logs.log_watch import BEGINS, FAILS, tag_of
from tunemq_workers.runtime.checkpoint_interfaces import Emit
from tunemq_workers.runtime.trial_process_interfaces import AttemptId

#: How long the loop waits for a disk: no longer than for a page that was written a moment ago. It
#: waits no longer for many together, as when a forkserver dies, in so much time.
TIMEOUT_S: Final = 0.25
PERIOD_S: Final = 5.0
_MATTERS: Final = frozenset({BEGINS, *FAILS, b"freed"})

_Printed: TypeAlias = tuple[int, int]
_Read: TypeAlias = Callable[[str, _Printed], dict[str, bytes]]


class FailureOutput:
    """Passes on what is said of hosts. Owned by the node's loop.

    Args:
        emit: takes (events stream, encoded event).
        read: see `read_last`.
    """

    def __init__(self, emit: Emit, read: _Read = read_last) -> None:
        #: Says which trials have hosts.
        self.running_trials: Callable[[], Iterable[tuple[AttemptId, TrialSpec]]] = tuple
        self._emit, self._read = emit, read
        self._printed: dict[tuple[str, AttemptId], _Printed] = {}
        self._orders: queue.SimpleQueue[tuple[str, _Printed] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: What was asked and not answered in time: the disk hangs.
        self._owed = 0
        #: How long the loop has waited since when, by the monotonic clock.
        self._waited_s, self._since = 0.0, -math.inf

    def close(self) -> None:
        """Nothing more is to be read."""
        self._orders.put(None)

    def emit(self, events_key: str, event: bytes) -> None:
        """Take what a host, or the node about one, has said."""
        tag = tag_of(event)
        if tag in _MATTERS:
            event = self._heard(events_key, event)
        self._emit(events_key, event)

    def _heard(self, events_key: str, event: bytes) -> bytes:
        match said := decode_node_event(event):
            case TrialStarted(trial, attempt):
                self._printed[events_key, (trial, attempt)] = said.printed
            case SlotFreed(trial, attempt):
                self._printed.pop((events_key, (trial, attempt)), None)
            case TrialFailed(trial, attempt) | TrialProcessDied(trial, attempt):
                key = trial, attempt
                starts = [start for one, start in self.running_trials() if one == key]
                folder = next((one.folder for one in starts if one.events_key == events_key), None)
                if folder is not None:
                    printed = self._printed.get((events_key, key), (0, 0))
                    return encode(replace(said, output=self._output(folder, printed)))
            case _:
                pass
        return event

    def _output(self, folder: str, printed: _Printed) -> str:
        """The end of the output; nothing where the disk does not answer."""
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
