"""The folders of a node's cache: one for each experiment whose checkpoints are in a store.

The scheduler may say which folder; then it also removes it. Where it does not, the node makes one,
named by the experiment's events stream, and removes it once the experiment is over.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from urllib.parse import quote, unquote

from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import TrialSpec
from tunemq_workers.checkpoints import cache_disk
from tunemq_workers.checkpoints.cache_disk import TRASH, CacheContents
from tunemq_workers.checkpoints.cache_limits import CacheLimits
from tunemq_workers.checkpoints.checkpoint_cache import CheckpointCache
from tunemq_workers.runtime.checkpoint_interfaces import DiskJobs

#: An experiment whose stream is missing for so long is over.
MISSING_S: Final = 5.0

#: What the node calls a folder; trials may make others in the same place.
_FOLDER: Final = re.compile(quote(redis_keys.events(""), safe="") + r"[A-Za-z0-9_.~%-]+")

_log = logging.getLogger(__name__)

_Answer = Callable[[str, str], object]


@dataclass(slots=True, eq=False)
class _Folder:
    root: str
    events_key: str
    #: The node has chosen it.
    is_ours: bool
    is_open: bool = False
    #: Who waits until it is open.
    waiting: list[_Answer] = field(default_factory=list)
    missing_since: float | None = None


class CacheFolders:
    """Opens the experiments' folders, and forgets those of experiments that are over.

    Args:
        cache: what is in them.
        disk: looks what is there.
        limits: hear of the disks.
        folder: where the node makes those that it chooses.
        now: a monotonic clock.
    """

    def __init__(
        self,
        cache: CheckpointCache,
        disk: DiskJobs,
        limits: CacheLimits,
        folder: str,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._disk, self._limits = cache, disk, limits
        self._folder, self._now = folder, now
        self._folders: dict[str, _Folder] = {}
        #: The streams of the experiments that have a folder.
        self.events_keys: tuple[str, ...] = ()

    def start(self) -> None:
        """Take over what a node before this one has left."""
        left = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        for name in left:
            root = os.path.join(self._folder, name)
            # The folder may be people's, who have other things in it.
            if name.startswith(TRASH):
                self._disk.run(partial(cache_disk.remove_folder, root), _ignore)
            elif _FOLDER.fullmatch(name):  # else a trial made it
                events_key = unquote(name)
                self._add(root, events_key, is_ours=True)

    def open(self, start: TrialSpec, answer: Callable[[str, str], object]) -> None:
        """Call ``answer`` with the folder for a trial and an empty text, or with what is wrong."""
        root = start.cache or os.path.join(self._folder, quote(start.events_key, safe=""))
        folder = self._folders.get(root)
        if folder is None:
            folder = self._add(root, start.events_key, is_ours=not start.cache)
        if folder.is_open:
            answer(root, "")
        else:
            folder.waiting.append(answer)

    def forget_all_but(
        self, used: Collection[str], acknowledged_up_to: Mapping[str, int], missing: Collection[str]
    ) -> set[str]:
        """Forget the folders of experiments that are over, and return their streams.

        Those are not ``used``, and the scheduler wants none of their events any more, or their
        stream has been ``missing`` for a while.
        """
        over = set()
        for folder in list(self._folders.values()):
            key = folder.events_key
            if key not in missing:
                folder.missing_since = None
            elif folder.missing_since is None:
                folder.missing_since = self._now()
            since = folder.missing_since
            is_over = acknowledged_up_to.get(key) == redis_keys.EVERYTHING or (
                since is not None and self._now() >= since + MISSING_S
            )
            if is_over and key not in used and folder.is_open:
                over.add(key)
                self._forget(folder)
        return over

    def _add(self, root: str, events_key: str, *, is_ours: bool) -> _Folder:
        folder = self._folders[root] = _Folder(root, events_key, is_ours)
        self._count()
        job = partial(cache_disk.take_over, root)
        self._disk.run(job, partial(self._opened, folder), partial(self._not_opened, folder))
        return folder

    def _opened(self, folder: _Folder, left: CacheContents) -> None:
        _log.info("cache.opened folder=%s checkpoints=%d", folder.root, len(left.checkpoints))
        self._limits.found(left.disk_bytes)
        self._cache.take_over(folder.root, left.checkpoints)
        folder.is_open = True
        waiting, folder.waiting = folder.waiting, []
        for answer in waiting:
            answer(folder.root, "")

    def _not_opened(self, folder: _Folder, problem: OSError) -> None:
        _log.error("cache.not_opened folder=%s problem=%r", folder.root, str(problem))
        del self._folders[folder.root]
        self._count()
        for answer in folder.waiting:
            answer("", f"the node's folder for checkpoints cannot be used: {problem}.")

    def _forget(self, folder: _Folder) -> None:
        _log.info("cache.forgotten folder=%s", folder.root)
        del self._folders[folder.root]
        self._count()
        self._cache.forget(folder.root)
        if folder.is_ours:
            self._disk.run(partial(cache_disk.remove_folder, folder.root), _ignore)

    def _count(self) -> None:
        self.events_keys = tuple({folder.events_key for folder in self._folders.values()})


def _ignore(_: None) -> None:
    """It is done."""
