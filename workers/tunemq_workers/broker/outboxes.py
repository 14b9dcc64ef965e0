"""A node's outboxes: one for each experiment with events, each sent independently.

One experiment's stream never delays another's: each has at most one group of batches in flight, so
the publisher serves all in turn, and each has its own pause after a failure. Of a finished
experiment only the number of its last event is kept, because numbering continues for as long as the
node lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.broker.redis_keys import EVERYTHING
from tunemq_workers.broker.outbox import MemoryBudget, Outbox
from tunemq_workers.broker.publisher_messages import AppendBatches, ForgetStream, PublisherOrder
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel

#: Seconds after which a missing and unused stream counts as that of a finished experiment.
MISSING_S: Final = 5.0
#: Batches of one experiment that may be in flight.
_PIPELINED: Final = 4
_RETRY_S: Final = (0.05, 1.0)

_log = logging.getLogger(__name__)


class _Stream(msgspec.Struct, eq=False):
    """An experiment's outbox and the state of its sending."""

    outbox: Outbox
    #: Number of the first event in flight.
    sending: int | None = None
    failures: int = 0
    retry: Timer | None = None

    def may_retry(self) -> None:
        """End the pause after a failure."""
        cancel(self.retry)
        self.retry = None


class Outboxes:
    """The events of one node instance, by the key of their stream.

    Args:
        budget: memory and disk budget that all outboxes share.
        timers: schedules retries.
        order: passes orders to the event publisher.
        header: returns the header of a batch, given the number of its first event.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        timers: Reactor,
        *,
        order: Callable[[PublisherOrder], None],
        header: Callable[[int], bytes],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_last = False
        #: The streams that have an outbox.
        self.keys: tuple[str, ...] = ()
        self._budget, self._timers, self._now = budget, timers, now
        self._order, self._header = order, header
        self._streams: dict[str, _Stream] = {}
        #: The last event number of each stream whose outbox was forgotten.
        self._last: dict[str, int] = {}
        #: Since when streams do not exist, by the clock.
        self._missing_since: dict[str, float] = {}

    @property
    def full(self) -> frozenset[str]:
        """The streams whose outboxes should take only events that cannot wait."""
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
    def left(self) -> int:
        """Bytes that were not sent."""
        return sum(stream.outbox.left for stream in self._streams.values())

    @property
    def is_settled(self) -> bool:
        """Whether all events are sent that can be: some streams may not exist."""
        return all(
            key in self._missing_since or (one.sending is None and not one.outbox.has_unsent)
            for key, one in self._streams.items()
        )

    @property
    def lost(self) -> set[str]:
        """The streams that have been missing for `MISSING_S`, as those of finished experiments."""
        until = self._now() - MISSING_S
        return {key for key, since in self._missing_since.items() if since <= until}

    def add(self, key: str, event: bytes) -> None:
        """Append an encoded event for the stream ``key``."""
        stream = self._streams.get(key)
        if stream is None:
            outbox = Outbox(self._budget, self._last.pop(key, 0))
            if self._is_last:
                outbox.raise_limit()
            stream = self._streams[key] = _Stream(outbox)
            self.keys = tuple(self._streams)
        stream.outbox.add(event)

    def send_last(self) -> None:
        """Send from now on what the scheduler may read after this node has ended."""
        self._is_last = True
        for stream in self._streams.values():
            stream.outbox.raise_limit()

    def send(self, generation: bytes) -> None:
        """Pass the next batches of each stream that has none in flight to the publisher."""
        for key, stream in self._streams.items():
            if stream.sending is not None or stream.retry is not None:
                continue
            batches = stream.outbox.take(_PIPELINED)
            if batches:
                stream.sending = batches[0].first
                pieces = tuple((self._header(batch.first), batch.payload) for batch in batches)
                self._order(AppendBatches(key, generation, pieces))

    def appended(self, key: str) -> None:
        """Note that the batches in flight are in the stream."""
        stream = self._streams[key]
        stream.sending, stream.failures = None, 0

    def not_appended(self, key: str, reason: str) -> None:
        """Send the batches in flight again after a pause, because they may not be in the stream."""
        stream = self._streams[key]
        if stream.sending is not None:
            stream.outbox.rewind(stream.sending)
        stream.sending = None
        delay_s = backoff_s(stream.failures, *_RETRY_S)
        stream.failures += 1
        if stream.failures == 1:
            _log.warning("redis.not_appended stream=%s reason=%r", key, reason)
        stream.may_retry()
        stream.retry = self._timers.after(delay_s, stream.may_retry)

    def rewind(self) -> None:
        """Send all events that are not journalled again, after Redis lost its data."""
        for stream in self._streams.values():
            stream.outbox.rewind()
            stream.may_retry()
        self._missing_since.clear()

    def acknowledge(
        self, acknowledged_up_to: Mapping[str, int], missing: Collection[str]
    ) -> str | None:
        """Drop the events that are journalled, by stream, and note which streams do not exist.

        Returns:
            A stream in which the scheduler has journalled more events than this node has: another
            process with the worker's keys has sent some in its name. None if there is none.
        """
        now = self._now()
        self._missing_since = {key: self._missing_since.get(key, now) for key in missing}
        for key, number in acknowledged_up_to.items():
            if (stream := self._streams.get(key)) is not None:
                stream.outbox.acknowledge(number)
        return next(
            (
                key
                for key, number in acknowledged_up_to.items()
                if key in self._streams and self._streams[key].outbox.last < number < EVERYTHING
            ),
            None,
        )

    def forget_all_but(self, used: Collection[str]) -> None:
        """Forget finished experiments.

        An experiment has finished if it is not in ``used`` and either all its events are journalled
        or its stream is among `lost`.
        """
        lost = self.lost
        for key, stream in list(self._streams.items()):
            outbox = stream.outbox
            if key in used or stream.sending is not None or not (outbox.is_empty or key in lost):
                continue
            if not outbox.is_empty:
                _log.warning("outbox.dropped stream=%s last=%d", key, outbox.last)
            stream.may_retry()
            outbox.close()
            self._last[key] = outbox.last
            del self._streams[key]
            self._order(ForgetStream(key))
        self.keys = tuple(self._streams)
