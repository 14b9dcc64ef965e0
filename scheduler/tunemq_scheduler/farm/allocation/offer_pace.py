"""`OfferPace`: limits offers to an experiment by how fast it uses them."""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_scheduler.core.shared_amounts import OfferUsage

#: An experiment that starts a trial in a slot within this time gets all that it wants.
_QUICK_S: Final = 2.0
_TOLERANCE: Final = 1e-6


class OfferPace:
    """Prevents a slow search algorithm from blocking slots that others need.

    An experiment may want ten slots but start no trial until its algorithm suggests a
    configuration, which is user code and may take any time. So it gets one slot, and more at once
    only after it has used the last one quickly.
    """

    def __init__(self) -> None:
        self._is_quick = False
        self._offered: dict[str, dict[str, float]] = {}
        #: By node instance, since when a slot has been empty.
        self._idle_since: dict[str, float] = {}

    def offered(self, instance_id: str, resources: dict[str, float], now: float) -> None:
        """Record an offer of a node."""
        before = self._offered.get(instance_id, {})
        self._offered[instance_id] = resources
        if _is_more(resources, before):
            self._idle_since.setdefault(instance_id, now)

    def forget(self, instance_id: str) -> None:
        """Forget a dead node instance."""
        self._offered.pop(instance_id, None)
        self._idle_since.pop(instance_id, None)

    def heard(self, usage: OfferUsage, now: float) -> OfferUsage:
        """Return a report in which the demands are limited to what it may get now."""
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
