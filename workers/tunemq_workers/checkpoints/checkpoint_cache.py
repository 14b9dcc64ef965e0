"""Which checkpoints are on a node's disk, who uses them, and which of them have to go.

What is not committed stays, and so does what somebody uses. Of the rest, the copies, each trial has
its newest and the one before it: from those it goes on when it fails. Older ones go at once, while
they are only in memory: to write them to the disk would take half of what the disk can do, and what
memory they take would be missing to the others. All together have at most so many bytes: those go
first that were not used for longest, but the newest of a trial after all others.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Final

from tunemq_shared.protocol.messages import CheckpointRef
from tunemq_workers.checkpoints import cache_disk
from tunemq_workers.checkpoints.cache_disk import Inodes, LeftoverCheckpoint
from tunemq_workers.checkpoints.cache_limits import CacheLimits
from tunemq_workers.runtime.checkpoint_interfaces import DiskJobs

#: So many committed copies of a trial stay while there is room.
_COPIES_OF_A_TRIAL: Final = 2
#: Of so many commits it is known what their manifests are, whatever became of the copies.
_KNOWN_COMMITS: Final = 10_000

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class CachedCheckpoint:
    """A checkpoint in a folder of the cache, from the moment when all of it is there.

    ``written`` is the hash of the manifest that its host wrote, ``sha256`` that of the store's;
    each is empty where there is none.
    """

    root: str
    key: str
    written: str = ""
    sha256: str = ""
    users: set[str] = field(default_factory=set)
    #: Nobody will ever want it.
    is_lost: bool = False
    #: It was removed from the cache.
    is_gone: bool = False
    inodes: Inodes = field(default_factory=dict)

    @property
    def trial(self) -> tuple[str, str]:
        """Its cache and its trial's folder there."""
        return self.root, self.key.partition("/")[0]

    def fits(self, ref: CheckpointRef) -> bool:
        """Whether it is what ``ref`` refers to."""
        return (bool(ref.sha256) and ref.sha256 == self.sha256) or (
            bool(ref.written) and ref.written == self.written
        )


class CheckpointCache:
    """What a node has of checkpoints. Owned by the node's loop; the disk does the work.

    Args:
        disk: removes and measures.
        limits: say what copies of committed checkpoints may take on the disk.
    """

    def __init__(self, disk: DiskJobs, limits: CacheLimits) -> None:
        #: Bytes that the copies take on the disk, as far as they were measured.
        self.size = 0
        self._disk, self._limits = disk, limits
        self._cached: dict[tuple[str, str], CachedCheckpoint] = {}
        self._newest: dict[tuple[str, str], CachedCheckpoint] = {}
        self._commits: dict[tuple[str, str], str] = {}
        # The committed ones, the longest unused first: those that go first, and those that go last.
        self._others: dict[CachedCheckpoint, None] = {}
        self._last: dict[CachedCheckpoint, None] = {}
        self._committed = defaultdict[tuple[str, str], list[CachedCheckpoint]](list)
        self._links = Counter[tuple[int, int]]()

    def __len__(self) -> int:
        """How many checkpoints there are."""
        return len(self._cached)

    def find(self, root: str, key: str) -> CachedCheckpoint | None:
        """The checkpoint with this key, if it is there."""
        return self._cached.get((root, key))

    def committed_as(self, root: str, key: str) -> str:
        """The hash of the store's manifest of what this node has committed; empty if it has not.

        Whoever is to restore a checkpoint may have been ordered before it was committed.
        """
        return self._commits.get((root, key), "")

    def add(self, cached: CachedCheckpoint) -> None:
        """It is there now: written by a host, or downloaded."""
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
        """These were left by a node before this one."""
        for key, sha256, _, inodes in found:
            cached = CachedCheckpoint(
                root, key, sha256=sha256, inodes=inodes
            )  # it is measured, once
            self.add(cached)
            self._measured(cached, inodes)

    def commit(self, cached: CachedCheckpoint, sha256: str) -> None:
        """It is in the store: what is here is a copy."""
        cached.sha256 = sha256
        self._commits[cached.root, cached.key] = sha256
        if len(self._commits) > _KNOWN_COMMITS:
            del self._commits[next(iter(self._commits))]
        if not cached.is_gone:
            self._enlist(cached)

    def lose(self, cached: CachedCheckpoint) -> None:
        """It will never be in the store, and nobody may restore it: it goes with its last user."""
        cached.is_lost = True
        self._remove_if_lost(cached)

    def use(self, cached: CachedCheckpoint, user: str) -> None:
        """It stays until ``user`` has released it."""
        cached.users.add(user)
        for order in (self._others, self._last):
            if cached in order:
                del order[cached]
                order[cached] = None

    def release(self, cached: CachedCheckpoint, user: str) -> None:
        """``user`` needs it no more; one that did not use it is ignored."""
        cached.users.discard(user)
        self._remove_if_lost(cached)
        self._drop_older(cached.trial)
        self._trim()

    def discard(self, cached: CachedCheckpoint) -> None:
        """Remove it, whoever uses it."""
        if cached.is_gone:
            return
        self._forget(cached)
        self._disk.run(partial(cache_disk.remove, cached.root, cached.key), _ignore)

    def forget(self, root: str) -> None:
        """Forget a whole folder, which stays on the disk."""
        for cached in [cached for cached in self._cached.values() if cached.root == root]:
            self._forget(cached)
        for place in [place for place in self._commits if place[0] == root]:
            del self._commits[place]

    def _enlist(self, cached: CachedCheckpoint) -> None:
        is_newest = self._newest.get(cached.trial) is cached
        (self._last if is_newest else self._others)[cached] = None
        self._committed[cached.trial].append(cached)
        if not cached.inodes:
            job = partial(cache_disk.measure, cached.root, cached.key)
            self._disk.run(job, partial(self._measured, cached))
        self._drop_older(cached.trial, spare=cached)  # somebody may be about to use it

    def _drop_older(self, trial: tuple[str, str], spare: CachedCheckpoint | None = None) -> None:
        """Remove what is older than the trial's last copies, unless it is in use."""
        copies = sorted(self._committed.get(trial, ()), key=lambda one: cache_disk.age_of(one.key))
        for cached in copies[:-_COPIES_OF_A_TRIAL]:
            if not cached.users and cached is not spare:
                self.discard(cached)

    def _measured(self, cached: CachedCheckpoint, inodes: Inodes) -> None:
        if cached.is_gone:
            return
        cached.inodes = inodes
        for inode, size in inodes.items():
            self._links[inode] += 1
            if self._links[inode] == 1:
                self.size += size
        self._trim()

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
        for inode, size in cached.inodes.items():
            self._links[inode] -= 1
            if not self._links[inode]:
                del self._links[inode]
                self.size -= size


def _ignore(_: None) -> None:
    """It is done."""
