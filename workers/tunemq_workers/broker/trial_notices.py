"""What the node itself says of the trials that it hosts, or cannot host, to their experiments."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from tunemq_shared.base.failure_text import shortened
from tunemq_shared.protocol.messages import (
    SlotFreed,
    TrialFailed,
    TrialPaused,
    TrialProcessDied,
    TrialWaits,
    encode,
)
from tunemq_workers.runtime.trial_process_interfaces import AttemptId, TrialProcess

#: Of a sentence; it may repeat what a trial's process said.
_LONGEST: Final = 4000

_log = logging.getLogger(__name__)


class TrialEvents:
    """Says it, in sentences of bounded length. Owned by the node's loop.

    Args:
        emit: takes (events stream, encoded event).
    """

    def __init__(self, emit: Callable[[str, bytes], object]) -> None:
        self._emit = emit

    def freed(self, key: AttemptId, events_key: str) -> None:
        """Its slot is free."""
        self._emit(events_key, encode(SlotFreed(*key)))

    def waits(self, key: AttemptId, events_key: str, what: str, reason: str) -> None:
        """Its host cannot start yet; without a reason, it does now."""
        waits = TrialWaits(*key, what if reason else "", shortened(reason, _LONGEST))
        self._emit(events_key, encode(waits))

    def not_started(
        self, key: AttemptId, events_key: str, reason: str, kind: str = "start"
    ) -> None:
        """Its host will not start."""
        _log.error("host.not_started trial=%s reason=%r", key[0], reason)
        error = shortened(f"The trial's process could not start: {reason}", _LONGEST)
        failed = TrialFailed(*key, kind, error, "", time.time())
        self._emit(events_key, encode(failed))

    def given_back(self, key: AttemptId, events_key: str, reason: str) -> None:
        """Its host will not start here, which is not its fault: it waits for another slot."""
        _log.warning("host.given_back trial=%s reason=%r", key[0], reason)
        self._emit(events_key, encode(TrialPaused(*key)))
        self.freed(key, events_key)

    def failed(
        self, process: TrialProcess, kind: str, reason: str, *, is_shared: bool = False
    ) -> None:
        """It failed by what it did; or its forkserver was lost, maybe by other trials."""
        failed = TrialFailed(
            *process.key, kind, shortened(reason, _LONGEST), "", time.time(), is_shared=is_shared
        )
        self._emit(process.start.events_key, encode(failed))

    def died(
        self, process: TrialProcess, signal: int | None, exit_code: int | None, cause: str
    ) -> None:
        """Its host ended without a word."""
        trial, attempt = process.key
        died = TrialProcessDied(trial, attempt, process.pid, signal, exit_code, time.time(), cause)
        self._emit(process.start.events_key, encode(died))
