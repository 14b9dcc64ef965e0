"""`LeaseWatch`: which nodes are silent for too long while we are looking. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_shared.broker.redis_keys import LEASE_PERIOD_S, LEASE_TTL_S

#: Between two looks no more than this counts as looking; the loop may be late by a period or two.
_LONGEST_GAP_S: Final = 3 * LEASE_PERIOD_S
#: When many fall silent at once it is the network: nobody is lost for so long.
_NETWORK_OUTAGE_S: Final = 30.0
_NETWORK_SHARE: Final = 1 / 3
#: Who has been silent for this part of a lease when another's lease runs out falls silent with it.
_WITH_IT: Final = 1 / 2


class LeaseWatch:
    """Counts each watched node's silence.

    No clock of another machine is compared, and a key that is gone proves nothing (Redis may have
    been wiped, or have slept): a node is silent while its lease does not change between two of our
    looks. A look that is late starts the count anew, for everything may have slept; one that is
    late again does not: then it is our loop that is slow, and would never lose anybody. A lost node
    is *away*: it is still listened for, and counts as nothing else.
    """

    def __init__(self) -> None:
        self._seen: dict[str, bytes | None] = {}
        self._silence_s: dict[str, float] = {}
        self._away: set[str] = set()
        self._looked_at: float | None = None
        self._was_late = False
        self._network_outage_until = float("-inf")

    def watch(self, instance_id: str, value: bytes | None) -> None:
        """Begin to watch a node, whose lease says ``value``; or have a node that was away back."""
        self._seen[instance_id] = value
        self._silence_s[instance_id] = 0.0
        self._away.discard(instance_id)

    def put_away(self, instance_id: str) -> None:
        """A node is lost: listen for it, and count its silence no longer."""
        self._seen.setdefault(instance_id, None)
        self._silence_s.pop(instance_id, None)
        self._away.add(instance_id)

    def forget(self, instance_id: str) -> None:
        """Watch a node no longer."""
        self._seen.pop(instance_id, None)
        self._silence_s.pop(instance_id, None)
        self._away.discard(instance_id)

    def silence_s(self, instance_id: str) -> float:
        """For how long we have looked and not heard a node that is watched; 0 of any other."""
        return self._silence_s.get(instance_id, 0.0)

    def start_anew(self) -> None:
        """We could not look, or the wire was reset: all that was counted is void."""
        self._looked_at = None
        self._silence_s = dict.fromkeys(self._silence_s, 0.0)

    def look(self, now: float, values: Mapping[str, bytes | None]) -> tuple[list[str], list[str]]:
        """Compare the leases with those of the last look, at ``now`` of a monotonic clock.

        Returns:
            The nodes that renewed, and those that are lost.
        """
        gap = now - self._looked_at if self._looked_at is not None else 0.0
        was_late, self._was_late = self._was_late, gap > _LONGEST_GAP_S
        if self._was_late:
            if not was_late:
                self.start_anew()
            gap = _LONGEST_GAP_S if was_late else 0.0
        self._looked_at = now
        renewed: list[str] = []
        for instance_id, last in self._seen.items():
            value = values.get(instance_id)
            if value is not None and value != last:
                renewed.append(instance_id)
                self._seen[instance_id] = value
                if instance_id not in self._away:
                    self._silence_s[instance_id] = 0.0
            elif instance_id not in self._away:
                self._silence_s[instance_id] += gap
        return renewed, self._lost(now)

    def _lost(self, now: float) -> list[str]:
        silent = [name for name, silence in self._silence_s.items() if silence > LEASE_TTL_S]
        if not silent:
            return []
        longest = max(self._silence_s.values())
        if longest <= LEASE_TTL_S + _NETWORK_OUTAGE_S and now >= self._network_outage_until:
            together = sum(one > LEASE_TTL_S * _WITH_IT for one in self._silence_s.values())
            if together > 1 and together > _NETWORK_SHARE * len(self._silence_s):
                self._network_outage_until = now + _NETWORK_OUTAGE_S
        return silent if now >= self._network_outage_until else []
