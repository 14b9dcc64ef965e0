"""`WorkerHealth`: reports the health of a farm's node to its service manager.

A timer of the node's loop sends the reports, so they stop when the loop hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tunemq_shared.broker import redis_keys
from tunemq_shared.health.service_health import BEAT_S, ServiceHealth
from tunemq_workers.runtime.reactor import Reactor
from tunemq_workers.system.trial_user import own_files

_NEVER: Final = float("-inf")


class WorkerHealth:
    """Reports a node's health from its loop, if a service manager wants reports.

    Args:
        health: writes the reports.
        reactor: the node's loop.
    """

    def __init__(self, health: ServiceHealth, reactor: Reactor) -> None:
        self._health, self._reactor = health, reactor
        self._confirmed_at = _NEVER
        self._has_scheduler = self._is_stopping = False
        self._trial_processes: Callable[[], int] = lambda: 0

    def start(self, trial_processes: Callable[[], int]) -> None:
        """Start the reports; ``trial_processes`` returns how many trials run here."""
        self._trial_processes = trial_processes
        if self._health.is_wanted:
            self._beat()

    def confirmed(self, *, has_scheduler: bool) -> None:
        """Note that Redis confirmed the lease just now."""
        is_first = self._confirmed_at == _NEVER
        self._confirmed_at, self._has_scheduler = time.monotonic(), has_scheduler
        if is_first and self._health.is_wanted:
            self._say()  # a service manager waits for the first one

    def stopping(self) -> None:
        """Report that the node was asked to end and is ending."""
        self._is_stopping = True
        if self._health.is_wanted:
            self._health.stopping()
            self._say()

    def _beat(self) -> None:
        self._say()
        self._reactor.after(BEAT_S, self._beat)

    def _say(self) -> None:
        is_heard = time.monotonic() - self._confirmed_at < redis_keys.LEASE_TTL_S
        with own_files():
            self._health.beat(is_ready=is_heard, status=self._status(is_heard=is_heard))

    def _status(self, *, is_heard: bool) -> str:
        trials = f"trials: {self._trial_processes()}"
        if self._is_stopping:
            return trials
        if not is_heard:
            return f"Redis has not confirmed the lease; {trials}"
        return trials if self._has_scheduler else f"no scheduler is there; {trials}"
