"""`MachineWatch`: collect the node metrics periodically, in a thread.

A disk may block a call for ever; the node then sends the last known values.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from tunemq_shared.base.safe_text import encodable
from tunemq_shared.health.node_metrics import GpuMetrics, NodeDescription, NodeMetrics
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS
from tunemq_shared.protocol.messages import encode
from tunemq_shared.protocol.rejection_counter import RejectionCounter
from tunemq_shared.system.write_probe import write_probe
from tunemq_workers.system import machine
from tunemq_workers.system.library_versions import installed_versions

_PERIOD_S: Final = 2.0

_log = logging.getLogger(__name__)


class MachineWatch:
    """The node metrics of a machine.

    Args:
        version: TuneMQ's version.
        folder: the folder whose disk is measured.
        gpus: returns the metrics of the offered GPUs, without blocking.
        about: the node's description; installed libraries are added to it.
        rejected: counts rejected messages.
        folders: folders of trials, in which the node must be able to create files.
    """

    def __init__(
        self,
        version: str,
        folder: str,
        gpus: Callable[[], tuple[GpuMetrics, ...]] = tuple,
        about: NodeDescription | None = None,
        rejected: RejectionCounter | None = None,
        folders: Iterable[str] = (),
    ) -> None:
        #: Set by the node's loop.
        self.trial_processes = self.outbox = self.cache = 0
        self.store = StoreTraffic()
        #: Called in the thread while the folder does not exist.
        self.on_removed: Callable[[], None] = lambda: None
        self._folder, self._gpus = folder, gpus
        self._folders = tuple(folders)
        self._about = about
        self._rejected = RejectionCounter() if rejected is None else rejected
        self._number = 0
        self._seen = NodeMetrics(version, about=about)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def said(self) -> bytes:
        """Return the encoded `NodeMetrics`, without blocking; call it from one thread only."""
        self._number += 1
        rejected = self._rejected.counts()
        return encode(
            msgspec.structs.replace(
                self._seen,
                trial_processes=self.trial_processes,
                outbox=self.outbox,
                cache=self.cache,
                store=self.store,
                gpus=self._gpus(),
                clock=time.time(),
                rejected={f"{kind}:{reason}": count for kind, reason, count in rejected},
                number=self._number,
            )
        )

    def _run(self) -> None:
        if self._about is not None:
            libraries = installed_versions() | self._about.libraries
            self._about = msgspec.structs.replace(self._about, libraries=libraries)
        while True:
            self._look()
            if self._ended.wait(_PERIOD_S):
                return

    def _look(self) -> None:
        disk_free = disk_size = disk_free_inodes = None
        try:
            disk = os.statvfs(self._folder)
        except FileNotFoundError:
            self.on_removed()
        except OSError:
            pass  # these values are unknown then
        else:
            disk_free = float(disk.f_bavail * disk.f_frsize)
            disk_size = float(disk.f_blocks * disk.f_frsize)
            # Some file systems, such as btrfs, have no fixed number of inodes and report 0.
            disk_free_inodes = float(disk.f_favail) if disk.f_files else None
        disk_problem = next(filter(None, map(_problem_of, self._folders)), "")
        if disk_problem != self._seen.disk_problem:
            _log.warning("disk.problem problem=%r", disk_problem)
        self._seen = NodeMetrics(
            self._seen.version,
            load=os.getloadavg()[0],
            memory_free=machine.memory_free_bytes(),
            disk_free=disk_free,
            disk_size=disk_size,
            about=self._about,
            disk_free_inodes=disk_free_inodes,
            disk_problem=disk_problem,
        )


def _problem_of(folder: str) -> str:
    """Say why no file can be created in a folder, or in its nearest parent; "" if one can."""
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    try:
        # No fsync: every few seconds it would slow down trials' writes.
        write_probe(folder, sync=False)
    except OSError as error:
        return encodable(f"{error.strerror}: no file can be made in {folder}")[:LINE_CHARACTERS]
    return ""
