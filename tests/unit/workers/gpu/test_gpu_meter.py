"""How much of their GPUs trial processes used, from snapshots of these."""

from __future__ import annotations

import pytest

from tests.unit.workers.fakes import FakeConnection, start
from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.device_use import DeviceUse
from tunemq_shared.protocol.messages import DevicesUsed, Gpu, TrialOrder
from tunemq_shared.protocol.result_conditions import TO_THE_END
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess
from tunemq_workers.gpu.gpu_meter import GpuMeter
from tunemq_workers.gpu.gpu_snapshots import DeviceSnapshot, GpuSnapshot
from tunemq_workers.runtime.trial_process_state import TrialProcess

GB = 1e9


class World:
    """One device, "A", and trial processes that share it; a test moves the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.meter = GpuMeter([Gpu("A", "H100", 80 * GB)], now=lambda: self.now)
        self.energy = 0.0
        self._names = 0

    def process(self, pid: int, share: float = 1.0, *, uuid: str = "A") -> TrialProcess:
        self._names += 1
        begin = start(devices={uuid: share})
        order = TrialOrder(f"t{self._names}", 1, TO_THE_END)
        process = TrialProcess(f"h{self._names}", order, begin, FakeConnection())
        self.meter.began(process)
        process.pid = pid
        return process

    def snapshot(
        self,
        *holdings: GpuProcess,
        after_s: float = 2.0,
        busy: float | None = None,
        used: float | None = None,
        energy: float | None = None,
    ) -> None:
        """Take a snapshot ``after_s`` seconds later."""
        self.now += after_s
        device = DeviceSnapshot(used, holdings, energy)
        self.meter.seen(GpuSnapshot(self.now, {"A": device}), [GpuMetrics("A", busy, used)])

    def use(self, process: TrialProcess) -> DeviceUse:
        told = self.meter.left(process)
        assert told is not None
        assert (told.trial, told.attempt) == process.key
        (use,) = told.devices
        return use


def of(*line: int, memory: float | None = None) -> GpuProcess:
    """Return the holding of a process, given its pid, its parent's pid and so on."""
    return GpuProcess(line[0], memory, "python", line)


@pytest.fixture
def world() -> World:
    made = World()
    made.snapshot(used=1 * GB, energy=1000.0)
    return made


def test_memory_of_a_process_is_that_of_its_process_tree_only(world):
    first, second = world.process(10, 0.5), world.process(20, 0.5)
    world.snapshot(of(12, 10, 1, memory=3 * GB), of(10, 1, memory=1 * GB), of(20, 1, memory=7 * GB))
    world.snapshot(
        of(12, 10, 1, memory=1 * GB), of(77, 1, memory=50 * GB), of(20, 1, memory=9 * GB)
    )
    assert world.use(first).memory_peak == 4 * GB
    assert world.use(second).memory_peak == 9 * GB


@pytest.mark.parametrize(
    "holdings",
    [(), (GpuProcess(4711, 30 * GB),), (of(10, 1), of(20, 1))],
    ids=["no process named", "pids from outside the container", "without bytes"],
)
def test_memory_without_known_owners_is_the_increase_divided_by_shares(world, holdings):
    first, second = world.process(10, 0.75), world.process(20, 0.25)
    world.snapshot(*holdings, used=21 * GB)
    world.snapshot(*holdings, used=5 * GB)
    assert world.use(first).memory_peak == 15 * GB
    assert world.use(second).memory_peak == 5 * GB


def test_process_that_has_opened_no_device_uses_no_memory(world):
    process = world.process(10)
    world.snapshot(of(77, 1, memory=5 * GB), used=6 * GB)
    assert world.use(process).memory_peak == 0


def test_utilisation_is_the_mean_of_the_device_while_the_process_had_it(world):
    world.now += 10.0  # no trial process used it
    process = world.process(10, 0.5)
    world.snapshot(busy=1.0, after_s=1.0)
    world.snapshot(busy=0.2, after_s=3.0)
    world.snapshot(busy=None)  # the driver returned no value
    use = world.use(process)
    assert (use.uuid, use.model, use.share) == ("A", "H100", 0.5)
    assert use.utilisation == pytest.approx(0.4)
    assert use.seconds == pytest.approx(6.0)


def test_energy_of_a_process_is_its_share_and_survives_a_new_counter(world):
    process = world.process(10, 0.5)
    world.snapshot(energy=1400.0)
    world.snapshot(energy=100.0)  # the driver was reloaded
    world.snapshot(energy=None)
    world.snapshot(energy=300.0)  # the time of the reload is unknown
    world.snapshot(energy=500.0)
    assert world.use(process).energy_j == (400 + 200) / 2


def test_trial_without_snapshots_has_only_its_time(world):
    process = world.process(10)
    world.now += 0.5
    assert world.use(process) == DeviceUse("A", "H100", pytest.approx(0.5))


def test_process_that_gets_another_trial_is_counted_anew(world):
    process = world.process(10)
    world.snapshot(of(10, 1, memory=9 * GB))
    assert world.use(process).memory_peak == 9 * GB
    process.order = TrialOrder("later", 3, TO_THE_END)
    world.meter.began(process)
    world.snapshot(of(10, 1, memory=2 * GB))
    told = world.meter.left(process)
    assert (told.trial, told.attempt, told.devices[0].memory_peak) == ("later", 3, 2 * GB)


def test_processes_without_devices_and_those_that_never_began_report_nothing(world):
    assert world.meter.left(world.process(0)) is None
    assert world.meter.left(world.process(10, uuid="0")) is None
    process = world.process(10)
    assert isinstance(world.meter.left(process), DevicesUsed)
    assert world.meter.left(process) is None
