"""`CacheLimits`: how many bytes checkpoints may take on a node's disk."""

from __future__ import annotations

from typing import Final

import msgspec

#: One tenth of the cache's disk for copies, and as much for checkpoints that wait for their upload.
_SHARE: Final = 10


class CacheLimits(msgspec.Struct, eq=False):
    """Limits in bytes; by default a share of the largest disk that has a cache.

    Args:
        copies_given: limit for copies of committed checkpoints; None for the share.
        uploads_given: limit for checkpoints that are not committed yet; None for the share.
    """

    copies_given: int | None = None
    uploads_given: int | None = None
    _share: int = 0

    @property
    def copies(self) -> int:
        """Bytes that copies of committed checkpoints may take."""
        return self._share if self.copies_given is None else self.copies_given

    @property
    def uploads(self) -> int:
        """Bytes that uncommitted checkpoints may take, unless it is a single larger one."""
        return self._share if self.uploads_given is None else self.uploads_given

    def found(self, disk_bytes: int) -> None:
        """Take into account that a cache is on a disk of this size."""
        self._share = max(self._share, disk_bytes // _SHARE)
