"""`RejectionCounter`: how many messages were refused, why, and which of it people should read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: The same thing is told once in so many seconds, and of one kind and reason so many things:
#: whoever sends such messages may send thousands.
TOLD_EVERY_S: Final = 60.0
_LINES: Final = 5

#: Reasons that are found on a farm of honest machines, too: these send again what may be lost.
OFTEN_HONEST: Final = frozenset({"dead_node", "unknown_node", "old_term", "repeated"})


class RejectionCount(NamedTuple):
    """How many messages of a kind were refused for one reason.

    ``kind``: request, hello, deregistration, events, lease, vitals, output, mail, reply or
    challenge; or key, with the reason ``wrong_type``: a key in Redis that had another type than the
    farm's has. ``reason``: as `tunemq_shared.signing.message_signing.InvalidSignature` has it, else
    ``oversized``, ``unreadable``, ``version`` (of another version of TuneMQ), ``instance`` (for
    another node), ``dead_node``, ``unknown_node``, ``old_term`` or ``repeated``; of these four see
    `OFTEN_HONEST`. Or ``early``: of a time that has not come yet. Or ``unanswered``: a lease that
    does not repeat the scheduler's challenge.
    """

    kind: str
    reason: str
    times: int


@dataclass(slots=True)
class _Tally:
    """Those of one kind and reason.

    ``untold``: by what there is to tell, how often that was so; ``told``: when what was told.
    """

    count: int = 0
    untold: dict[str, int] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)

    def is_due(self, text: str) -> bool:
        """Whether people should read this now."""
        return text not in self.told and len(self.told) < _LINES


class RejectionCounter:
    """Counts refused messages; for all threads.

    Args:
        now: a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def add(self, kind: str, reason: str, text: str = "") -> None:
        """One more was refused.

        Args:
            kind, reason: see `RejectionCount`; of each there are a few, none is made from the
            message. text: a sentence for people; nothing where it is to be counted only.
        """
        with self._lock:
            tally = self._tallies.setdefault((kind, reason), _Tally())
            tally.count += 1
            if text and (text in tally.untold or len(tally.untold) < _LINES):
                tally.untold[text] = tally.untold.get(text, 0) + 1

    def counts(self) -> tuple[RejectionCount, ...]:
        """All that were refused since the process began, by kind and reason."""
        with self._lock:
            return tuple(
                RejectionCount(kind, reason, tally.count)
                for (kind, reason), tally in sorted(self._tallies.items())
            )

    def notices(self) -> list[str]:
        """What people should be told now."""
        with self._lock:
            now = self._now()
            return [line for tally in self._tallies.values() for line in _notices(tally, now)]


def _notices(tally: _Tally, now: float) -> list[str]:
    tally.told = {text: at for text, at in tally.told.items() if now < at + TOLD_EVERY_S}
    lines = []
    for text, times in list(tally.untold.items()):
        if tally.is_due(text):
            lines.append(f"{text} ({times} times)" if times > 1 else text)
            del tally.untold[text]
            tally.told[text] = now
    return lines
