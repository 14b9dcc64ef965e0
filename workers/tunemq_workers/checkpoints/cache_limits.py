"""How much of a disk checkpoints may take: what people say, else a share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Of the disk that the cache is on: a tenth for copies, as much for what is not uploaded yet.
_SHARE: Final = 10


@dataclass(slots=True, eq=False)
class CacheLimits:
    """Two numbers of bytes; where nobody gave one, the largest disk that has a cache decides.

    Args:
        copies_given: for copies of committed checkpoints; None for the share.
        uploads_given: for what is not committed yet; likewise.
    """

    copies_given: int | None = None
    uploads_given: int | None = None
    _share: int = 0

    @property
    def copies(self) -> int:
        """What copies of committed checkpoints may take."""
        return self._share if self.copies_given is None else self.copies_given

    @property
    def uploads(self) -> int:
        """Beyond so much that is not committed yet nobody may write, unless there is nothing."""
        return self._share if self.uploads_given is None else self.uploads_given

    def found(self, disk_bytes: int) -> None:
        """There is a cache on a disk of this size."""
        self._share = max(self._share, disk_bytes // _SHARE)
