"""`DependencyFetcher`: fetches the code, parameters and bundle that a trial needs to start.

The node's transfer process fetches each blob once, however many trials wait for it. Blobs that are
no longer used stay in a cache. When all blobs together exceed a tenth of the disk
(`CacheLimits.share_of`), the least recently used ones are removed; those in use stay.

    blobs/<sha256>      code and parameters
    code/<sha256>/      bundles, unpacked
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from tunemq_shared.code.blob_folder import place_of
from tunemq_shared.protocol.messages import BlobRef, TrialSpec
from tunemq_shared.system.folder_trees import MAX_NAMES, make_private_folder, remove_tree, statuses
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import do_nothing
from tunemq_workers.runtime.transfer_messages import FetchBlob
from tunemq_workers.runtime.trial_process_state import AttemptId
from tunemq_workers.transfers.transfer_client import TransferClient
from tunemq_workers.trials.localize_order import (
    BLOBS,
    CODE,
    localised,
    place_of_shared_names,
)

_TRASH: Final = ".trash-"
#: The most blobs of an earlier node that stay.
_MOST_LEFT: Final = 10_000

_log = logging.getLogger(__name__)


class _RequiredBlob(NamedTuple):
    """A blob that a trial needs, with its description for error messages."""

    ref: BlobRef
    what: str
    is_bundle: bool = False


class _LeftoverFiles(NamedTuple):
    """The blobs of an earlier node: the bytes of each path, oldest first."""

    sizes: dict[str, int]
    disk_bytes: int


class _PendingDependencies(msgspec.Struct, eq=False):
    """The blobs and transfers that a trial waits for; none while they are looked for."""

    missing: set[str] = set()
    transfers: list[int] = []


class DependencyFetcher:
    """Fetches the dependencies of trials. Used by the node's loop only.

    A trial can block a thread that looks into ``blobs``, so only jobs of `DiskJobs` do that.

    Args:
        disk: measures and removes files.
        transfers: fetches blobs.
        folder: the node's working folder, which no other node uses.
        variables: the node's environment variables that trials get.
        limits: how much blobs may take of their disk.
    """

    def __init__(
        self,
        disk: DiskJobs,
        transfers: TransferClient,
        folder: str,
        variables: Mapping[str, str],
        limits: CacheLimits,
    ) -> None:
        #: Returns the trials whose blobs have to stay.
        self.in_use: Callable[[], Iterable[TrialSpec]] = tuple
        self._disk, self._transfers, self._folder = disk, transfers, folder
        self._names = place_of_shared_names(folder)
        self._variables, self._limits = variables, limits
        #: The trials whose blobs are all here.
        self._found: set[AttemptId] = set()
        self._arrivals: dict[AttemptId, _PendingDependencies] = {}
        #: Bytes by path, least recently used first.
        self._sizes: dict[str, int] = {}
        self._limit = 0
        # Listed now: later, an unfinished file may be a running download.
        self._leftovers = _leftovers(folder)

    def start(self) -> None:
        """Find the blobs that an earlier node left."""
        self._disk.run(
            self._folder, partial(_take_over, self._folder, self._leftovers), self._looked
        )

    def find(self, key: AttemptId, start: TrialSpec) -> TrialSpec | None:
        """Return the order with this node's paths if its blobs are here; None before `fetch`."""
        for need in _needs(start):
            if key not in self._found:
                return None
            path = self._path(need)
            if path in self._sizes:  # mark it as the most recently used
                self._sizes[path] = self._sizes.pop(path)
        return localised(start, self._folder, self._variables)

    def fetch(
        self,
        key: AttemptId,
        start: TrialSpec,
        on_there: Callable[[], None],
        on_failed: Callable[[str, str], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        """Fetch the missing blobs of a trial; do nothing if it already waits for them.

        Args:
            on_there: called when all blobs are here, and never before this method returns.
            on_failed: called instead, with the reason and the kind of the failure.
            on_trouble: called with the reason when a transfer stalls, and with "" when it
                continues.
        """
        if key in self._arrivals:
            return
        arrival = self._arrivals[key] = _PendingDependencies()

        def looked(missing: list[_RequiredBlob]) -> None:
            if self._arrivals.get(key) is not arrival:
                return
            arrival.missing = {self._path(need) for need in missing}
            for need in missing:
                arrival.transfers.append(transfer(need))
            complete_if_there()

        def transfer(need: _RequiredBlob) -> int:
            folder = os.path.dirname(self._path(need))
            _log.info("blob.wanted blob=%s store=%s", need.ref.sha256, need.ref.store)
            return self._transfers.start(
                FetchBlob(need.ref, folder, need.is_bundle, start.sync_timeout_s),
                partial(there, need),
                partial(failed, need, "fetch"),
                on_trouble,
                partial(failed, need, "disk"),
            )

        def there(need: _RequiredBlob, _uploaded: object) -> None:
            path = self._path(need)
            arrival.missing.discard(path)
            self._arrived(path)
            complete_if_there()

        def complete_if_there() -> None:
            if not arrival.missing:
                del self._arrivals[key]
                self._found.add(key)
                on_there()

        def failed(need: _RequiredBlob, kind: str, reason: str, *_: object) -> None:
            self._leave(key)
            on_failed(f"{need.what} cannot be fetched from {place_of(need.ref)}: {reason}", kind)

        needs = [(self._path(need), need) for need in _needs(start)]
        self._disk.run(self._names, partial(_missing, needs), looked)

    def forget_all_but(self, keys: Collection[AttemptId]) -> None:
        """Cancel the transfers of all other trials."""
        for key in [key for key in self._arrivals if key not in keys]:
            self._leave(key)
        self._found.intersection_update(keys)

    def trim(self) -> None:
        """Remove the least recently used blobs while all together exceed the limit."""
        size = sum(self._sizes.values())
        if size <= self._limit:
            return
        used = {self._path(need) for start in self.in_use() for need in _needs(start)}
        for path in [path for path in self._sizes if path not in used]:
            size -= self._sizes.pop(path)
            self._remove(path)
            if size <= self._limit:
                return

    def _leave(self, key: AttemptId) -> None:
        for number in self._arrivals.pop(key).transfers:
            self._transfers.cancel(number)

    def _arrived(self, path: str) -> None:
        if path not in self._sizes:
            self._sizes[path] = 0
            self._disk.run(self._folder, partial(_size_of, path), partial(self._measured, path))

    def _measured(self, path: str, size: int) -> None:
        if path in self._sizes:
            self._sizes[path] = size
            self.trim()

    def _looked(self, left: _LeftoverFiles) -> None:
        self._limit = self._limits.share_of(left.disk_bytes)
        self._sizes = left.sizes | self._sizes
        self.trim()

    def _remove(self, path: str) -> None:
        """Move a blob out of the way before later trials look for it, then delete it."""

        def moved(trash: str) -> None:
            self._disk.run(self._folder, partial(_delete, trash), do_nothing)

        def failed(problem: OSError) -> None:
            _log.warning("blob.not_removed path=%s problem=%r", path, str(problem))

        _log.info("blob.removed path=%s", path)
        self._disk.run(self._names, partial(_move_away, path), moved, failed)

    def _path(self, need: _RequiredBlob) -> str:
        return os.path.join(self._folder, CODE if need.is_bundle else BLOBS, need.ref.sha256)


def _needs(start: TrialSpec) -> Iterator[_RequiredBlob]:
    """Yield the blobs that have to be fetched; those with a readable path are not among them."""
    if start.code.store:
        yield _RequiredBlob(start.code, "the trial's code")
    for ref in start.blobs:
        if ref.store:
            yield _RequiredBlob(ref, "what with_parameters bound to it")
    if start.bundle is not None:
        yield _RequiredBlob(start.bundle, "the bundle with its code", is_bundle=True)


# --- on the disk ----------------------------------------------------------------------------------


def _leftovers(folder: str) -> list[str]:
    """Return the unfinished files of an earlier node."""
    found: list[str] = []
    for name in (BLOBS, CODE):
        with contextlib.suppress(FileNotFoundError):
            entries = os.scandir(os.path.join(folder, name))
            found += (entry.path for entry in entries if entry.name.startswith("."))
    return found


def _missing(needs: Iterable[tuple[str, _RequiredBlob]]) -> list[_RequiredBlob]:
    """Return the blobs that are not at their paths."""
    return [need for path, need in needs if not _is_there(path, need)]


def _is_there(path: str, need: _RequiredBlob) -> bool:
    if need.is_bundle:
        return os.path.isdir(path)
    try:
        return os.stat(path).st_size == need.ref.size
    except OSError:
        return False


def _move_away(path: str) -> str:
    """Rename a blob; return its path now."""
    folder, name = os.path.split(path)
    trash = os.path.join(folder, f"{_TRASH}{name}-{os.urandom(4).hex()}")
    os.rename(path, trash)
    return trash


def _take_over(folder: str, leftovers: list[str]) -> _LeftoverFiles:
    """Delete unfinished files of an earlier node, and return the blobs that it left.

    The node's loop handles each of them, so the oldest are deleted if a trial has made very many.
    """
    found: list[tuple[float, str]] = []
    for name in (BLOBS, CODE):
        make_private_folder(os.path.join(folder, name))
        found += (
            (_changed_at(entry), entry.path)
            for entry in islice(os.scandir(os.path.join(folder, name)), MAX_NAMES)
            if not entry.name.startswith(".")
        )
    found.sort()
    for path in [*leftovers, *(path for _, path in found[:-_MOST_LEFT])]:
        try:
            _delete(path)
        except OSError as problem:
            _log.warning("blob.not_removed path=%s problem=%r", path, str(problem))
    sizes = {path: _size_of(path) for _, path in found[-_MOST_LEFT:]}
    return _LeftoverFiles(sizes, shutil.disk_usage(folder).total)


def _changed_at(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:  # a trial has just removed it
        return 0.0


def _size_of(path: str) -> int:
    """Return the bytes that a file or folder takes on the disk; 0 if it does not exist."""
    return sum(status.st_blocks * 512 for status in statuses(path))


def _delete(path: str) -> None:
    if os.path.isdir(path):
        remove_tree(path)
    else:
        os.unlink(path)
