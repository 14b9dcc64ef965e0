"""`CheckpointCache`: the checkpoints on a node's disk, their users, and the choice of deletions.

The cache keeps uncommitted checkpoints and those in use. Of the others, which are copies, each
trial keeps its newest two, from which it continues after a failure. The cache deletes older copies
at once, while they are still in the page cache: writing them to disk would take half of the disk's
bandwidth, and their memory is needed elsewhere. If all copies together exceed the limit, it deletes
the least recently used ones first, and trials' newest ones last.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Final

import msgspec

from tunemq_shared.protocol.messages import CheckpointRef
from tunemq_workers.checkpoints import cache_disk
from tunemq_workers.checkpoints.cache_disk import Inodes, LeftoverCheckpoint
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import do_nothing

#: One tenth of the disk each for copies, for checkpoints that wait for their upload, and for blobs.
_SHARE: Final = 10
#: Committed copies that each trial keeps while there is space.
_COPIES_OF_A_TRIAL: Final = 2
#: Number of commits whose manifest hashes are remembered, even after their copies are deleted.
_KNOWN_COMMITS: Final = 10_000

_log = logging.getLogger(__name__)


class CacheLimits(msgspec.Struct, eq=False):
    """Limits in bytes; by default a share of the largest disk that has a cache.

    Args:
        copies_given: limit for copies of committed checkpoints; None for the share.
        uploads_given: limit for checkpoints that are not committed yet; None for the share.
        disk_given: how much of its disk the node may use; 0 for all of it.
    """

    copies_given: int | None = None
    uploads_given: int | None = None
    disk_given: int = 0
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
        self._share = max(self._share, self.share_of(disk_bytes))

    def share_of(self, disk_bytes: int) -> int:
        """Return a tenth of a disk of this size, or of the part of it that the node may use."""
        return min(disk_bytes, self.disk_given or disk_bytes) // _SHARE


class CachedCheckpoint(msgspec.Struct, eq=False):
    """A complete checkpoint in a folder of the cache.

    Attributes:
        root: the folder.
        key: the checkpoint's key, its path in the folder.
        written: hash of the manifest that the trial process wrote; "" if it wrote none.
        sha256: hash of the manifest in the store; "" before the commit.
        users: names of those who need it; it stays while there are any.
    """

    root: str
    key: str
    written: str = ""
    sha256: str = ""
    users: set[str] = set()
    #: It will never be committed or restored.
    is_lost: bool = False
    #: It is removed from the cache.
    is_gone: bool = False
    #: None until it is measured.
    inodes: Inodes | None = None

    @property
    def trial(self) -> tuple[str, str]:
        """The cache's folder and the trial's folder in it."""
        return self.root, self.key.partition("/")[0]

    def fits(self, ref: CheckpointRef) -> bool:
        """Return whether it is the checkpoint that ``ref`` refers to."""
        return (bool(ref.sha256) and ref.sha256 == self.sha256) or (
            bool(ref.written) and ref.written == self.written
        )


class CheckpointCache:
    """The checkpoints on a node's disk. Owned by the node's loop.

    Args:
        disk: removes and measures checkpoints.
        limits: the limit for copies of committed checkpoints.
    """

    def __init__(self, disk: DiskJobs, limits: CacheLimits) -> None:
        #: Bytes that the measured copies take on the disk.
        self.size = 0
        self._disk, self._limits = disk, limits
        self._cached: dict[tuple[str, str], CachedCheckpoint] = {}
        self._newest: dict[tuple[str, str], CachedCheckpoint] = {}
        self._commits: dict[tuple[str, str], str] = {}
        # Committed copies, least recently used first: those to delete first, and those to delete
        # last.
        self._others: dict[CachedCheckpoint, None] = {}
        self._last: dict[CachedCheckpoint, None] = {}
        self._committed = defaultdict[tuple[str, str], list[CachedCheckpoint]](list)
        #: The copies that link to each inode, and its bytes.
        self._links = Counter[tuple[int, int]]()
        self._sizes: dict[tuple[int, int], int] = {}
        #: The trials of which a copy is being measured.
        self._measuring: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """Return the number of checkpoints in the cache."""
        return len(self._cached)

    def find(self, root: str, key: str) -> CachedCheckpoint | None:
        """Return the checkpoint with this key, or None."""
        return self._cached.get((root, key))

    def committed_as(self, root: str, key: str) -> str:
        """Return the hash of a manifest in the store; "" if this node did not commit it.

        A trial process needs it if its order to restore was written before the commit.
        """
        return self._commits.get((root, key), "")

    def add(self, cached: CachedCheckpoint) -> None:
        """Add a checkpoint that a trial process wrote or the node downloaded."""
        self._cached[cached.root, cached.key] = cached
        newest = self._newest.get(cached.trial)
        if newest is None or cache_disk.age_of(newest.key) <= cache_disk.age_of(cached.key):
            self._newest[cached.trial] = cached
            if newest is not None and newest in self._last:
                del self._last[newest]
                self._others[newest] = None
        if cached.sha256:
            self._enlist(cached)

    def take_over(self, root: str, found: Iterable[LeftoverCheckpoint]) -> None:
        """Add the checkpoints that an earlier node left."""
        for key, sha256, _, inodes in found:
            # Its inodes are known, so `add` does not measure it again.
            cached = CachedCheckpoint(root, key, sha256=sha256, inodes=inodes)
            self.add(cached)
            self._measured(cached, inodes)

    def commit(self, cached: CachedCheckpoint, sha256: str) -> None:
        """Note that the checkpoint is in the store, so that the one here is a copy."""
        cached.sha256 = sha256
        self._commits[cached.root, cached.key] = sha256
        if len(self._commits) > _KNOWN_COMMITS:
            del self._commits[next(iter(self._commits))]
        if not cached.is_gone:
            self._enlist(cached)

    def lose(self, cached: CachedCheckpoint) -> None:
        """Note that the checkpoint will never be in the store; remove it after its last user."""
        cached.is_lost = True
        self._remove_if_lost(cached)

    def use(self, cached: CachedCheckpoint, user: str) -> None:
        """Keep the checkpoint until ``user`` releases it."""
        cached.users.add(user)
        for order in (self._others, self._last):
            if cached in order:
                del order[cached]
                order[cached] = None

    def release(self, cached: CachedCheckpoint, user: str) -> None:
        """End the use by ``user``; ignored if there is none."""
        cached.users.discard(user)
        self._remove_if_lost(cached)
        self._drop_older(cached.trial)
        self._trim()

    def discard(self, cached: CachedCheckpoint) -> None:
        """Remove the checkpoint even if it is in use."""
        if cached.is_gone:
            return
        self._forget(cached)
        job = partial(cache_disk.remove, cached.root, cached.key)
        self._disk.run(cached.root, job, do_nothing)

    def forget(self, root: str) -> None:
        """Forget all checkpoints of a folder; its files stay on the disk."""
        for cached in [cached for cached in self._cached.values() if cached.root == root]:
            self._forget(cached)
        for place in [place for place in self._commits if place[0] == root]:
            del self._commits[place]

    def _enlist(self, cached: CachedCheckpoint) -> None:
        is_newest = self._newest.get(cached.trial) is cached
        (self._last if is_newest else self._others)[cached] = None
        self._committed[cached.trial].append(cached)
        self._drop_older(cached.trial, spare=cached)  # its user may come next
        self._measure(cached.trial)

    def _measure(self, trial: tuple[str, str]) -> None:
        """Measure a trial's copies one after another: it may write them faster."""
        if trial in self._measuring:
            return
        copies = self._committed.get(trial, ())
        cached = next((one for one in copies if one.inodes is None), None)
        if cached is not None:
            self._measuring.add(trial)
            job = partial(cache_disk.measure, cached.root, cached.key)
            self._disk.run(cached.root, job, partial(self._measured, cached))

    def _drop_older(self, trial: tuple[str, str], spare: CachedCheckpoint | None = None) -> None:
        """Remove copies older than the trial's newest ones, unless they are in use."""
        copies = sorted(self._committed.get(trial, ()), key=lambda one: cache_disk.age_of(one.key))
        for cached in copies[:-_COPIES_OF_A_TRIAL]:
            if not cached.users and cached is not spare:
                self.discard(cached)

    def _measured(self, cached: CachedCheckpoint, inodes: Inodes) -> None:
        self._measuring.discard(cached.trial)
        if not cached.is_gone:
            cached.inodes = inodes
            for inode, size in inodes.items():
                self._links[inode] += 1
                # If the cache was emptied meanwhile, a new file may have the inode of an old one.
                self.size += size - self._sizes.get(inode, 0)
                self._sizes[inode] = size
            self._trim()
        self._measure(cached.trial)

    def _trim(self) -> None:
        while self.size > self._limits.copies:
            cached = next((one for one in chain(self._others, self._last) if not one.users), None)
            if cached is None:
                return
            _log.info("cache.removed key=%s", cached.key)
            self.discard(cached)

    def _remove_if_lost(self, cached: CachedCheckpoint) -> None:
        if cached.is_lost and not cached.users:
            self.discard(cached)

    def _forget(self, cached: CachedCheckpoint) -> None:
        cached.is_gone = True
        del self._cached[cached.root, cached.key]
        self._others.pop(cached, None)
        self._last.pop(cached, None)
        if cached.sha256:
            copies = self._committed[cached.trial]
            copies.remove(cached)
            if not copies:
                del self._committed[cached.trial]
        if self._newest.get(cached.trial) is cached:
            del self._newest[cached.trial]
        for inode in cached.inodes or {}:
            self._links[inode] -= 1
            if not self._links[inode]:
                del self._links[inode]
                self.size -= self._sizes.pop(inode)
