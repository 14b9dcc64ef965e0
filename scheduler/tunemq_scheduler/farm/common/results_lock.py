"""Keeps two farms from using one results folder, which would take searches from each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from tunemq_scheduler.farm.common.small_files import make_folder, rejected
from tunemq_shared.base.errors import ConfigError

_LOCK: Final = "farm.lock"
_MOST_BYTES: Final = 4096


def hold_results(own: Path, redis: str) -> int:
    """Hold a results folder for a farm, until the returned descriptor is closed.

    A scheduler of the same farm may hold it, too: the farm's lease decides between those.

    Args:
        own: the farm's own folder in it.
        redis: the address of the farm's Redis, without credentials.

    Raises:
        ConfigError: the scheduler of another farm uses the folder; says which.
        JournalError: the lock's file cannot be made.
    """
    make_folder(own)
    path = own / _LOCK
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise rejected(path, "made", error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").strip()
        if holder and holder.partition(" ")[0] != redis:
            os.close(descriptor)
            raise ConfigError(
                f"The scheduler of another farm uses {own.parent}: {holder}. Give each farm"
                " another results folder: tunemq scheduler --results DIR."
            ) from None
        return descriptor
    except OSError:  # a file system without locks
        return descriptor
    with contextlib.suppress(OSError):  # a full disk: others' messages lack this text
        os.ftruncate(descriptor, 0)
        told = f"{redis} (process {os.getpid()} on {socket.gethostname()})"
        os.pwrite(descriptor, told.encode()[:_MOST_BYTES], 0)
    return descriptor
