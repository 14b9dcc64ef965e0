"""`UnsyncedFiles`: the trials' files that were written and may not be on the disk yet.

Loggers write these files without waiting for the disk: after a power cut, the next start appends
lost rows again, from the turns behind the journal's last snapshot. So before a snapshot replaces
turns, everything that followed from them must be on the disk.

Thousands of files may have been written since the last snapshot, at some milliseconds each, and the
loop must not wait for that. So a thread syncs them, round after round; files written meanwhile are
left for the next round, which is shorter each time. The loop itself syncs only the last few, or
those to which running trials write continuously. If even those are many, there is no snapshot for
now, and the journal grows.
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

#: The most files that the loop syncs itself; more are left to the thread.
AT_ONCE: Final = 32
#: The same, if rounds do not become shorter.
MOST_AT_ONCE: Final = 1024
#: The number of parallel syncs: a file system syncs many files as quickly as one.
_BESIDE_EACH_OTHER: Final = 16
#: Seconds that the end of a search waits for the thread; a slower disk may never answer.
_CLOSE_WITHIN_S: Final = 5.0
#: Errors of file systems that cannot sync a folder.
_NOT_THERE: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOTDIR})


class UnsyncedFiles:
    """A set of unsynced files; one thread uses it, and calls `settle` between turns."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        #: Files with data that a full disk did not accept.
        self._held: set[str] = set()
        #: The number of files in the last round; None without a round since the last snapshot.
        self._last_round: int | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __iter__(self) -> Iterator[str]:
        """Iterate over all files that may not be on the disk."""
        return iter(self._paths)

    @property
    def is_settling(self) -> bool:
        """Whether `settle` has begun and not finished."""
        return self._last_round is not None

    @property
    def is_held(self) -> bool:
        """Whether a full disk has not accepted everything."""
        return bool(self._held)

    def note(self, path: str) -> None:
        """Add a file whose data is written, or about to be."""
        self._paths[path] = None
        self._held.discard(path)

    def hold(self, path: str) -> None:
        """Add a file with data that a full disk does not accept and that is written later."""
        self._held.add(path)

    def forget(self) -> None:
        """Forget all files: no snapshot is possible, so the journal keeps the turns behind them."""
        self._paths.clear()

    def settle(self) -> bool:
        """Sync all files; return whether everything written until now is on the disk.

        If not, a thread continues beside the search: call it again after the next turn.

        Raises:
            StoreError: the disk reports an error.
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
        """Wait briefly for the thread; no snapshot will follow."""
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
    """Sync these files and their names to the disk; ignore files that no longer exist.

    Args:
        is_enough: checked before each file; True skips the rest.

    Raises:
        OSError: a sync failed; the error names the file.
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
    # A trial's code may have removed, replaced or leased its file.
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
