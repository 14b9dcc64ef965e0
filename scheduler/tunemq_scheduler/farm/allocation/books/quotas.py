"""`OwnerQuotas`: the most that an owner's experiments hold together, over all priorities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from tunemq_scheduler.core.allotments import ResourceAmounts

_TOLERANCE: Final = 1e-6

_Sums = dict[str, dict[str, float]]


def take(left: dict[str, float], amounts: ResourceAmounts, times: int) -> int:
    """Subtract the amounts up to this many times, as often as they fit; return how often."""
    asked = {name: amounts.resources[name] for name in left if amounts.resources.get(name)}
    for name, amount in asked.items():
        times = max(0, min(times, int((left[name] + _TOLERANCE) / amount)))
    for name, amount in asked.items():
        left[name] -= times * amount
    return times


class OwnerQuotas:
    """Sums by owner, and their limits.

    Attributes:
        held: including ``leaving``, which is the part to release.
        claimed: the amount being cleared.
    """

    def __init__(self, quotas: Mapping[str, Mapping[str, float]]) -> None:
        self._quotas = quotas
        self.held: _Sums = {}
        self.leaving: _Sums = {}
        self.claimed: _Sums = {}

    def of(self, owner: str) -> Mapping[str, float]:
        """Return the most that an owner may have."""
        return self._quotas.get(owner, {})

    def add(self, sums: _Sums, owner: str, resources: Mapping[str, float], sign: int) -> None:
        """Add or subtract resources of an owner; only owners with a quota are counted."""
        if owner in self._quotas:
            mine = sums.setdefault(owner, {})
            for name, amount in resources.items():
                mine[name] = round(mine.get(name, 0.0) + sign * amount, 6)

    def hit(self, owner: str, amounts: ResourceAmounts) -> str:
        """Return the resource whose quota these amounts would exceed; empty if there is none."""
        return self._hit(owner, amounts, (self.held, self.claimed))

    def hit_when_clear(self, owner: str, amounts: ResourceAmounts) -> str:
        """Do the same for amounts that were being cleared for it."""
        return self._hit(owner, amounts, (self.held,))

    def hit_later(
        self, owner: str, amounts: ResourceAmounts, given: Iterable[ResourceAmounts] = ()
    ) -> str:
        """Do the same for the time after leaving slots are gone, and these were released, too."""
        return self._hit(owner, amounts, (self.held, self.claimed), (self.leaving,), given)

    def left(self, owner: str) -> dict[str, float]:
        """Return what an owner may still have of each resource with a quota."""
        used = self.held.get(owner, {}), self.claimed.get(owner, {})
        return {
            name: most - sum(one.get(name, 0.0) for one in used)
            for name, most in self.of(owner).items()
        }

    def _hit(
        self,
        owner: str,
        amounts: ResourceAmounts,
        used: Iterable[_Sums],
        freed: Iterable[_Sums] = (),
        given: Iterable[ResourceAmounts] = (),
    ) -> str:
        for name, most in self.of(owner).items():
            asked = amounts.resources.get(name, 0.0)
            sums = asked + sum(one.get(owner, {}).get(name, 0.0) for one in used)
            less = sum(one.get(owner, {}).get(name, 0.0) for one in freed)
            less += sum(one.resources.get(name, 0.0) for one in given)
            if asked and sums - less > most + _TOLERANCE:
                return name
        return ""
