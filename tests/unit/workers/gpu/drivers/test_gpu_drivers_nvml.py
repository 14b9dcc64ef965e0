"""The NVML driver for GPUs, on `tests.fake_nvml`, which is compared with the real library."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.fake_gpus import FOLDER, H100, FakeGpus, gpu, part, take_memory
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers import nvml
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess, PhysicalGpu, Xid
from tunemq_workers.gpu.drivers.nvml import NvmlDriver, open_driver
from tunemq_workers.gpu.drivers.xids import meaning, unusable_after

ME = os.getpid()


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeGpus:
    """Fake one GPU, and one with two MIG devices."""
    made = FakeGpus(
        tmp_path / "gpus.json",
        [gpu("GPU-a"), gpu("GPU-b", parts=[part("MIG-1", 1), part("MIG-2", 2)])],
    )
    made.install(monkeypatch)
    return made


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def devices(driver):
    return [device for gpu in driver.physical() for device in gpu.usable]


def test_gpus_and_mig_devices_are_listed(fake):
    driver = open_driver()
    assert isinstance(driver, NvmlDriver)
    model = f"{H100} MIG 1g.10gb"
    parts = (Gpu("MIG-1", model, 10e9), Gpu("MIG-2", model, 10e9))
    assert driver.physical() == [
        PhysicalGpu(Gpu("GPU-a", H100, 80e9)),
        PhysicalGpu(Gpu("GPU-b", H100, 80e9), parts),
    ]
    assert devices(driver) == [Gpu("GPU-a", H100, 80e9), *parts]


@pytest.mark.parametrize("has_driver", [True, False])
def test_driver_without_its_python_package_is_rejected_with_the_fix(
    has_driver, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "_DRIVER", str(tmp_path if has_driver else tmp_path / "none"))
    if has_driver:
        with pytest.raises(ConfigError, match=r"pip install nvidia-ml-py; or .* --gpus 0"):
            open_driver()
    else:
        assert open_driver() is None


def test_memory_in_use_excludes_what_the_driver_reserves(fake):
    fake.change("GPU-a", used=3e9)
    driver = NvmlDriver()
    assert driver.memory_used("GPU-a") == 3e9
    assert driver.memory_used("GPU-b") is None  # the GPU itself runs no processes
    assert driver.memory_used("GPU-nobody") is None
    fake.lack("nvmlDeviceGetMemoryInfo_v2")
    assert driver.memory_used("GPU-a") == 3.6e9  # older drivers do not distinguish the two


def test_processes_on_a_device_have_name_and_memory(fake):
    driver = NvmlDriver()
    assert driver.holders("GPU-a") == []
    fake.hold("GPU-a", ME, 2e9)
    fake.hold("GPU-a", 1, None)
    mine, first = driver.holders("GPU-a")
    assert mine == GpuProcess(ME, 2e9, name_of(ME))
    assert (first.pid, first.memory) == (1, None)
    take_memory(fake.file, "MIG-2", 1e9)
    assert driver.holders("MIG-2") == [GpuProcess(ME, 1e9, name_of(ME))]
    assert driver.holders("MIG-1") == []
    assert driver.memory_used("MIG-2") == 1e9
    fake.lack("nvmlDeviceGetComputeRunningProcesses")
    assert driver.holders("GPU-a") == []


def test_metrics_are_per_device_and_omit_unknown_values(fake):
    fake.change("GPU-a", utilisation=40, used=1e9)
    driver = NvmlDriver()
    assert driver.gpu_metrics() == [
        GpuMetrics("GPU-a", 0.4, 1e9),
        GpuMetrics("MIG-1", None, 0.0),
        GpuMetrics("MIG-2", None, 0.0),
    ]
    fake.change("GPU-a", lost=True)
    assert [one.uuid for one in driver.gpu_metrics()] == ["MIG-1", "MIG-2"]
    fake.file.unlink()
    with pytest.raises(OSError, match="NVML: nvmlDeviceGetCount"):
        driver.gpu_metrics()


def test_energy_is_counted_by_the_device_or_summed_from_its_power(fake, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(nvml.time, "monotonic", lambda: clock[0])
    fake.change("GPU-a", energy_mj=5_000_000)
    fake.change("GPU-b", energy_mj=8_000_000)
    driver = NvmlDriver()
    assert driver.energy("GPU-a") == 5000
    assert driver.energy("MIG-1") == 1000  # its share is the eighth of the memory that it has
    fake.change("GPU-a", energy_mj=None, power_mw=200_000)
    begin = driver.energy("GPU-a")
    clock[0] += 10
    fake.change("GPU-a", power_mw=400_000)
    assert driver.energy("GPU-a") - begin == 3000
    fake.change("GPU-a", power_mw=None)
    assert driver.energy("GPU-a") is None


def test_healthy_device_is_not_among_the_unhealthy(fake):
    assert NvmlDriver().health() == {}
    fake.change("GPU-a", remapped=[3, 0, 1, 0])  # the GPU disables rows that wait to be remapped
    assert NvmlDriver().health() == {}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"ecc_uncorrected": 2}, r"uncorrected memory errors \(ECC\)"),
        ({"remapped": [0, 1, 0, 1]}, "could not be remapped"),
        ({"lost": True}, "lost"),
    ],
)
def test_unhealthy_gpu_and_all_its_mig_devices_are_reported(fake, said, reason):
    driver = NvmlDriver()
    fake.change("GPU-b", **said)
    sick = driver.health()
    assert sick.keys() == {"MIG-1", "MIG-2"}
    assert re.search(reason, sick["MIG-1"])
    fake.change("GPU-a", **said)
    assert re.search(reason, driver.health()["GPU-a"])


def test_removed_mig_device_is_reported(fake):
    driver = NvmlDriver()
    fake.change("GPU-b", parts=[part("MIG-2", 2)])
    assert driver.health() == {"MIG-1": "this MIG device is not there any more"}


def test_driver_without_health_information_reports_none(fake):
    driver = NvmlDriver()
    fake.change("GPU-a", ecc_uncorrected=None, remapped=None)
    fake.lack("nvmlDeviceGetRemappedRows", "nvmlDeviceGetTotalEccErrors")
    assert driver.health() == {}


def test_gpu_that_is_lost_from_the_beginning_is_left_out(fake):
    fake.change("GPU-a", lost=True)
    assert [gpu.uuid for gpu in devices(NvmlDriver())] == ["MIG-1", "MIG-2"]


def test_xids_are_reported_for_the_devices_concerned(fake):
    driver = NvmlDriver()
    assert driver.xids(0.0) == []
    assert fake.is_listening()
    fake.xid("GPU-a", 79)
    fake.xid("GPU-b", 13, instance=2)
    fake.xid("GPU-b", 95)
    assert driver.xids(0.0) == [
        Xid("GPU-a", 79),
        Xid("MIG-2", 13),
        Xid("MIG-1", 95),
        Xid("MIG-2", 95),
    ]
    assert driver.xids(0.0) == []


def test_values_that_older_bindings_lack_or_cannot_decode_are_unknown(fake, monkeypatch):
    pynvml = importlib.import_module("pynvml")
    driver = NvmlDriver()
    fake.hold("GPU-a", ME, 2e9)

    def undecodable(pid):
        return b"\xff".decode()

    monkeypatch.setattr(pynvml, "nvmlSystemGetProcessName", undecodable)
    assert driver._name(2**22 + 1) == ""
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMPSComputeRunningProcesses")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetRemappedRows")
    assert driver.holders("GPU-a") == [GpuProcess(ME, 2e9, name_of(ME))]
    assert driver.health() == {}


def test_lost_gpu_that_cannot_report_its_name_is_no_crash(fake):
    driver = NvmlDriver()
    assert driver.xids(0.0) == []
    fake.xid("GPU-a", 79)
    fake.change("GPU-a", lost=True)
    assert driver.xids(0.0) == []
    assert driver.health().keys() == {"GPU-a"}


def test_driver_without_events_reports_no_xids(fake):
    fake.lack("nvmlDeviceRegisterEvents")
    fake.xid("GPU-a", 79)
    assert NvmlDriver().xids(0.0) == []


def test_machine_without_a_driver_has_none(fake):
    fake.file.unlink()
    with pytest.raises(OSError, match="NVML: nvmlInit"):
        NvmlDriver()


def test_some_xids_blame_the_application_and_some_withhold_the_device():
    assert unusable_after(79) == meaning(79) == "XID 79: the GPU has fallen off the bus"
    for number in (13, 31, 43, 45, 68, 94):
        assert not unusable_after(number)
        assert ": " in meaning(number)
    for number in (48, 62, 64, 74, 95, 119):
        assert unusable_after(number)
    assert not unusable_after(777)
    assert meaning(777) == "XID 777"


# --- the fake -------------------------------------------------------------------------------------


def bindings(monkeypatch: pytest.MonkeyPatch) -> object | None:
    """Return the real bindings, whatever comes first on the path."""
    rest = [entry for entry in sys.path if entry != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("pynvml", rest)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pynvml", module)  # it looks itself up
    spec.loader.exec_module(module)
    return module


def test_fake_has_the_names_of_the_real_bindings(fake, monkeypatch):
    imitation = importlib.import_module("pynvml")
    real = bindings(monkeypatch)
    if real is None:
        pytest.skip("nvidia-ml-py is not installed")
    assert imitation.__file__.startswith(FOLDER)
    functions = [name for name in vars(imitation) if re.match("nvml[A-Z].*[a-z]$|nvml.*_v2$", name)]
    for name in [name for name in functions if callable(getattr(imitation, name))]:
        theirs = inspect.signature(getattr(real, name)).parameters
        ours = inspect.signature(getattr(imitation, name)).parameters
        assert list(theirs) == list(ours), name
    for name in [name for name in vars(imitation) if name.startswith("NVML_")]:
        assert getattr(real, name) == getattr(imitation, name), name
    for name in ("nvmlMemory_v2", "nvmlEventTypeXidCriticalError"):
        assert getattr(real, name) == getattr(imitation, name)
    lost = imitation.NVMLError(imitation.NVML_ERROR_GPU_IS_LOST)
    assert type(lost).__name__ == "NVMLError_GpuIsLost"
    assert type(real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)).__name__ == type(lost).__name__


def test_fake_has_all_names_that_the_driver_uses(fake):
    imitation = importlib.import_module("pynvml")
    asked = set(re.findall(r"\bnvml[A-Z]\w+|\bNVML_\w+", inspect.getsource(nvml)))
    assert asked
    assert not [name for name in asked if not hasattr(imitation, name)]
