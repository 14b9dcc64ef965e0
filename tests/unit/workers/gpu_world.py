"""GPUs of a node, and who holds them, moved by a test."""

from __future__ import annotations

from tests.unit.workers.fakes import Clock, order, start
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers import Xid
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.gpu.gpu_snapshot import DeviceSnapshot, GpuMemoryHolder, GpuSnapshot
from tunemq_workers.runtime.trial_process_interfaces import TrialProcess

MIB, GIB = 2**20, 2**30
#: The node's process, and that of somebody who is not of the farm.
NODE, STRANGER = 1000, 7


class Gpus:
    """A watchdog, with GPUs of 80 GiB that are what ``held`` says.

    Attributes:
        held: of each GPU by process what it holds, whether it lives or not.
        lost: what is used of each by nobody that is seen.
        parents: of processes that can be seen.
    """

    def __init__(self, *uuids, locks=None):
        self.clock = Clock()
        self.held = {uuid: {} for uuid in uuids}
        self.lost = dict.fromkeys(uuids, 0)
        self.parents = {NODE: 1, STRANGER: 1, 1: 0}
        self.looks_due = []
        self.withheld = []
        self.warnings = []
        self.changes = 0
        gpus = [Gpu(uuid, "H100", 80 * GIB) for uuid in uuids]
        self.availability = GpuAvailability(
            gpus,
            self.clock,
            self.looks_due.append,
            now=lambda: self.clock.now,
            me=NODE,
            locks=locks,
        )
        self.availability.on_withheld = self.withheld.append
        self.availability.on_warning = lambda key, text: self.warnings.append((key, text))
        self.availability.on_change = self._changed
        self._processes = 0

    def _changed(self):
        self.changes += 1

    def process(self, pid, *uuids, key="events", trial="t"):
        """Fork a host."""
        self._processes += 1
        begin = start(devices=dict.fromkeys(uuids, 0.5), key=key)
        process = TrialProcess(f"h{self._processes}", order(trial, begin), begin, None, pid)
        self.parents[pid] = NODE
        self.availability.took(process)
        return process

    def end(self, process, *, keeps=False):
        """Nothing is left of a host's process; with ``keeps``, but its memory."""
        del self.parents[process.pid]
        if not keeps:
            for held in self.held.values():
                held.pop(process.pid, None)
        self.availability.gone(process.name)

    def snapshot(self, *xids, asked_at=None, unusable=None, says_memory=True):
        """Have the driver asked."""
        devices = {
            uuid: DeviceSnapshot(
                self.lost[uuid] + sum(size or 0 for size in held.values()) if says_memory else None,
                tuple(
                    GpuMemoryHolder(pid, "python", size, self._line(pid))
                    for pid, size in held.items()
                ),
            )
            for uuid, held in self.held.items()
        }
        at = self.clock.now if asked_at is None else asked_at
        self.availability.seen(
            GpuSnapshot(at, devices, unusable or {}, tuple(Xid(*xid) for xid in xids))
        )

    def _line(self, pid):
        line = []
        while pid in self.parents:
            line.append(pid)
            pid = self.parents[pid]
        return tuple(line)

    def is_clear(self, *uuids):
        return self.availability.obstacle(uuids) is None

    def why(self, *uuids):
        obstacle = self.availability.obstacle(uuids)
        return obstacle and obstacle.reason
