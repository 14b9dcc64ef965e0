"""Events on their way to the scheduler: numbered, and kept until it has journalled them.

The outbox is a log of events, packed into blocks. A cursor stands behind what was handed out; it
goes back when a batch did not arrive or the wire was reset, so an event may be sent twice, never
skipped. The oldest blocks move to disk when memory is used up; when the disk's share is used up too
the outbox is *full*, and whoever fills it has to wait.
"""

from __future__ import annotations

import bisect
import logging
import struct
from dataclasses import dataclass
from typing import Final

from tunemq_shared.wire import OUTBOX_BYTES, OUTBOX_MEMORY_BYTES
from tunemq_workers.spool import Place, Spool

#: A block, and with it a batch, ends at so many bytes or events.
BLOCK_BYTES: Final = 256 * 2**10
BLOCK_EVENTS: Final = 2_000
#: What a block costs beside its bytes.
_BLOCK_OVERHEAD: Final = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive events for one stream; ``events`` are their msgpack bytes, one behind another."""

    key: str
    first: int
    count: int
    events: bytes

    @property
    def payload(self) -> bytes:
        """The events as one msgpack array."""
        return _array_header(self.count) + self.events


@dataclass(slots=True)
class _Block:
    key: str
    first: int
    count: int
    size: int
    data: bytearray | None
    place: Place | None = None

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def is_closed(self) -> bool:
        return self.size >= BLOCK_BYTES or self.count >= BLOCK_EVENTS


@dataclass(slots=True)
class _Cursor:
    """What comes next: event ``n``, which is at ``offset`` of block ``index``."""

    index: int = 0
    offset: int = 0
    n: int = 1


class Outbox:
    """The events of one node incarnation. Not thread-safe: the node's loop owns it.

    Args:
        spool: takes what does not fit in ``memory_bytes``.
        memory_bytes: how much is held in memory, the block being filled not counted.
        limit_bytes: from how much on the outbox is full; what is added all the same is kept.
    """

    def __init__(
        self,
        spool: Spool,
        *,
        memory_bytes: int = OUTBOX_MEMORY_BYTES,
        limit_bytes: int = OUTBOX_BYTES,
    ) -> None:
        self.last = 0
        self.size = 0
        self._spool = spool
        self._memory_bytes, self._limit_bytes = memory_bytes, limit_bytes
        self._blocks: list[_Block] = []
        self._spooled = 0  # that many blocks, the oldest, are on disk
        self._in_memory = 0
        self._disk_failed = False
        self._cursor = _Cursor()

    @property
    def is_full(self) -> bool:
        """Whether to add no more than has to be added."""
        over_memory = self._in_memory > self._memory_bytes + BLOCK_BYTES
        return self.size >= self._limit_bytes or (self._disk_failed and over_memory)

    @property
    def has_unsent(self) -> bool:
        """Whether `take` has something to hand out."""
        return self._cursor.n <= self.last

    def add(self, key: str, event: bytes) -> int:
        """Append an encoded event for the stream ``key``; the number that it gets."""
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.data is None or block.is_closed or block.key != key:
            block = self._open_block(key)
        assert block.data is not None  # an open block is in memory
        block.data += event
        size = len(event)
        block.size += size
        block.count += 1
        self._in_memory += size
        self.size += size
        self.last += 1
        return self.last

    def take(self, max_batches: int) -> list[Batch]:
        """Hand out the next batches, oldest first, all for one stream; none when all are out."""
        batches: list[Batch] = []
        cursor = self._cursor
        while self.has_unsent and len(batches) < max_batches:
            block = self._blocks[cursor.index]
            if batches and batches[0].key != block.key:
                break
            if cursor.n <= block.last:
                events = self._bytes_of(block)[cursor.offset :]
                batches.append(Batch(block.key, cursor.n, block.last - cursor.n + 1, bytes(events)))
            self._pass(block)
        return batches

    def rewind(self, n: int = 1) -> None:
        """Hand out event ``n`` and all after it again; a few before it may come along."""
        n = max(n, self._blocks[0].first if self._blocks else self.last + 1)
        if n >= self._cursor.n:
            return
        index = bisect.bisect_right(self._blocks, n, key=lambda block: block.first) - 1
        self._cursor = _Cursor(index, 0, self._blocks[index].first)

    def release(self, journalled: int) -> None:
        """Forget the events up to number ``journalled``, block by block."""
        freed = 0
        while freed < len(self._blocks) and self._blocks[freed].last <= journalled:
            self._forget(self._blocks[freed])
            freed += 1
        if not freed:
            return
        del self._blocks[:freed]
        self._spooled = max(0, self._spooled - freed)
        cursor = self._cursor
        if cursor.index >= freed:
            cursor.index -= freed
        else:
            first = self._blocks[0].first if self._blocks else self.last + 1
            self._cursor = _Cursor(0, 0, first)

    def _open_block(self, key: str) -> _Block:
        self._spill()
        block = _Block(key, self.last + 1, 0, 0, bytearray())
        self._blocks.append(block)
        self._in_memory += _BLOCK_OVERHEAD
        self.size += _BLOCK_OVERHEAD
        return block

    def _pass(self, block: _Block) -> None:
        """Move the cursor behind what ``block`` holds, and into the next block if there is one."""
        cursor = self._cursor
        cursor.n, cursor.offset = block.last + 1, block.size
        if cursor.index + 1 < len(self._blocks):
            cursor.index, cursor.offset = cursor.index + 1, 0

    def _spill(self) -> None:
        while self._in_memory > self._memory_bytes and self._spooled < len(self._blocks):
            block = self._blocks[self._spooled]
            assert block.data is not None  # the blocks behind the spooled ones are in memory
            try:
                block.place = self._spool.write(block.data)
            except OSError as problem:
                if not self._disk_failed:
                    _log.error("outbox.disk_failed problem=%r", str(problem))
                self._disk_failed = True
                return
            self._disk_failed = False
            block.data = None
            self._in_memory -= block.size
            self._spooled += 1

    def _bytes_of(self, block: _Block) -> bytes | bytearray:
        if block.data is not None:
            return block.data
        assert block.place is not None  # a block is in memory or on disk
        return self._spool.read(block.place)

    def _forget(self, block: _Block) -> None:
        self.size -= block.size + _BLOCK_OVERHEAD
        self._in_memory -= _BLOCK_OVERHEAD
        if block.place is not None:
            self._spool.free(block.place)
        else:
            self._in_memory -= block.size


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 2**16:
        return struct.pack(">BH", 0xDC, count)
    return struct.pack(">BI", 0xDD, count)
