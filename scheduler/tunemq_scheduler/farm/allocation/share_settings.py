"""`FairShareSettings`: how a farm is shared."""

from __future__ import annotations

import msgspec


class FairShareSettings(msgspec.Struct, frozen=True):
    """The settings for sharing a farm.

    Attributes:
        shares: weights of owners; the default is 1.
        quotas: the most that an owner's experiments hold together: amounts by resource.
        preempts: whether trials are preempted for higher priorities, and for owners that are behind
            their share. Otherwise slots change hands as trials end.
        preempt_grace_s: how long a preempted trial gets to save; seconds.
    """

    shares: dict[str, float] = {}
    quotas: dict[str, dict[str, float]] = {}
    preempts: bool = True
    preempt_grace_s: float = 60.0
