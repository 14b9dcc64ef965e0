"""`OfferPace`: how fast an experiment makes use of what it is offered, and what it gets of that."""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_scheduler.core.allotments import OfferUsage

#: Who begins a trial in a slot within so long gets all that it wants.
_QUICK_S: Final = 2.0
_TOLERANCE: Final = 1e-6


class OfferPace:
    """Keeps a search algorithm that thinks for a minute from keeping slots from others.

    An experiment says that it wants ten slots, and begins no trial in them until its algorithm has
    said what to try: that is its own code, and may take as long as it likes. So it gets one slot,
    and more at once only after it has made use of the last one soon.
    """

    def __init__(self) -> None:
        self._is_quick = False
        self._offered: dict[str, dict[str, float]] = {}
        #: By attempt, since when there is room for a trial and none in it.
        self._idle_since: dict[str, float] = {}

    def offered(self, instance_id: str, resources: dict[str, float], now: float) -> None:
        """It was offered so much of a node."""
        before = self._offered.get(instance_id, {})
        self._offered[instance_id] = resources
        if _is_more(resources, before):
            self._idle_since.setdefault(instance_id, now)

    def forget(self, instance_id: str) -> None:
        """This one is dead."""
        self._offered.pop(instance_id, None)
        self._idle_since.pop(instance_id, None)

    def heard(self, usage: OfferUsage, now: float) -> OfferUsage:
        """What it says, with what it is to get now for what it wants."""
        for instance_id, resources in self._offered.items():
            held = usage.held.get(instance_id)
            if _is_more(resources, {} if held is None else held.resources):
                self._idle_since.setdefault(instance_id, now)
            elif instance_id in self._idle_since:
                self._is_quick = now - self._idle_since.pop(instance_id) <= _QUICK_S
        if self._is_quick:
            return usage
        wants = (msgspec.structs.replace(one, count=min(one.count, 1)) for one in usage.wants)
        return msgspec.structs.replace(usage, wants=tuple(wants))


def _is_more(one: dict[str, float], other: dict[str, float]) -> bool:
    return any(amount > other.get(name, 0.0) + _TOLERANCE for name, amount in one.items())
