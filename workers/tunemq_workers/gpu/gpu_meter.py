"""`GpuMeter`: measure trial processes' GPU use by periodic snapshots.

A trial process's memory is the sum over its process tree. If the driver does not report memory by
process, or reports pids that are not visible (in a container), the meter takes the memory above the
amount that was used without trial processes, and divides it by the processes' shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.device_use import DeviceUse
from tunemq_shared.protocol.messages import DevicesUsed, Gpu
from tunemq_workers.gpu.gpu_snapshots import DeviceSnapshot, GpuSnapshot
from tunemq_workers.runtime.trial_process_state import AttemptId, TrialProcess


class _DeviceCounter(msgspec.Struct):
    """The use of one device; ``counted`` is the last reading of its energy counter."""

    share: float
    counted: float | None
    watched_s: float = 0.0
    busy_s: float = 0.0
    memory_peak: float | None = None
    energy_j: float | None = None


class _RunSegment(msgspec.Struct, eq=False):
    """A trial's time in a trial process."""

    process: TrialProcess
    key: AttemptId
    began: float
    uses: dict[str, _DeviceCounter] = {}


class GpuMeter:
    """Measure each trial process's use of its devices. Owned by the node's loop.

    Args:
        gpus: the GPUs that the node offers.
        now: the monotonic clock, in seconds.
    """

    def __init__(self, gpus: Iterable[Gpu], now: Callable[[], float] = time.monotonic) -> None:
        self._models = {gpu.uuid: gpu.model for gpu in gpus}
        self._now = now
        self._segments: dict[str, _RunSegment] = {}
        #: By UUID, bytes used when the device had no trial process, and its energy counter in
        #: joules.
        self._before: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._looked = 0.0

    def began(self, process: TrialProcess) -> None:
        """Begin to measure a trial process that received a trial."""
        segment = _RunSegment(process, process.key, self._now())
        for uuid, share in process.start.devices.items():
            if uuid in self._models:
                segment.uses[uuid] = _DeviceCounter(share, self._counters.get(uuid))
        if segment.uses:
            self._segments[process.name] = segment

    def left(self, process: TrialProcess) -> DevicesUsed | None:
        """Return the use, which ends here; None without devices, or if no process started."""
        segment = self._segments.pop(process.name, None)
        if segment is None or not process.pid:
            return None
        seconds = self._now() - segment.began
        return DevicesUsed(
            *segment.key,
            tuple(
                DeviceUse(
                    uuid,
                    self._models[uuid],
                    seconds,
                    use.share,
                    use.busy_s / use.watched_s if use.watched_s else None,
                    use.memory_peak,
                    use.energy_j,
                )
                for uuid, use in segment.uses.items()
            ),
        )

    def seen(self, snapshot: GpuSnapshot, gpu_metrics: Iterable[GpuMetrics]) -> None:
        """Add a snapshot of all devices; ``gpu_metrics`` contain their utilization, where known."""
        busy = {one.uuid: one.busy for one in gpu_metrics if one.busy is not None}
        for uuid, device in snapshot.devices.items():
            segments = [segment for segment in self._segments.values() if uuid in segment.uses]
            if not segments and device.used is not None:
                self._before[uuid] = device.used
            for segment in segments:
                use = segment.uses[uuid]
                self._take_memory(uuid, device, segment, segments)
                since = snapshot.asked_at - max(self._looked, segment.began)
                if uuid in busy and since > 0:
                    use.watched_s += since
                    use.busy_s += since * busy[uuid]
                if device.energy is not None and use.counted is not None:
                    # A reloaded driver counts from zero again.
                    used = max(0.0, device.energy - use.counted) * use.share
                    use.energy_j = (use.energy_j or 0.0) + used
                use.counted = device.energy
            if device.energy is not None:
                self._counters[uuid] = device.energy
        self._looked = snapshot.asked_at

    def _take_memory(
        self,
        uuid: str,
        device: DeviceSnapshot,
        segment: _RunSegment,
        segments: Iterable[_RunSegment],
    ) -> None:
        use = segment.uses[uuid]
        memory = _held_by(segment.process.pid, device)
        if memory is None:
            before = self._before.get(uuid)
            if device.used is None or before is None:
                return
            shares = sum(one.uses[uuid].share for one in segments)
            above = max(0.0, device.used - before)
            memory = above * use.share / shares if shares else above
        use.memory_peak = max(use.memory_peak or 0.0, memory)


def _held_by(pid: int, device: DeviceSnapshot) -> float | None:
    """Return the bytes that a process tree holds of a device; None if unknown."""
    held = [one.memory for one in device.holdings if pid and pid in one.line]
    if any(memory is None for memory in held):
        return None
    is_all_seen = bool(device.holdings) and all(one.line for one in device.holdings)
    if not held and not is_all_seen:
        return None
    return sum(memory for memory in held if memory is not None)
