"""The thread that queries the GPU driver, and its schedule."""

from __future__ import annotations

import queue
import threading

import pytest

from tests.support.waiting import eventually
from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess
from tunemq_workers.gpu.gpu_snapshots import GpuWatch


class Driver:
    """A driver that answers its first query, and each further one when the test allows it."""

    def __init__(self, period_s):
        self.period_s = period_s
        self.begun, self.asked = 0, []
        self.is_silent = self.is_mad = False
        self.gate = threading.Semaphore(1)

    def memory_used(self, uuid):
        self.begun += 1
        assert self.gate.acquire(timeout=60)
        self.asked.append(uuid)
        if self.is_mad:
            raise RuntimeError("unexpected")
        return 5.0

    def holders(self, uuid):
        return [GpuProcess(1)]

    def energy(self, uuid):
        return None

    def health(self):
        return {}

    def xids(self, timeout_s):
        return []

    def gpu_metrics(self):
        if self.is_mad:
            raise RuntimeError("nor this")
        if self.is_silent:
            raise OSError("the driver is not there")
        return [GpuMetrics("A", 0.5, 5.0), GpuMetrics("B", 0.5, 5.0)]


@pytest.fixture
def watching():
    running = []

    def start(period_s=600.0):
        snapshots = queue.Queue()
        driver = Driver(period_s)
        watch = GpuWatch(driver, [Gpu("A")], lambda call: call())
        watch.on_snapshot = snapshots.put
        watch.start()
        running.append((watch, driver))
        return watch, driver, snapshots

    yield start
    for watch, driver in running:
        watch.close()
        driver.gate.release()
        watch._thread.join(60)


def test_driver_is_queried_at_once_and_again_on_an_urgent_request(watching):
    watch, driver, snapshots = watching()
    first = snapshots.get(timeout=60)
    assert first.devices["A"].used == 5.0
    assert first.devices["A"].holdings[0].pid == 1
    watch.poll_within(0.0)
    driver.gate.release()
    second = snapshots.get(timeout=60)
    assert second.asked_at > first.asked_at
    assert driver.asked == ["A", "A"]


def test_urgent_request_during_a_query_starts_one_more(watching):
    watch, driver, snapshots = watching()
    snapshots.get(timeout=60)
    watch.poll_within(0.0)
    eventually(lambda: driver.begun == 2)
    watch.poll_within(0.0)
    driver.gate.release(2)
    assert snapshots.get(timeout=60).asked_at < snapshots.get(timeout=60).asked_at


def test_driver_without_use_of_devices_is_queried_again(watching):
    watch, driver, _ = watching(period_s=0.01)
    driver.gate.release(100_000)
    eventually(lambda: watch.gpu_metrics == (GpuMetrics("A", 0.5, 5.0),))
    driver.is_silent = True
    eventually(lambda: not watch.gpu_metrics)
    driver.is_silent = False
    eventually(lambda: watch.gpu_metrics)


def test_driver_that_fails_unexpectedly_is_queried_again_and_reported_once(watching, caplog):
    watch, driver, snapshots = watching(period_s=0.01)
    snapshots.get(timeout=60)
    driver.is_mad = True
    driver.gate.release(5)
    eventually(lambda: driver.begun >= 7)  # five queries have failed, and the next one runs
    assert snapshots.empty()
    driver.is_mad = False
    driver.gate.release(100_000)
    assert snapshots.get(timeout=60).devices["A"].used == 5.0
    eventually(lambda: watch.gpu_metrics)
    assert [one.msg.split()[0] for one in caplog.records].count("gpus.not_seen") == 1
