"""The memory and disk limits that all outboxes of a node share, and the spool.

When memory is used up, the outbox that holds most of it moves its oldest block to disk. When the
total limit is reached, too, experiments above their fair share of it have to wait.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from tunemq_shared.broker.redis_keys import OUTBOX_BYTES, OUTBOX_MEMORY_BYTES
from tunemq_workers.broker.outbox_spool import Spool

#: Bytes, and events, at which a block is closed, and with it a batch.
BLOCK_BYTES: Final = 256 * 2**10
BLOCK_EVENTS: Final = 2_000

_log = logging.getLogger(__name__)


class Spillable(Protocol):
    """The interface of an outbox that can move blocks to disk."""

    @property
    def size(self) -> int:
        """Bytes in memory and on disk."""
        ...

    @property
    def held(self) -> int:
        """Bytes in memory that `spill` could move to disk."""
        ...

    def spill(self) -> None:
        """Move the oldest block that is in memory to disk.

        Raises:
            OSError: the disk is full or broken; the block stays in memory.
        """
        ...


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
        self._outboxes: list[Spillable] = []
        self._disk_failed = False

    def is_full_for(self, outbox: Spillable) -> bool:
        """Return whether an outbox should take only events that cannot wait.

        Where the budget is used up, an outbox below its fair share may still grow to that share.
        """
        count = len(self._outboxes)
        if self.size >= self._limit_bytes and outbox.size * count >= self._limit_bytes:
            return True
        over_memory = self.in_memory > self._memory_bytes + BLOCK_BYTES
        return self._disk_failed and over_memory and outbox.held * count >= self._memory_bytes

    def enter(self, outbox: Spillable) -> None:
        """Register an outbox."""
        self._outboxes.append(outbox)

    def leave(self, outbox: Spillable) -> None:
        """Remove an outbox that is empty and stays so."""
        self._outboxes.remove(outbox)

    def make_space(self) -> None:
        """Move blocks to disk until memory suffices or the disk fails."""
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
