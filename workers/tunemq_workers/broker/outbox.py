"""An outbox: a node's events for one experiment, numbered and kept until they are journalled.

It is a log of events in blocks. A cursor marks the next event to hand out; it moves back when a
batch was not appended or Redis lost its data, so the node may send an event twice but never skips
one. An outbox stops handing out events while too many bytes are sent but not journalled, because
all experiments share Redis.

All outboxes of a node share a memory budget. When memory is used up, the outbox that holds most of
it moves its oldest block to disk. When the total limit is reached, too, experiments above their
fair share of it have to wait.
"""

from __future__ import annotations

import bisect
import logging
import struct
from typing import Final

import msgspec

from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.broker.redis_keys import (
    LAST_SENT_BYTES,
    OUTBOX_BYTES,
    OUTBOX_MEMORY_BYTES,
    SENT_BYTES,
)
from tunemq_workers.broker.outbox_spool import Spool, SpoolPosition

#: Bytes, and events, at which a block is closed, and with it a batch.
BLOCK_BYTES: Final = 256 * 2**10
BLOCK_EVENTS: Final = 2_000
#: Bytes that a block costs in addition to its events.
_BLOCK_OVERHEAD: Final = 256

_log = logging.getLogger(__name__)


class OutboxBatch(msgspec.Struct, frozen=True):
    """Consecutive events; ``events`` is the concatenation of their msgpack bytes."""

    first: int
    count: int
    events: bytes

    @property
    def payload(self) -> bytes:
        """The events as one msgpack array."""
        return _array_header(self.count) + self.events


class _Block(msgspec.Struct):
    first: int
    count: int
    size: int
    data: bytearray | None
    place: SpoolPosition | None = None

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def is_closed(self) -> bool:
        return self.data is None or self.size >= BLOCK_BYTES or self.count >= BLOCK_EVENTS


class _Cursor(msgspec.Struct):
    """The next event to hand out: number ``n``, at ``offset`` of block ``index``."""

    index: int
    offset: int
    n: int


class Outbox:
    """The events of one node instance for one stream. Not thread-safe: the loop owns it.

    Args:
        budget: shared by all outboxes; the new outbox registers with it.
        last: number of the last event before the first one here.
        sent_bytes: limit for bytes that are handed out and not journalled.
    """

    def __init__(
        self, budget: MemoryBudget, last: int = 0, *, sent_bytes: int = SENT_BYTES
    ) -> None:
        self.last = last
        #: Total bytes, and the part of them in memory that `spill` could move to disk.
        self.size = self.held = 0
        self._budget, self._sent_bytes = budget, sent_bytes
        self._blocks: list[_Block] = []
        self._spooled = 0  # number of blocks, from the oldest, that are on disk
        self._cursor = _Cursor(0, 0, last + 1)
        budget.enter(self)

    @property
    def is_empty(self) -> bool:
        """Whether all events are journalled."""
        return not self._blocks

    @property
    def has_unsent(self) -> bool:
        """Whether events are left to hand out, now or once more are journalled."""
        return self._cursor.n <= self.last

    @property
    def sent(self) -> int:
        """Bytes that are handed out and not journalled."""
        cursor = self._cursor
        return sum(block.size for block in self._blocks[: cursor.index]) + cursor.offset

    @property
    def unsent(self) -> int:
        """Bytes that `take` could hand out now."""
        if self.sent >= self._sent_bytes:
            return 0
        cursor = self._cursor
        return sum(block.size for block in self._blocks[cursor.index :]) - cursor.offset

    @property
    def left(self) -> int:
        """Bytes that are not handed out."""
        return sum(block.size for block in self._blocks) - self.sent

    def raise_limit(self) -> None:
        """Hand out more than usual, because the node ends and keeps nothing."""
        self._sent_bytes = LAST_SENT_BYTES

    def add(self, event: bytes) -> int:
        """Append an encoded event and return its number."""
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.is_closed:
            block = self._open_block()
        assert block.data is not None  # an open block is in memory
        block.data += event
        size = len(event)
        block.size += size
        block.count += 1
        self.size += size
        self.held += size
        self._budget.in_memory += size
        self._budget.size += size
        self.last += 1
        return self.last

    def take(self, max_batches: int) -> list[OutboxBatch]:
        """Hand out at most ``max_batches`` next batches, oldest first, within the limit.

        Raises:
            OSError: a block on disk cannot be read.
        """
        batches: list[OutboxBatch] = []
        cursor = self._cursor
        sent = self.sent
        while self.has_unsent and len(batches) < max_batches and sent < self._sent_bytes:
            block = self._blocks[cursor.index]
            if cursor.n <= block.last:
                events = self._bytes_of(block)[cursor.offset :]
                batches.append(OutboxBatch(cursor.n, block.last - cursor.n + 1, bytes(events)))
                sent += len(events)
            self._pass(block)
        return batches

    def rewind(self, n: int = 1) -> None:
        """Hand out event ``n`` and all later ones again, from the start of its block."""
        n = max(n, self._blocks[0].first if self._blocks else self.last + 1)
        if n >= self._cursor.n:
            return
        index = bisect.bisect_right(self._blocks, n, key=lambda block: block.first) - 1
        self._cursor = _Cursor(index, 0, self._blocks[index].first)

    def acknowledge(self, acknowledged_up_to: int) -> None:
        """Drop each block whose events all have numbers up to ``acknowledged_up_to``."""
        freed = 0
        while freed < len(self._blocks) and self._blocks[freed].last <= acknowledged_up_to:
            freed += 1
        if not freed:
            return
        failpoint("events.before_release")
        for block in self._blocks[:freed]:
            self._forget(block)
        del self._blocks[:freed]
        self._spooled = max(0, self._spooled - freed)
        cursor = self._cursor
        if cursor.index >= freed:
            cursor.index -= freed
        else:
            first = self._blocks[0].first if self._blocks else self.last + 1
            self._cursor = _Cursor(0, 0, first)
        failpoint("events.after_release")

    def spill(self) -> None:
        """Move the oldest block that is in memory to disk.

        Raises:
            OSError: the disk is full or broken; the block stays in memory.
        """
        block = self._blocks[self._spooled]
        assert block.data is not None  # blocks after the spooled ones are in memory
        failpoint("events.before_spill")
        block.place = self._budget.spool.write(block.data)
        failpoint("events.after_spill")
        block.data = None
        self.held -= block.size
        self._budget.in_memory -= block.size
        self._spooled += 1

    def close(self) -> None:
        """Drop all events and leave the budget."""
        self.acknowledge(self.last)
        self._budget.leave(self)

    def _open_block(self) -> _Block:
        self._budget.make_space()
        block = _Block(self.last + 1, 0, 0, bytearray())
        self._blocks.append(block)
        self.size += _BLOCK_OVERHEAD
        self._budget.in_memory += _BLOCK_OVERHEAD
        self._budget.size += _BLOCK_OVERHEAD
        return block

    def _pass(self, block: _Block) -> None:
        """Move the cursor past ``block``, and into the next block if there is one."""
        cursor = self._cursor
        cursor.n, cursor.offset = block.last + 1, block.size
        if cursor.index + 1 < len(self._blocks):
            cursor.index, cursor.offset = cursor.index + 1, 0

    def _bytes_of(self, block: _Block) -> bytes | bytearray:
        if block.data is not None:
            return block.data
        assert block.place is not None  # a block is in memory or on disk
        return self._budget.spool.read(block.place)

    def _forget(self, block: _Block) -> None:
        budget = self._budget
        self.size -= block.size + _BLOCK_OVERHEAD
        budget.size -= block.size + _BLOCK_OVERHEAD
        budget.in_memory -= _BLOCK_OVERHEAD
        if block.place is not None:
            budget.spool.free(block.place)
        else:
            self.held -= block.size
            budget.in_memory -= block.size


class MemoryBudget:
    """Count the bytes that outboxes hold. Not thread-safe: the node's loop owns it.

    Args:
        spool: takes blocks that exceed ``memory_bytes``.
        memory_bytes: limit for memory, not counting the block that each outbox is filling.
        limit_bytes: total in bytes from which on `is_full_for` reports outboxes as full; they
            still keep events that are added.
    """

    def __init__(
        self,
        spool: Spool,
        *,
        memory_bytes: int = OUTBOX_MEMORY_BYTES,
        limit_bytes: int = OUTBOX_BYTES,
    ) -> None:
        self.spool = spool
        #: Total bytes, and the part of them in memory.
        self.size = 0
        self.in_memory = 0
        self._memory_bytes, self._limit_bytes = memory_bytes, limit_bytes
        self._outboxes: list[Outbox] = []
        self._disk_failed = False

    def is_full_for(self, outbox: Outbox) -> bool:
        """Return whether an outbox should take only events that cannot wait.

        Where the budget is used up, an outbox below its fair share may still grow to that share.
        """
        count = len(self._outboxes)
        if self.size >= self._limit_bytes and outbox.size * count >= self._limit_bytes:
            return True
        over_memory = self.in_memory > self._memory_bytes + BLOCK_BYTES
        return self._disk_failed and over_memory and outbox.held * count >= self._memory_bytes

    def enter(self, outbox: Outbox) -> None:
        """Register an outbox."""
        self._outboxes.append(outbox)

    def leave(self, outbox: Outbox) -> None:
        """Remove an outbox that is empty and stays so."""
        self._outboxes.remove(outbox)

    def make_space(self) -> None:
        """Move blocks to disk until memory suffices or the disk fails."""
        while self.in_memory > self._memory_bytes:
            largest = max(self._outboxes, key=lambda outbox: outbox.held)
            if not largest.held:
                return
            try:
                largest.spill()
            except OSError as problem:
                if not self._disk_failed:
                    _log.error("outbox.disk_failed problem=%r", str(problem))
                self._disk_failed = True
                return
            self._disk_failed = False


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 2**16:
        return struct.pack(">BH", 0xDC, count)
    return struct.pack(">BI", 0xDD, count)
