"""A node's outboxes: one for each experiment whose events it has, each sent by itself.

What happens to one experiment's stream holds up no other: each has at most one piece under way, so
the pump serves them in turn, and each waits by itself after a failure. An experiment that is over
is forgotten; of it only the number of its last event is kept, because numbers go on for as long as
the node lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from tunemq_shared.base.backoff import backoff_s
from tunemq_workers.broker.memory_budget import MemoryBudget
from tunemq_workers.broker.outbox import Outbox
from tunemq_workers.broker.publisher_messages import AppendBatches, ForgetStream, PublisherOrder
from tunemq_workers.runtime.checkpoint_interfaces import Timers
from tunemq_workers.runtime.reactor import Timer

#: A stream that nobody uses and that is missing for so long belonged to an experiment that is over.
MISSING_S: Final = 5.0
#: Batches under way at a time, of one experiment.
_PIPELINED: Final = 4
_RETRY_S: Final = (0.05, 1.0)

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Stream:
    """An experiment's events, and what became of the last attempts to send some."""

    outbox: Outbox
    #: The first event of what is under way.
    sending: int | None = None
    failures: int = 0
    retry: Timer | None = None
    missing_since: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether to wait for nothing: all is sent, or there is nowhere to send it to."""
        is_sent = self.sending is None and not self.outbox.has_unsent
        return is_sent or self.missing_since is not None

    def may_retry(self) -> None:
        """End the pause after a failure."""
        if self.retry is not None:
            self.retry.cancel()
        self.retry = None


class Outboxes:
    """The events of one node instance, by the key of the stream they are for.

    Args:
        room: what all share.
        timers: for pauses after failures.
        order: tells the pump what to do.
        header: makes the header of a batch from the number of its first event.
        now: a monotonic clock.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        timers: Timers,
        *,
        order: Callable[[PublisherOrder], None],
        header: Callable[[int], bytes],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        #: The streams for which there is an outbox.
        self.keys: tuple[str, ...] = ()
        self._budget, self._timers, self._now = budget, timers, now
        self._order, self._header = order, header
        self._streams: dict[str, _Stream] = {}
        #: Where numbering goes on, for experiments that were forgotten.
        self._last: dict[str, int] = {}

    @property
    def full(self) -> frozenset[str]:
        """The streams to which to add no more than has to be added."""
        is_full_for = self._budget.is_full_for
        return frozenset(key for key, one in self._streams.items() if is_full_for(one.outbox))

    @property
    def size(self) -> int:
        """Bytes that are not journalled yet."""
        return self._budget.size

    @property
    def unsent(self) -> int:
        """Bytes that could be sent now."""
        return sum(stream.outbox.unsent for stream in self._streams.values())

    @property
    def is_settled(self) -> bool:
        """Whether all is sent that can be."""
        return all(stream.is_settled for stream in self._streams.values())

    def add(self, key: str, event: bytes) -> None:
        """Append an encoded event for the stream ``key``."""
        stream = self._streams.get(key)
        if stream is None:
            outbox = Outbox(self._budget, self._last.pop(key, 0))
            stream = self._streams[key] = _Stream(outbox)
            self.keys = tuple(self._streams)
        stream.outbox.add(event)

    def send(self, generation: bytes) -> None:
        """Hand each stream's news to the pump, unless it has some of that stream already."""
        for key, stream in self._streams.items():
            if stream.sending is not None or stream.retry is not None:
                continue
            batches = stream.outbox.take(_PIPELINED)
            if batches:
                stream.sending = batches[0].first
                pieces = tuple((self._header(batch.first), batch.payload) for batch in batches)
                self._order(AppendBatches(key, generation, pieces))

    def appended(self, key: str) -> None:
        """What was under way is in the stream."""
        stream = self._streams[key]
        stream.sending, stream.failures = None, 0

    def not_appended(self, key: str, reason: str) -> None:
        """What was under way may not be in the stream: send it again after a pause."""
        stream = self._streams[key]
        if stream.sending is not None:
            stream.outbox.rewind(stream.sending)
        stream.sending = None
        delay_s = backoff_s(stream.failures, *_RETRY_S)
        stream.failures += 1
        if stream.failures == 1:
            _log.warning("wire.not_appended stream=%s reason=%r", key, reason)
        stream.may_retry()
        stream.retry = self._timers.after(delay_s, stream.may_retry)

    def rewind(self) -> None:
        """The wire was reset: send again whatever is not journalled."""
        for stream in self._streams.values():
            stream.outbox.rewind()
            stream.may_retry()
            stream.missing_since = None

    def acknowledge(self, acknowledged_up_to: Mapping[str, int], missing: Collection[str]) -> None:
        """Forget events that are journalled, by stream; ``missing`` streams do not exist now."""
        for key, number in acknowledged_up_to.items():
            if (stream := self._streams.get(key)) is None:
                continue
            stream.outbox.acknowledge(number)
            if key not in missing:
                stream.missing_since = None
            elif stream.missing_since is None:
                stream.missing_since = self._now()

    def forget_all_but(self, used: Collection[str]) -> None:
        """Forget experiments that are over.

        Those are not in ``used``, and all is journalled or there has been no stream for a while.
        """
        over = [
            key
            for key, stream in self._streams.items()
            if key not in used and stream.sending is None and self._is_over(stream)
        ]
        for key in over:
            self._forget(key, self._streams.pop(key))
        if over:
            self.keys = tuple(self._streams)

    def _is_over(self, stream: _Stream) -> bool:
        since = stream.missing_since
        return stream.outbox.is_empty or (since is not None and self._now() >= since + MISSING_S)

    def _forget(self, key: str, stream: _Stream) -> None:
        if not stream.outbox.is_empty:
            _log.warning("outbox.dropped stream=%s last=%d", key, stream.outbox.last)
        stream.may_retry()
        stream.outbox.close()
        self._last[key] = stream.outbox.last
        self._order(ForgetStream(key))
