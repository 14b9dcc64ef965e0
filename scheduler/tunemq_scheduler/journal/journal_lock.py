"""`JournalLock`: allows one writer per journal, and names the process that holds it."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

from tunemq_scheduler.journal.journal_files import LOCK, TURNS_SUFFIX
from tunemq_shared.base.errors import JournalError, JournalLocked


class JournalLock:
    """Held from its creation to `close`, or to the death of the process.

    A process that is forked in between neither holds it nor delays its release.

    Args:
        folder: the journal's existing folder.
        experiment: its name, for the error message of other processes.

    Raises:
        JournalLocked: another process, or another journal in this process, holds it; says which.
        JournalError: the file cannot be created.
    """

    def __init__(self, folder: Path, experiment: str) -> None:
        self._path = folder / LOCK
        try:
            # A user who may read the file could hold the lock.
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{self._path} cannot be made: {error.strerror}.") from error
        # Earlier versions made it readable. It may also be another user's.
        with contextlib.suppress(OSError):
            os.fchmod(self._descriptor, 0o600)
        try:
            self._take(experiment)
        except BaseException:  # passed on to the caller
            self.forget()
            raise
        _held.add(self)

    def close(self) -> None:
        """Release the lock."""
        _held.discard(self)
        if self._descriptor >= 0:
            # A process that was just forked may still have a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor; in a forked process this does not release the parent's lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self, experiment: str) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalLocked(
                f"{self._path.parent} is being written already: {_holder(self._descriptor)}; last "
                f"heard {_silent_s(self._path.parent):.0f} s ago. Wait for its end, or end it."
            ) from error
        except OSError as error:
            raise JournalError(f"{self._path} cannot be locked: {error.strerror}.") from error
        now = dt.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        holder = (
            f"process {os.getpid()} on {socket.gethostname()} has had it since {now}, for "
            f"experiment {experiment}"
        )
        # If the disk is full, other processes' messages lack this text, which is harmless.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{holder}\n".encode(), 0)


def is_being_written(folder: Path) -> bool:
    """Whether a process of this machine holds the lock of a journal, if the kernel shows it."""
    try:
        inode = (folder / LOCK).stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(
        kind == "FLOCK" and file.endswith(f":{inode}")
        for _, kind, _, _, _, file, *_ in map(str.split, locks.splitlines())
    )


def _holder(descriptor: int) -> str:
    said = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
    return said or "by an unknown process"


def _silent_s(folder: Path) -> float:
    """Return how long nothing was written to a journal, in seconds."""
    try:
        written = max(one.stat().st_mtime for one in (folder, *folder.glob(f"*{TURNS_SUFFIX}")))
    except FileNotFoundError:  # the holder has just removed an old file
        return 0.0
    return max(0.0, time.time() - written)


#: A descriptor in a forked process would hold the lock after its owner's death.
_held: weakref.WeakSet[JournalLock] = weakref.WeakSet()


def _drop_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_drop_all)
