"""What lies where in the runtime folder, and which folders belong to nobody any more.

Imports only what costs no time: the watchdog uses it.
"""

from __future__ import annotations

import fcntl
import os
import time

from tunemq_scheduler.embedded.bound_processes import remove_tree

PREFIX = "tunemq-farm-"
SOCKET = "redis.sock"
#: The services' names; the node's is also that of its scratch folder.
REDIS, NODE = "redis", "node"
WATCHDOG_LOG = "watchdog.log"
#: What the node gets ready for: it reads the file once and removes it.
PREWARM = "prewarm.json"

_LOCK = "lock"
#: A folder without a lock is left alone for so long: its script may be about to start its watchdog.
_YOUNG_S = 60.0


def log_of(service: str) -> str:
    """The name of the file with a service's output."""
    return f"{service}.log"


def excuse(service: str) -> str:
    """What the script tells the watchdog where a service's newest death was not its own fault."""
    return f"excuse {service}\n"


def take_lock(folder: str) -> int:
    """Mark a folder as in use for as long as the returned descriptor is open.

    Raises:
        OSError: the folder is gone.
    """
    path = os.path.join(folder, _LOCK)
    descriptor = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(path + ".new", path)  # nobody ever sees it unlocked
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
    except OSError:  # in use, or being removed just now
        return False
    return True
