"""`TrialEvents`: the events about trials that the node itself reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from tunemq_shared.base.failure_text import shortened
from tunemq_shared.protocol import messages
from tunemq_workers.runtime.trial_process_state import AttemptId, TrialProcess

#: Length limit, in characters, of a reason: it may repeat text of a trial process.
_LONGEST: Final = 4000

_log = logging.getLogger(__name__)


class TrialEvents:
    """Report trials' starts, waits and failures. Owned by the node's loop.

    Args:
        emit: takes (events stream, encoded event).
    """

    def __init__(self, emit: Callable[[str, bytes], object]) -> None:
        self._emit = emit

    def freed(self, key: AttemptId, events_key: str) -> None:
        """Report that an attempt's slot is free."""
        self._emit(events_key, messages.encode(messages.SlotFreed(*key)))

    def waits(self, key: AttemptId, events_key: str, what: str, reason: str) -> None:
        """Report why a trial process cannot start yet, or, with an empty reason, that it starts."""
        waits = messages.TrialWaits(*key, what if reason else "", shortened(reason, _LONGEST))
        self._emit(events_key, messages.encode(waits))

    def not_started(
        self,
        key: AttemptId,
        events_key: str,
        reason: str,
        kind: str = "start",
        *,
        is_shared: bool = False,
    ) -> None:
        """Report that the trial process could not start, as a failure of the trial.

        ``is_shared``: whether other trials may have caused that.
        """
        _log.error("trial.not_started trial=%s reason=%r", key[0], reason)
        error = shortened(f"The trial's process could not start: {reason}", _LONGEST)
        failed = messages.TrialFailed(*key, kind, error, "", time.time(), is_shared=is_shared)
        self._emit(events_key, messages.encode(failed))

    def given_back(self, key: AttemptId, events_key: str, reason: str) -> None:
        """Report that the attempt needs another slot, which is no failure of the trial."""
        _log.warning("trial.given_back trial=%s reason=%r", key[0], reason)
        self._emit(events_key, messages.encode(messages.TrialPaused(*key)))
        self.freed(key, events_key)

    def failed(
        self, process: TrialProcess, kind: str, reason: str, *, is_shared: bool = False
    ) -> None:
        """Report that the trial failed.

        Args:
            process: the trial process.
            kind: the kind of the failure.
            reason: for people.
            is_shared: whether other trials may have caused the failure of its forkserver.
        """
        failed = messages.TrialFailed(
            *process.key, kind, shortened(reason, _LONGEST), "", time.time(), is_shared=is_shared
        )
        self._emit(process.start.events_key, messages.encode(failed))

    def died(
        self, process: TrialProcess, signal: int | None, exit_code: int | None, cause: str
    ) -> None:
        """Report that the trial process ended without a final event."""
        trial, attempt = process.key
        died = messages.TrialProcessDied(
            trial, attempt, process.pid, signal, exit_code, time.time(), cause
        )
        self._emit(process.start.events_key, messages.encode(died))
