"""`GpuWatch`: take snapshots of a node's GPUs periodically, with the processes that hold memory.

A driver call may block for ever, so only the thread of `GpuWatch` calls it while trials run.

Drivers report pids of the machine's initial pid namespace, which mean nothing in a container. So a
process is *seen* only if ``/proc`` contains it; of others only their memory is known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.messages import Gpu
from tunemq_shared.system.processes import parent_of
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess, Xid
from tunemq_workers.gpu.drivers.nvml import NvmlDriver
from tunemq_workers.runtime.reactor import do_nothing

#: Number of holders that a message names, largest first.
_NAMED: Final = 3


_log = logging.getLogger(__name__)


class DeviceSnapshot(msgspec.Struct, frozen=True):
    """The state of one device; None means unknown.

    Attributes:
        used: memory in use by all processes, in bytes.
        holdings: the processes that hold memory.
        energy: energy consumed since some fixed time, in joules.
    """

    used: float | None = None
    holdings: tuple[GpuProcess, ...] = ()
    energy: float | None = None


class GpuSnapshot(msgspec.Struct, frozen=True):
    """The state of a node's devices.

    Attributes:
        asked_at: monotonic time of the request, in seconds; the snapshot reflects at least that
            time.
        devices: by UUID.
        unusable: the devices that must not be used, and why.
        xids: errors that the driver reported since the previous snapshot.
    """

    asked_at: float
    devices: Mapping[str, DeviceSnapshot] = {}
    unusable: Mapping[str, str] = {}
    xids: tuple[Xid, ...] = ()


def look_at(driver: NvmlDriver, uuids: frozenset[str], asked_at: float) -> GpuSnapshot:
    """Ask the driver about these devices; blocks as long as the driver does."""
    devices: dict[str, DeviceSnapshot] = {}
    for uuid in uuids:
        used, holders = driver.memory_used(uuid), driver.holders(uuid)
        seen = (msgspec.structs.replace(one, line=tuple(_line_of(one.pid))) for one in holders)
        devices[uuid] = DeviceSnapshot(used, tuple(seen), driver.energy(uuid))
    unusable = {uuid: why for uuid, why in driver.health().items() if uuid in uuids}
    return GpuSnapshot(asked_at, devices, unusable, tuple(driver.xids(0.0)))


def in_words(holdings: list[GpuProcess]) -> str:
    """Describe the largest holders for people."""
    largest = sorted(holdings, key=lambda one: one.memory or 0.0, reverse=True)
    more = f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
    return ", ".join(map(str, largest[:_NAMED])) + more


def _line_of(pid: int | None) -> Iterator[int]:
    while pid and (parent := parent_of(pid)) is not None:
        yield pid
        pid = parent


class GpuWatch:
    """Take a snapshot every ``driver.period_s`` seconds, and earlier on request.

    Args:
        driver: the GPU driver.
        gpus: the GPUs that the node offers.
        post: makes the node's loop call a function.
    """

    def __init__(
        self, driver: NvmlDriver, gpus: Iterable[Gpu], post: Callable[[Callable[[], object]], None]
    ) -> None:
        #: Takes each snapshot; called by the loop.
        self.on_snapshot: Callable[[GpuSnapshot], object] = do_nothing
        #: The newest metrics of the devices; empty if the driver failed to report any.
        self.gpu_metrics: tuple[GpuMetrics, ...] = ()
        self._driver, self._post = driver, post
        self._uuids = frozenset(gpu.uuid for gpu in gpus)
        self._changed = threading.Condition()
        self._due = 0.0
        self._has_ended = False
        self._was_known = self._was_seen = True
        self._thread = threading.Thread(target=self._run, name="gpu watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current driver call."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def poll_within(self, delay_s: float) -> None:
        """Take the next snapshot within ``delay_s`` seconds."""
        with self._changed:
            self._due = min(self._due, time.monotonic() + delay_s)
            self._changed.notify()

    def _run(self) -> None:
        metrics_due = 0.0
        while not self._has_ended:
            with self._changed:
                now = time.monotonic()
                if self._due > now:
                    self._changed.wait(self._due - now)
                    continue
                self._due = now + self._driver.period_s
            self._take_snapshot(now)
            if now >= metrics_due:
                metrics_due = now + self._driver.period_s
                self._take_gpu_metrics()

    def _take_snapshot(self, now: float) -> None:
        try:
            snapshot = look_at(self._driver, self._uuids, now)
        except Exception as problem:  # noqa: BLE001 - logged; no snapshot this time
            if self._was_seen:
                _log.warning("gpus.not_seen problem=%r", repr(problem), exc_info=True)
            self._was_seen = False
        else:
            self._was_seen = True
            self._post(lambda: self.on_snapshot(snapshot))

    def _take_gpu_metrics(self) -> None:
        try:
            found = self._driver.gpu_metrics()
        except Exception as problem:  # noqa: BLE001 - logged; the metrics are unknown
            if self._was_known:
                _log.warning("gpus.not_heard problem=%r", str(problem) or repr(problem))
            self._was_known, self.gpu_metrics = False, ()
        else:
            self._was_known = True
            self.gpu_metrics = tuple(one for one in found if one.uuid in self._uuids)
