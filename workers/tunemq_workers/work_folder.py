"""A node's working folder: what a dead node left in it goes, and logs stay below a size.

    lock                    who works here (a node of a farm)
    node.log, consumer.log, transfers.log, log_scanner.log, forkserver-N.log
    cache/                  copies of checkpoints; `cache_folders` looks after it
    blobs/, code/           code, parameters and bundles; `dependencies` looks after them
    trials/                 the folders of trials that have none that the scheduler can read
    .outbox-*               events that did not fit in memory: files that lose their name at once

A node that was killed leaves its cache, which is of use, its logs, which somebody may want to read,
and perhaps an outbox that had its name still. Everything that a node writes has its share of the
disk: `tunemq_shared.broker.redis_keys.OUTBOX_BYTES` for events, `cache_limits` for checkpoints,
`outputs` for what a trial prints, and `LIMIT_BYTES` for each log.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from functools import partial
from typing import Final

from tunemq_workers.broker.outbox_spool import is_spool
from tunemq_workers.logs import output_files
from tunemq_workers.runtime.checkpoint_interfaces import DiskJobs, Timers
from tunemq_workers.system.trial_user import own_files

#: Above this size a log is shortened to its newest half.
LIMIT_BYTES: Final = 16 * 2**20
#: Says who works there; and ever after that the folder is TuneMQ's.
LOCK: Final = "lock"
#: The folders in it that trials read and write.
OF_TRIALS: Final = ("cache", "blobs", "code", "trials")
#: Forkservers share so many logs.
FORKSERVER_LOGS: Final = 8
#: Between two looks.
PERIOD_S: Final = 20.0

_SUFFIX: Final = ".log"
_OWN: Final = re.compile(
    rf"{LOCK}|(node|consumer|transfers|log_scanner|forkserver-\d+){re.escape(_SUFFIX)}"
)

_log = logging.getLogger(__name__)


def forkserver_log(folder: str, number: int) -> str:
    """The log of the ``number``-th forkserver of a node, from 1."""
    return os.path.join(folder, f"forkserver-{(number - 1) % FORKSERVER_LOGS + 1}{_SUFFIX}")


def is_own_file(name: str) -> bool:
    """Whether a file of this name in there is the node's own."""
    return bool(_OWN.fullmatch(name)) or is_spool(name)


def remove_leftovers(folder: str) -> int:
    """Remove what a node that was killed has left; nobody else works here. Returns how much."""
    left = [name for name in os.listdir(folder) if is_spool(name)]
    for name in left:
        os.unlink(os.path.join(folder, name))
    return len(left)


class LogCaps:
    """Keeps a node's own logs below a size while they are written.

    Args:
        timers: for the next look.
        disk: does what takes a while.
        folder: where the logs are.
    """

    def __init__(
        self,
        timers: Timers,
        disk: DiskJobs,
        folder: str,
        *,
        period_s: float = PERIOD_S,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._timers, self._disk, self._folder = timers, disk, folder
        self._period_s, self._limit_bytes = period_s, limit_bytes

    def start(self) -> None:
        """Look now, and from now on."""
        self._disk.run(partial(cap_logs, self._folder, self._limit_bytes), self._again, self._again)

    def _again(self, problem: OSError | None) -> None:
        if problem is not None:
            _log.warning("log.not_capped problem=%r", str(problem))
        self._timers.after(self._period_s, self.start)


def cap_logs(folder: str, limit_bytes: int = LIMIT_BYTES) -> None:
    """Shorten the logs that have become too long.

    Raises:
        OSError: one of them cannot be read or written.
    """
    with own_files():
        for name in os.listdir(folder):
            if name.endswith(_SUFFIX):
                with suppress(FileNotFoundError):  # somebody has cleaned up
                    output_files.cap(os.path.join(folder, name), limit_bytes)
