"""Looks again and again at how this machine is, in a thread of its own.

A disk, and the driver of GPUs, may make who asks wait for ever. What was seen last is said then.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import Gpu, encode
from tunemq_shared.vitals import GpuVitals, NodeVitals
from tunemq_workers import machine
from tunemq_workers.gpu_drivers import Driver

_PERIOD_S: Final = 2.0

_log = logging.getLogger(__name__)


class MachineWatch:
    """What a node says of its machine.

    Args:
        version: of TuneMQ.
        folder: whose disk is looked at.
        gpus: those that it offers.
        driver: knows what they do, where there is one.
    """

    def __init__(
        self, version: str, folder: str, gpus: Iterable[Gpu] = (), driver: Driver | None = None
    ) -> None:
        #: Set by the node's loop.
        self.hosts = self.outbox = self.cache = 0
        self._folder, self._driver = folder, driver
        self._uuids = {gpu.uuid for gpu in gpus}
        self._seen = NodeVitals(version)
        self._gpus: tuple[GpuVitals, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine watch", daemon=True)
        self._gpu_thread = threading.Thread(target=self._run_gpus, name="gpu watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()
        if self._driver is not None and self._uuids:
            self._gpu_thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def said(self) -> bytes:
        """Its encoded `NodeVitals`; for any thread, and never waits."""
        return encode(
            msgspec.structs.replace(
                self._seen,
                hosts=self.hosts,
                outbox=self.outbox,
                cache=self.cache,
                gpus=self._gpus,
            )
        )

    def _run(self) -> None:
        while True:
            self._look()
            if self._ended.wait(_PERIOD_S):
                return

    def _look(self) -> None:
        disk_free = None
        with suppress(OSError):
            disk = os.statvfs(self._folder)
            disk_free = float(disk.f_bavail * disk.f_frsize)
        self._seen = NodeVitals(
            self._seen.version,
            load=os.getloadavg()[0],
            memory_free=machine.memory_free_bytes(),
            disk_free=disk_free,
        )

    def _run_gpus(self) -> None:
        driver, was_known = self._driver, True
        while driver is not None:
            try:
                found = driver.vitals()
                self._gpus = tuple(one for one in found if one.uuid in self._uuids)
                was_known = True
            except (OSError, ConfigError) as problem:
                self._gpus = ()
                if was_known:
                    _log.warning("gpus.not_heard problem=%r", str(problem))
                was_known = False
            if self._ended.wait(driver.period_s):
                return
