"""What the outboxes of a node share: so many bytes in memory, so many altogether, and the spool.

When memory is used up the outbox that holds most of it moves its oldest block to disk; when the
disk's share is used up too, the experiments that have more than a fair share of it have to wait.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from tunemq_shared.broker.redis_keys import OUTBOX_BYTES, OUTBOX_MEMORY_BYTES
from tunemq_workers.broker.outbox_spool import Spool

#: A block of events, and with it a batch, ends at so many bytes or events.
BLOCK_BYTES: Final = 256 * 2**10
BLOCK_EVENTS: Final = 2_000

_log = logging.getLogger(__name__)


class Spillable(Protocol):
    """An outbox."""

    @property
    def size(self) -> int:
        """Bytes altogether."""
        ...

    @property
    def held(self) -> int:
        """Bytes that it could move to disk."""
        ...

    def spill(self) -> None:
        """Move its oldest block from memory to disk.

        Raises:
            OSError: the disk is full or broken; the block stays where it is.
        """
        ...


class MemoryBudget:
    """Counts what outboxes hold. Not thread-safe: the node's loop owns it.

    Args:
        spool: takes what does not fit in ``memory_bytes``.
        memory_bytes: how much is held in memory, a block being filled not counted.
        limit_bytes: from how much on some outboxes are full; what is added all the same is kept.
    """

    def __init__(
        self,
        spool: Spool,
        *,
        memory_bytes: int = OUTBOX_MEMORY_BYTES,
        limit_bytes: int = OUTBOX_BYTES,
    ) -> None:
        self.spool = spool
        #: Bytes altogether, and of those in memory.
        self.size = 0
        self.in_memory = 0
        self._memory_bytes, self._limit_bytes = memory_bytes, limit_bytes
        self._outboxes: list[Spillable] = []
        self._disk_failed = False

    def is_full_for(self, outbox: Spillable) -> bool:
        """Whether to add no more to an outbox than has to be added.

        One that has less than its fair share of a full budget goes on until it has that.
        """
        count = len(self._outboxes)
        if self.size >= self._limit_bytes and outbox.size * count >= self._limit_bytes:
            return True
        over_memory = self.in_memory > self._memory_bytes + BLOCK_BYTES
        return self._disk_failed and over_memory and outbox.held * count >= self._memory_bytes

    def enter(self, outbox: Spillable) -> None:
        """Let an outbox in."""
        self._outboxes.append(outbox)

    def leave(self, outbox: Spillable) -> None:
        """An outbox holds nothing any more, and never will."""
        self._outboxes.remove(outbox)

    def make_space(self) -> None:
        """Have blocks moved to disk until memory suffices, or the disk fails."""
        while self.in_memory > self._memory_bytes:
            largest = max(self._outboxes, key=_held)
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


def _held(outbox: Spillable) -> int:
    return outbox.held
