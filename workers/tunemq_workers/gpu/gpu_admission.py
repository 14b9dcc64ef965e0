"""`GpuAdmission`: make trials wait until their GPUs are clear, and return those that cannot start.

The scheduler assigns a slot again as soon as its trial process is gone, although the GPU may need
longer to free its memory. If a device is withheld, the node returns the trial to the scheduler,
which places it elsewhere; this is no failure of the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import msgspec

from tunemq_shared.protocol.messages import TrialSpec
from tunemq_workers.broker.trial_notices import TrialEvents
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel
from tunemq_workers.runtime.trial_process_state import AttemptId

#: Seconds of waiting after which the node reports the wait.
_TIMEOUT_S: Final = 1.0
#: Seconds until a trial is returned. By then the scheduler knows that the device is withheld and
#: does not choose it again.
GIVE_BACK_AFTER_S: Final = 2.0


class _Waiting(msgspec.Struct, eq=False):
    start: TrialSpec
    telling: Timer
    giving_back: Timer | None = None
    is_told: bool = False


class GpuAdmission:
    """Delay starts of trial processes. Owned by the node's loop.

    Args:
        availability: the state of the devices.
        timers: schedules reports and returns.
        trial_events: reports why a trial waits, and that it is returned.
        given_back: takes an attempt that must not be started here any more.
    """

    def __init__(
        self,
        availability: GpuAvailability,
        timers: Reactor,
        trial_events: TrialEvents,
        given_back: Callable[[AttemptId], object],
    ) -> None:
        self._availability, self._timers, self._notices = availability, timers, trial_events
        self._given_back = given_back
        self._waiting: dict[AttemptId, _Waiting] = {}

    def is_withheld(self, start: TrialSpec) -> bool:
        """Return whether a device of the trial is withheld, also from parked processes."""
        obstacle = self._availability.obstacle(start.devices)
        return obstacle is not None and obstacle.is_withheld

    def is_shut(self, key: AttemptId, start: TrialSpec) -> bool:
        """Return whether a fork for the attempt must wait; if so, the caller asks again later."""
        self._availability.claim(start.devices)
        obstacle = self._availability.obstacle(start.devices)
        waiting = self._waiting.get(key)
        if obstacle is None:
            if waiting is not None:
                self._leave(key)
            return False
        if waiting is None:
            telling = self._timers.after(_TIMEOUT_S, partial(self._say_why, key))
            waiting = self._waiting[key] = _Waiting(start, telling)
        if obstacle.is_withheld and waiting.giving_back is None:
            give_back = partial(self._give_back, key)
            waiting.giving_back = self._timers.after(GIVE_BACK_AFTER_S, give_back)
        return True

    def forget_all_but(self, keys: Collection[AttemptId]) -> None:
        """Stop the waits of all other attempts."""
        for key in [key for key in self._waiting if key not in keys]:
            self._leave(key, is_over=True)

    def _say_why(self, key: AttemptId) -> None:
        waiting = self._waiting[key]
        obstacle = self._availability.obstacle(waiting.start.devices)
        if obstacle is not None:
            waiting.is_told = True
            self._notices.waits(key, waiting.start.events_key, "device", obstacle.reason)

    def _give_back(self, key: AttemptId) -> None:
        waiting = self._waiting[key]
        waiting.giving_back = None
        obstacle = self._availability.obstacle(waiting.start.devices)
        if obstacle is not None and obstacle.is_withheld:
            self._leave(key, is_over=True)
            self._notices.given_back(key, waiting.start.events_key, obstacle.reason)
            self._given_back(key)

    def _leave(self, key: AttemptId, *, is_over: bool = False) -> None:
        waiting = self._waiting.pop(key)
        waiting.telling.cancel()
        cancel(waiting.giving_back)
        if waiting.is_told and not is_over:
            self._notices.waits(key, waiting.start.events_key, "", "")
