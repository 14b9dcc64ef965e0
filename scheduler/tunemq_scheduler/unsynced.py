"""`UnsyncedFiles`: what was written of trials' files, and may not be on the disk yet.

Those files are written without waiting for the disk: what a power cut takes of them is appended
again at the next start, from the turns behind the journal's last snapshot. So before a snapshot
lets go of turns, whatever followed from them has to be on the disk.

Thousands of files may have been written since the snapshot before, at some milliseconds each, and
nobody's decision is to wait for that. So a thread does it, and when it is done what was written
meanwhile is left, which is less each time. Only the last few are waited for.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from tunemq_shared.errors import StoreError

#: So many files are brought to the disk at once; more are left to a thread.
AT_ONCE: Final = 32
#: So many times in a row, at most: what trials go on writing meanwhile is waited for then.
ROUNDS: Final = 4
#: How long the end of a search waits for the thread; a disk that takes longer may never answer.
_CLOSE_WITHIN_S: Final = 5.0
#: What file systems say that cannot do this for a folder.
_NOT_THERE: Final = frozenset({errno.EINVAL, errno.ENOTSUP})


class UnsyncedFiles:
    """Knows the files; one thread uses it, between turns for `settle`."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        #: Of which a full disk did not take everything.
        self._held: set[str] = set()
        self._rounds = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __iter__(self) -> Iterator[str]:
        """All that may not be on the disk."""
        return iter(self._paths)

    @property
    def is_settling(self) -> bool:
        """Whether `settle` has begun what it has not come to the end of."""
        return self._rounds > 0

    def note(self, path: str) -> None:
        """All that there is for this file is written, or about to be."""
        self._paths[path] = None
        self._held.discard(path)

    def hold(self, path: str) -> None:
        """A full disk does not take all that there is for this file; it is written later."""
        self._held.add(path)

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
        if len(paths) > AT_ONCE and self._rounds < ROUNDS:
            self._rounds += 1
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
        self._rounds = 0
        return True

    def close(self) -> None:
        """Leave nothing under way."""
        if self._thread is not None:
            self._thread.join(_CLOSE_WITHIN_S)

    def _sync(self, paths: list[str]) -> None:
        try:
            sync_files(paths)
        except OSError as error:  # raised by `settle`
            self._error = error

    def _complain(self, error: OSError | None) -> None:
        if error is not None:
            raise StoreError(
                f"{error.filename} cannot be brought to the disk: {error.strerror}. "
                "See to the disk, then restore the experiment."
            ) from error


def sync_files(paths: Iterable[str]) -> None:
    """Return when the disk has these files and their names; those that are gone are passed over.

    Raises:
        OSError: it refuses; names the file.
    """
    folders: dict[str, None] = {}
    for path in paths:
        folder = os.path.dirname(path)
        folders[folder] = folders[os.path.dirname(folder)] = None
        _sync(path)
    for folder in folders:
        try:
            _sync(folder)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise


def _sync(path: str) -> None:
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            error.filename = path
            raise
        finally:
            os.close(descriptor)
