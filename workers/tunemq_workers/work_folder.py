"""A node's working folder: its layout, removal of leftovers, and size limits for logs.

    lock                    held by the node that works here (a farm's node)
    logs/                   of the node's processes: {node,consumer,transfers,log_scanner}.log, and
                            forkserver-N.log; trials cannot enter it
    logs/.outbox-*          spooled events; the node unlinks each file as soon as it is open
    cache/                  copies of checkpoints; managed by `cache_folders`
    blobs/, code/           code, parameters and bundles; managed by `dependencies`
    trials/                 folders of trials whose folders the scheduler cannot read; `unsent-*`
                            could not be sent to the store

A killed node leaves its cache, which the next node reuses, its logs, and perhaps a spool file that
it had not unlinked yet. Everything that a node writes has a limit:
`tunemq_shared.broker.redis_keys.OUTBOX_BYTES` for events, `checkpoint_cache` for checkpoints,
`output_files` for what trials print, and `LIMIT_BYTES` for each log.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from functools import partial
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_workers.broker.outbox_spool import is_spool
from tunemq_workers.logs import output_files
from tunemq_workers.processes.child_process import LOGS, log_path
from tunemq_workers.runtime.disk_jobs import DiskJobs
from tunemq_workers.runtime.reactor import Reactor
from tunemq_workers.system.trial_user import own_files

#: A log that exceeds this size is cut to its newest half.
LIMIT_BYTES: Final = 16 * 2**20
#: The lock file; its presence also marks the folder as TuneMQ's.
LOCK: Final = "lock"
#: The subfolders that trials read and write.
OF_TRIALS: Final = ("cache", "blobs", "code", "trials")
#: Number of log files that all forkservers share.
FORKSERVER_LOGS: Final = 8
#: Seconds between two checks of the logs' sizes.
PERIOD_S: Final = 20.0

_SUFFIX: Final = ".log"

_log = logging.getLogger(__name__)


def check_ours(workdir: str) -> None:
    """Check that no other program's files are where a worker removes its own.

    Raises:
        ConfigError: there are some; names the folder.
    """
    if is_marked(workdir):
        return
    for name in (*OF_TRIALS, LOGS, LOCK):
        path = os.path.join(workdir, name)
        is_ours = not os.path.lexists(path)
        with suppress(OSError):
            is_ours = set(os.listdir(path)) <= {"lost+found"}  # of a disk that is mounted there
        if not is_ours:
            raise ConfigError(
                f"{path} is not TuneMQ's: no worker has worked in {workdir} before, and this one "
                "would remove or replace it. Name another --workdir, such as a new folder."
            )


def is_marked(workdir: str) -> bool:
    """Return whether a worker was started there before: its lock file holds a pid."""
    try:
        # A file "lock" of another program may be anything, also a FIFO.
        lock = os.open(os.path.join(workdir, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(lock).st_mode) and os.read(lock, 32).strip().isdigit()
    finally:
        os.close(lock)


def forkserver_log(folder: str, number: int) -> str:
    """Return the log path of a node's ``number``-th forkserver, counted from 1."""
    return log_path(folder, f"forkserver-{(number - 1) % FORKSERVER_LOGS + 1}")


def remove_leftovers(folder: str) -> int:
    """Remove the spool files of a killed node and return their number.

    Only the node that holds the folder's lock may call this.
    """
    left = [name for name in os.listdir(folder) if is_spool(name)]
    for name in left:
        os.unlink(os.path.join(folder, name))
    return len(left)


def keep_logs_short(timers: Reactor, disk: DiskJobs, folder: str) -> None:
    """Cut the logs in a folder that are too long, now and then periodically."""

    def again(problem: OSError | None) -> None:
        if problem is not None:
            _log.warning("log.not_capped problem=%r", str(problem))
        timers.after(PERIOD_S, partial(keep_logs_short, timers, disk, folder))

    disk.run(folder, lambda: cap_logs(folder), again, again)


def cap_logs(folder: str, limit_bytes: int = LIMIT_BYTES) -> None:
    """Cut the logs of a folder that exceed ``limit_bytes``.

    Raises:
        OSError: a log cannot be read or written; all others are cut.
    """
    problem: OSError | None = None
    with own_files():
        for name in os.listdir(folder):
            if name.endswith(_SUFFIX):
                try:
                    output_files.cap(os.path.join(folder, name), limit_bytes)
                except FileNotFoundError:  # it was removed meanwhile
                    pass
                except OSError as error:
                    problem = error
    if problem is not None:
        raise problem
