"""`UnsyncedFiles`: what was written of trials' files, and may not be on the disk yet.

Those files are written without waiting for the disk: what a power cut takes of them is appended
again at the next start, from the turns behind the journal's last snapshot. So before a snapshot
lets go of turns, whatever followed from them has to be on the disk.

Thousands of files may have been written since the snapshot before, at some milliseconds each, and
nobody's decision is to wait for that. So a thread does it, round after round: what was written
meanwhile is left for the next one, which is less each time. The loop itself brings only the last
few to the disk, or what running trials write on and on; where that is not little either there is
no snapshot for now, and the journal grows.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_plain

#: So many files are brought to the disk at once; more are left to a thread.
AT_ONCE: Final = 32
#: So many, where rounds become no shorter.
MOST_AT_ONCE: Final = 1024
#: So many are under way at a time: a file system brings many to the disk as quickly as one.
_BESIDE_EACH_OTHER: Final = 16
#: How long the end of a search waits for the thread; a disk that takes longer may never answer.
_CLOSE_WITHIN_S: Final = 5.0
#: What file systems say that cannot do this for a folder.
_NOT_THERE: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOTDIR})


class UnsyncedFiles:
    """Knows the files; one thread uses it, between turns for `settle`."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        #: Of which a full disk did not take everything.
        self._held: set[str] = set()
        #: How many files the last round had; None where there was none since a snapshot.
        self._last_round: int | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __iter__(self) -> Iterator[str]:
        """All that may not be on the disk."""
        return iter(self._paths)

    @property
    def is_settling(self) -> bool:
        """Whether `settle` has begun what it has not come to the end of."""
        return self._last_round is not None

    @property
    def is_held(self) -> bool:
        """Whether a full disk has not taken everything."""
        return bool(self._held)

    def note(self, path: str) -> None:
        """All that there is for this file is written, or about to be."""
        self._paths[path] = None
        self._held.discard(path)

    def hold(self, path: str) -> None:
        """A full disk does not take all that there is for this file; it is written later."""
        self._held.add(path)

    def forget(self) -> None:
        """No snapshot is possible, so the turns behind all this stay."""
        self._paths.clear()

    def settle(self) -> bool:
        """Bring everything to the disk; returns whether all that was written until now is there.

        Where it is not yet, that goes on beside the search: to be asked again after the next turn.

        Raises:
            StoreError: the disk refuses it.
        """
        if self._held:
            return False
        if self._thread is not None:
            if self._thread.is_alive():
                return False
            self._thread.join()
            self._thread = None
            self._complain(self._error)
        paths = list(self._paths)
        if not self._is_little(len(paths)):
            self._last_round = len(paths)
            self._paths.clear()
            self._thread = threading.Thread(
                target=self._sync, args=(paths,), name="result files to disk", daemon=True
            )
            self._thread.start()
            return False
        try:
            sync_files(paths)
        except OSError as error:
            self._complain(error)
        self._paths.clear()
        self._last_round = None
        return True

    def close(self) -> None:
        """Leave nothing under way; no snapshot will follow."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(_CLOSE_WITHIN_S)

    def _is_little(self, count: int) -> bool:
        if count <= AT_ONCE:
            return True
        last = self._last_round
        return last is not None and 2 * count > last and count <= MOST_AT_ONCE

    def _sync(self, paths: list[str]) -> None:
        try:
            sync_files(paths, lambda: self._is_closed)
        except OSError as error:  # raised by `settle`
            self._error = error

    def _complain(self, error: OSError | None) -> None:
        if error is not None:
            raise StoreError(
                f"{error.filename} cannot be brought to the disk: {error.strerror}. "
                "See to the disk, then restore the experiment."
            ) from error


def sync_files(paths: Iterable[str], is_enough: Callable[[], bool] = lambda: False) -> None:
    """Return when the disk has these files and their names; those that are gone are passed over.

    Args:
        is_enough: looked at before each: whether nobody needs the rest any more.

    Raises:
        OSError: it refuses; names the file.
    """
    files = list(paths)
    folders: dict[str, None] = {}
    for path in files:
        folder = os.path.dirname(path)
        folders[folder] = folders[os.path.dirname(folder)] = None
    for names, sync in ((files, _sync), (list(folders), _sync_folder)):
        if len(names) <= AT_ONCE:
            for name in names:
                if not is_enough():
                    sync(name)
            continue
        with ThreadPoolExecutor(_BESIDE_EACH_OTHER, "result files to disk") as threads:
            for start in range(0, len(names), MOST_AT_ONCE):
                if not is_enough():
                    list(threads.map(sync, names[start : start + MOST_AT_ONCE]))


def _sync_folder(path: str) -> None:
    try:
        with suppress(FileNotFoundError):
            _fsync(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY))
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise


def _sync(path: str) -> None:
    # A trial's code may have removed its file, put something else in its place, or leased it.
    with suppress(FileNotFoundError, PermissionError, BlockingIOError):
        descriptor = open_plain(path, os.O_RDONLY)
        if descriptor is not None:
            _fsync(path, descriptor)


def _fsync(path: str, descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)
