"""A node's GPUs and the processes that use them, which tests control."""

from __future__ import annotations

from tests.unit.workers.fakes import Clock, order, start
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess, Xid
from tunemq_workers.gpu.gpu_availability import GpuAvailability
from tunemq_workers.gpu.gpu_snapshots import DeviceSnapshot, GpuSnapshot
from tunemq_workers.runtime.trial_process_state import TrialProcess

MIB, GIB = 2**20, 2**30
#: The pid of the node, and one of a process from outside the farm.
NODE, STRANGER = 1000, 7


class Gpus:
    """`GpuAvailability` with GPUs of 80 GiB in the state that ``held`` says.

    Attributes:
        held: for each GPU, the bytes that each process holds, whether it lives or not.
        lost: for each GPU, the used bytes that belong to no visible process.
        parents: the parent's pid of each visible process.
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
        """Fork a trial process."""
        self._processes += 1
        begin = start(devices=dict.fromkeys(uuids, 0.5), key=key)
        process = TrialProcess(f"h{self._processes}", order(trial, begin), begin, None, pid)
        self.parents[pid] = NODE
        self.availability.took(process)
        return process

    def end(self, process, *, keeps=False):
        """End a trial process and its children; with ``keeps`` its GPU memory stays used."""
        del self.parents[process.pid]
        if not keeps:
            for held in self.held.values():
                held.pop(process.pid, None)
        self.availability.gone(process.name)

    def snapshot(self, *xids, asked_at=None, unusable=None, says_memory=True):
        """Query the driver."""
        devices = {
            uuid: DeviceSnapshot(
                self.lost[uuid] + sum(size or 0 for size in held.values()) if says_memory else None,
                tuple(
                    GpuProcess(pid, size, "python", self._line(pid)) for pid, size in held.items()
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
