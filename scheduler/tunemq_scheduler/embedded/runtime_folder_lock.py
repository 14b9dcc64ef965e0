"""The layout of the runtime folder, its lock, and the removal of abandoned folders.

Imports only fast modules, because the watchdog uses it.
"""

from __future__ import annotations

import fcntl
import os
import time

from tunemq_scheduler.embedded.bound_processes import remove_tree

PREFIX = "tunemq-farm-"
SOCKET = "redis.sock"
#: The services' names; the node's is also the name of its scratch folder.
REDIS, NODE = "redis", "node"
WATCHDOG_LOG = "watchdog.log"
#: The file with the environment to prepare: the node reads it once and deletes it.
PREWARM = "prewarm.json"

_LOCK = "lock"
#: Seconds for which a folder without a lock is kept: its script may just start its watchdog.
_YOUNG_S = 60.0


def log_of(service: str) -> str:
    """Return the name of the file with a service's output."""
    return f"{service}.log"


def excuse(service: str) -> str:
    """Return the message that excuses a service's newest death."""
    return f"excuse {service}\n"


def take_lock(folder: str) -> int:
    """Mark a folder as in use for as long as the returned descriptor is open.

    Raises:
        OSError: the folder is gone.
    """
    path = os.path.join(folder, _LOCK)
    descriptor = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(path + ".new", path)  # so no process ever sees it unlocked
    return descriptor


def remove_abandoned(beside: str) -> None:
    """Delete the runtime folders next to ``beside`` whose watchdogs were killed."""
    place = os.path.dirname(beside)
    for name in os.listdir(place):
        folder = os.path.join(place, name)
        if name.startswith(PREFIX) and folder != beside and _is_abandoned(folder):
            remove_tree(folder)


def _is_abandoned(folder: str) -> bool:
    try:
        status = os.lstat(folder)
        if status.st_uid != os.getuid() or not os.path.isdir(folder):
            return False
        try:
            descriptor = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return time.time() - status.st_mtime > _YOUNG_S
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except OSError:  # in use, or just being removed
        return False
    return True
