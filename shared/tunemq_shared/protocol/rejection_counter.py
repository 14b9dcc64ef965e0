"""`RejectionCounter`: counts rejected messages by reason, and reports some of them to people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: The same text is reported once in this many seconds, and at most _LINES texts per kind and
#: reason: an attacker may send thousands of messages.
TOLD_EVERY_S: Final = 60.0
_LINES: Final = 5

#: Reasons that also occur on a farm of honest machines, which resend what may be lost.
OFTEN_HONEST: Final = frozenset({"dead_node", "unknown_node", "old_term", "repeated"})


class RejectionCount(NamedTuple):
    """How many messages of a kind were rejected for one reason.

    ``kind``: request, registration, deregistration, events, lease, node_metrics, output, command,
    reply or challenge; or key, with the reason ``wrong_type``: a key in Redis has another type than
    the farm's. ``reason``: as in `tunemq_shared.signing.message_signing.InvalidSignature`, else
    ``oversized``, ``unreadable``, ``version`` (of another version of TuneMQ), ``instance`` (for
    another node), ``dead_node``, ``unknown_node``, ``old_term`` or ``repeated`` (`OFTEN_HONEST` has
    these four), ``early`` (dated in the future), or ``unanswered`` (a lease that does not repeat
    the scheduler's challenge).
    """

    kind: str
    reason: str
    times: int


@dataclass(slots=True)
class _Tally:
    """The rejected messages of one kind and reason.

    ``untold``: unreported texts with their counts; ``told``: reported texts with their times.
    """

    count: int = 0
    untold: dict[str, int] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)

    def is_due(self, text: str) -> bool:
        """Whether to report this text now."""
        return text not in self.told and len(self.told) < _LINES


class RejectionCounter:
    """Counts rejected messages; thread-safe.

    Args:
        now: A monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def add(self, kind: str, reason: str, text: str = "") -> None:
        """Count one rejected message.

        Args:
            kind: See `RejectionCount`; one of a fixed set, never taken from the message.
            reason: Likewise.
            text: A sentence for people; empty to only count the message.
        """
        with self._lock:
            tally = self._tallies.setdefault((kind, reason), _Tally())
            tally.count += 1
            if text and (text in tally.untold or len(tally.untold) < _LINES):
                tally.untold[text] = tally.untold.get(text, 0) + 1

    def counts(self) -> tuple[RejectionCount, ...]:
        """All counts since the process began, by kind and reason."""
        with self._lock:
            return tuple(
                RejectionCount(kind, reason, tally.count)
                for (kind, reason), tally in sorted(self._tallies.items())
            )

    def notices(self) -> list[str]:
        """Take the lines that people should read now."""
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
