"""What hosts use of the GPUs that they have, added up from what is seen of these every few seconds.

A host has the memory that its family's processes have. Where the driver does not say who has how
much, or names processes that nobody can see (in a container), it is what is used of the device
above what was used while it had no host, by the hosts' shares of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.device_use import DeviceUse
from tunemq_shared.protocol.messages import DevicesUsed, Gpu
from tunemq_workers.gpu.gpu_snapshot import DeviceSnapshot, GpuSnapshot
from tunemq_workers.runtime.trial_process_interfaces import AttemptId, TrialProcess


@dataclass(slots=True)
class _DeviceCounter:
    """Of one device; ``counted`` is up to where its counter of energy was taken in."""

    share: float
    counted: float | None
    watched_s: float = 0.0
    busy_s: float = 0.0
    memory_peak: float | None = None
    energy_j: float | None = None


@dataclass(slots=True, eq=False)
class _RunSegment:
    """A trial's time in a host."""

    process: TrialProcess
    key: AttemptId
    began: float
    uses: dict[str, _DeviceCounter] = field(default_factory=dict)


class GpuMeter:
    """Knows what each host used of its devices. Owned by the node's loop.

    Args:
        gpus: those that the node offers.
        now: the monotonic clock.
    """

    def __init__(self, gpus: Iterable[Gpu], now: Callable[[], float] = time.monotonic) -> None:
        self._models = {gpu.uuid: gpu.model for gpu in gpus}
        self._now = now
        self._segments: dict[str, _RunSegment] = {}
        #: What was used of each device when it had no host, and what its energy's counter said.
        self._before: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._looked = 0.0

    def began(self, process: TrialProcess) -> None:
        """A host was given a trial, and the devices of its start."""
        segment = _RunSegment(process, process.key, self._now())
        for uuid, share in process.start.devices.items():
            if uuid in self._models:
                segment.uses[uuid] = _DeviceCounter(share, self._counters.get(uuid))
        if segment.uses:
            self._segments[process.name] = segment

    def left(self, process: TrialProcess) -> DevicesUsed | None:
        """The trial has left its host; what it used, where it had devices and ever began."""
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
        """Take a snapshot of all devices; ``gpu_metrics`` say how busy they were, where known."""
        busy = {one.uuid: one.busy for one in gpu_metrics if one.busy is not None}
        for uuid, device in snapshot.devices.items():
            segments = [segment for segment in self._segments.values() if uuid in segment.uses]
            if not segments and device.used is not None:
                self._before[uuid] = device.used
            for segment in segments:
                use = segment.uses[uuid]
                self._take_memory(uuid, device, segment, segments)
                self._take_time(use, segment, snapshot.asked_at, busy.get(uuid))
                _take_energy(use, device.energy)
            if device.energy is not None:
                self._counters[uuid] = device.energy
        self._looked = snapshot.asked_at

    def _take_time(
        self, use: _DeviceCounter, segment: _RunSegment, at: float, busy: float | None
    ) -> None:
        since = at - max(self._looked, segment.began)
        if busy is not None and since > 0:
            use.watched_s += since
            use.busy_s += since * busy

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


def _take_energy(use: _DeviceCounter, counter: float | None) -> None:
    if counter is not None and use.counted is not None:
        # A driver that was loaded again counts from zero.
        use.energy_j = (use.energy_j or 0.0) + max(0.0, counter - use.counted) * use.share
    use.counted = counter


def _held_by(pid: int, device: DeviceSnapshot) -> float | None:
    """What a host's family has of a device; None where that cannot be told."""
    held = [one.memory for one in device.holdings if pid and pid in one.line]
    if any(memory is None for memory in held):
        return None
    is_all_seen = bool(device.holdings) and all(one.line for one in device.holdings)
    if not held and not is_all_seen:
        return None
    return sum(memory for memory in held if memory is not None)
