"""How a farm is shared."""

from __future__ import annotations

import msgspec


class FairShareSettings(msgspec.Struct, frozen=True):
    """What the farm's owner decides about sharing it.

    Attributes:
        shares: weights of owners; who is not named has 1.
        quotas: what an owner's experiments may hold at most, together: amounts by resource.
        preempts: trials have to give way to those of a higher priority, and to those of owners who
            are behind their share. Where they have not, slots change hands as trials end.
        preempt_grace_s: how long a trial that has to give way may take to save what it did.
    """

    shares: dict[str, float] = {}
    quotas: dict[str, dict[str, float]] = {}
    preempts: bool = True
    preempt_grace_s: float = 60.0
