"""`LeaseWatch`: finds nodes that did not renew their lease while the scheduler polled. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_shared.broker.redis_keys import LEASE_PERIOD_S, LEASE_TTL_S

#: The most that counts between two polls; the loop may be late by a period or two.
_LONGEST_GAP_S: Final = 3 * LEASE_PERIOD_S
#: If many nodes fall silent at once, the network is the cause; then no node is lost for this long.
_NETWORK_OUTAGE_S: Final = 30.0
_NETWORK_SHARE: Final = 1 / 3
#: A node that was silent for this part of a lease, when another's lease expires, counts as silent
#: together with it.
_WITH_IT: Final = 1 / 2


class LeaseWatch:
    """Counts each watched node's silence.

    This compares no clocks of other machines, and a missing key proves nothing (Redis may have been
    wiped or suspended): a node is silent while its lease does not change between two polls. A late
    poll restarts the count, because the whole system may have been suspended. If the next poll is
    late, too, the count continues: then the loop is slow, and would otherwise never lose a node. A
    lost node is *away*: its lease is still compared, but its silence is not counted.
    """

    def __init__(self) -> None:
        self._seen: dict[str, bytes | None] = {}
        self._silence_s: dict[str, float] = {}
        self._away: set[str] = set()
        self._looked_at: float | None = None
        self._was_late = False
        self._network_outage_until = float("-inf")

    def watch(self, instance_id: str, value: bytes | None) -> None:
        """Watch a node whose lease has this value, or count a node that was away again."""
        self._seen[instance_id] = value
        self._silence_s[instance_id] = 0.0
        self._away.discard(instance_id)

    def put_away(self, instance_id: str) -> None:
        """Mark a node as lost: still compare its lease, but stop counting its silence."""
        self._seen.setdefault(instance_id, None)
        self._silence_s.pop(instance_id, None)
        self._away.add(instance_id)

    def forget(self, instance_id: str) -> None:
        """Stop watching a node."""
        self._seen.pop(instance_id, None)
        self._silence_s.pop(instance_id, None)
        self._away.discard(instance_id)

    def silence_s(self, instance_id: str) -> float:
        """Return for how many seconds a watched node has been silent; 0 for any other."""
        return self._silence_s.get(instance_id, 0.0)

    def start_anew(self) -> None:
        """Reset all counts, after an outage or a reset of the transport."""
        self._looked_at = None
        self._silence_s = dict.fromkeys(self._silence_s, 0.0)

    def look(self, now: float, values: Mapping[str, bytes | None]) -> tuple[list[str], list[str]]:
        """Compare the leases with those of the last poll, at ``now`` of a monotonic clock.

        Returns:
            The nodes that renewed their leases, and those that are lost.
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
