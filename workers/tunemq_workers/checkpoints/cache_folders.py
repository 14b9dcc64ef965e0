"""The folders of a node's cache: one for each experiment that has its checkpoints in a store.

If the scheduler names the folder, it also removes it. Otherwise the node creates one, named after
the experiment's events stream, and removes it when the experiment has finished.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import TrialSpec
from tunemq_shared.system.folder_trees import MAX_NAMES
from tunemq_workers.checkpoints import cache_disk
from tunemq_workers.checkpoints.cache_disk import TRASH, CacheContents
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits, CheckpointCache
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import do_nothing

#: Names that the node gives to folders; trials may create others beside them.
_FOLDER: Final = re.compile(quote(redis_keys.events(""), safe="") + r"[A-Za-z0-9_.~%-]+")

#: The most folders of an earlier node that are opened: one for each search that it worked for.
_MOST_OPENED: Final = 1_000

_log = logging.getLogger(__name__)

_Answer = Callable[[str, str], object]


class _Folder(msgspec.Struct, eq=False):
    root: str
    events_key: str
    #: Whether the node chose the folder.
    is_ours: bool
    is_open: bool = False
    #: Callbacks that wait until the folder is open.
    waiting: list[_Answer] = []


class _LeftFolder(NamedTuple):
    name: str
    is_kept: bool


class CacheFolders:
    """Open experiments' folders, and forget those of finished experiments.

    Args:
        cache: the checkpoints in the folders.
        disk: runs disk jobs.
        limits: receives the sizes of the disks.
        folder: parent of the folders that the node chooses.
    """

    def __init__(
        self,
        cache: CheckpointCache,
        disk: DiskJobs,
        limits: CacheLimits,
        folder: str,
    ) -> None:
        self._cache, self._disk, self._limits = cache, disk, limits
        self._folder = folder
        self._folders: dict[str, _Folder] = {}
        #: The streams of the experiments that have a folder.
        self.events_keys: tuple[str, ...] = ()

    def start(self) -> None:
        """Open the newest folders that an earlier node left, and remove the other ones."""
        self._disk.run(self._folder, partial(_find_left, self._folder), self._treat_next)

    def open(self, start: TrialSpec, answer: Callable[[str, str], object]) -> None:
        """Find or open a trial's folder, then call ``answer``.

        Args:
            start: the trial.
            answer: takes the folder and "", or "" and the problem.
        """
        root = start.cache or os.path.join(self._folder, quote(start.events_key, safe=""))
        folder = self._folders.get(root)
        if folder is None:
            folder = self._add(root, start.events_key, is_ours=not start.cache)
        if folder.is_open:
            answer(root, "")
        else:
            folder.waiting.append(answer)

    def forget_all_but(
        self, used: Collection[str], acknowledged_up_to: Mapping[str, int], lost: Collection[str]
    ) -> set[str]:
        """Forget the folders of finished experiments and return their streams.

        An experiment has finished if it is not in ``used`` and either the scheduler wants none of
        its events any more or its stream is ``lost``.
        """
        over = set()
        for folder in list(self._folders.values()):
            key = folder.events_key
            is_over = acknowledged_up_to.get(key) == redis_keys.EVERYTHING or key in lost
            if is_over and key not in used and folder.is_open:
                over.add(key)
                self._forget(folder)
        return over

    def _treat_next(self, left: Iterator[_LeftFolder]) -> None:
        """Open or remove the next left folder, then those after it: each job needs a thread."""

        def removed(problem: OSError | None) -> None:
            if problem is not None:
                _log.warning("cache.not_removed problem=%r", str(problem))
            self._treat_next(left)

        for name, is_kept in left:
            root = os.path.join(self._folder, name)
            if root in self._folders:
                continue  # a trial needed it meanwhile
            if is_kept:
                folder = self._add(root, unquote(name), is_ours=True)
                folder.waiting.append(lambda *_: self._treat_next(left))
            else:
                self._disk.run(root, partial(cache_disk.remove_folder, root), removed, removed)
            return

    def _add(self, root: str, events_key: str, *, is_ours: bool) -> _Folder:
        folder = self._folders[root] = _Folder(root, events_key, is_ours)
        self._count()
        job = partial(cache_disk.take_over, root)
        opened, failed = partial(self._opened, folder), partial(self._not_opened, folder)
        self._disk.run(root, job, opened, failed)
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
            self._disk.run(folder.root, partial(cache_disk.remove_folder, folder.root), do_nothing)

    def _count(self) -> None:
        self.events_keys = tuple({folder.events_key for folder in self._folders.values()})


def _find_left(folder: str) -> Iterator[_LeftFolder]:
    """Find the folders that an earlier node left: first the newest of those that are no trash."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return iter(())
    with entries:
        # The folder may belong to a user who keeps other things in it.
        ours = (one for one in entries if one.name.startswith(TRASH) or _FOLDER.fullmatch(one.name))
        found = sorted(islice(ours, MAX_NAMES), key=_rank)
    return iter(
        [
            _LeftFolder(one.name, place < _MOST_OPENED and not one.name.startswith(TRASH))
            for place, one in enumerate(found)
        ]
    )


def _rank(left: os.DirEntry[str]) -> tuple[bool, float]:
    try:
        age = -left.stat(follow_symlinks=False).st_mtime
    except OSError:  # it was removed meanwhile
        age = 0.0
    return left.name.startswith(TRASH), age
