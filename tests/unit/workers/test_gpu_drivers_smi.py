"""What the program nvidia-smi says of GPUs, where the bindings of their driver are missing."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import Gpu
from tunemq_shared.vitals import GpuVitals
from tunemq_workers.gpu_drivers import Holder, NvidiaSmi, PhysicalGpu, nvidia_smi, open_driver
from tunemq_workers.gpu_looks import look_at

MIB = 2.0**20


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has another program be nvidia-smi."""

    def be(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvidia_smi, "_ANSWERS_WITHIN_S", 60.0)  # a busy machine takes its time
    return be


TWO = """
case "$1" in
  *utilization*) echo "GPU-1, 37, 2048"; echo "GPU-2, [N/A], [N/A]";;
  *mig.mode*) echo "GPU-1, NVIDIA H200, 143771, Disabled"; echo "GPU-2, Tesla T4, 15360, [N/A]";;
  *compute-apps*) echo "GPU-1, 77, 2048, /usr/bin/python3"; echo "GPU-2, 78, [N/A], [Not Found]";;
  *uncorrected*) echo "GPU-1, 3"; echo "GPU-2, [N/A]";;
  *memory.used*) echo "GPU-1, 2048"; echo "GPU-2, [N/A]";;
esac"""


def test_nvidia_smi_is_asked_where_there_are_no_bindings(smi):
    smi(TWO)
    driver = open_driver()
    assert isinstance(driver, NvidiaSmi)
    assert driver.physical() == [
        PhysicalGpu(Gpu("GPU-1", "NVIDIA H200", 143771 * MIB)),
        PhysicalGpu(Gpu("GPU-2", "Tesla T4", 15360 * MIB)),
    ]
    assert driver.vitals() == [GpuVitals("GPU-1", 0.37, 2.0**31), GpuVitals("GPU-2")]


def test_it_tells_memory_processes_and_errors_as_far_as_it_knows_them(smi):
    smi(TWO)
    driver = NvidiaSmi()
    assert driver.memory_used("GPU-1") == 2048 * MIB
    assert driver.memory_used("GPU-2") is None
    assert driver.holders("GPU-1") == [Holder(77, 2048 * MIB, "python3")]
    assert driver.holders("GPU-2") == [Holder(78, None, "[Not Found]")]
    assert driver.health() == {"GPU-1": "uncorrected memory errors (ECC) since its last reset"}
    assert driver.xids(0.0) == []
    assert driver.energy("GPU-1") is None


def test_one_answer_tells_of_all_devices_and_is_soon_too_old(smi, tmp_path, monkeypatch):
    smi(f"echo . >> {tmp_path}/asked\n{TWO}")
    driver = NvidiaSmi()

    def asks() -> int:
        before = len((tmp_path / "asked").read_text())
        for uuid in ("GPU-1", "GPU-2"):
            driver.memory_used(uuid)
        return (len((tmp_path / "asked").read_text()) - before) // 2

    monkeypatch.setattr(nvidia_smi, "_HOLDS_FOR_S", 3600.0)
    assert asks() == 1
    assert asks() == 0
    monkeypatch.setattr(nvidia_smi, "_HOLDS_FOR_S", -1.0)
    assert asks() == 2


def test_a_look_does_not_take_what_was_said_before_it(smi, tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia_smi, "_HOLDS_FOR_S", 3600.0)
    (tmp_path / "used").write_text("2048")
    smi(f"""
case "$1" in
  *mig.mode*) echo "GPU-1, Tesla T4, 15360, [N/A]";;
  *compute-apps*) echo "GPU-1, 77, $(cat {tmp_path}/used), python";;
  *memory.used*) echo "GPU-1, $(cat {tmp_path}/used)";;
esac""")
    driver, uuids = NvidiaSmi(), frozenset(["GPU-1"])
    for used in (2048, 9000):
        (tmp_path / "used").write_text(str(used))
        seen = look_at(driver, uuids, 0.0).devices["GPU-1"]
        assert (seen.used, seen.holdings[0].memory) == (used * MIB, used * MIB)


MIG = """
if [ "$1" = -L ]; then
  echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)"
  echo "  MIG 1g.10gb     Device  0: (UUID: MIG-a)"
  echo "  MIG 3g.40gb     Device  1: (UUID: MIG-b)"
  echo "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)"
  exit
fi
case "$1" in
  *uncorrected*) echo "GPU-1, 1"; echo "GPU-2, 0";;
  *mig.mode*)
    echo "GPU-1, NVIDIA H100 80GB HBM3, 81559, Enabled"
    echo "GPU-2, NVIDIA H100 80GB HBM3, 81559, Disabled";;
esac"""


def test_mig_devices_are_read_off_its_list(smi):
    smi(MIG)
    driver = NvidiaSmi()
    model = "NVIDIA H100 80GB HBM3"
    first, second = driver.physical()
    assert first.gpu.uuid == "GPU-1"
    assert first.parts == (
        Gpu("MIG-a", f"{model} MIG 1g.10gb", 10 * 2.0**30),
        Gpu("MIG-b", f"{model} MIG 3g.40gb", 40 * 2.0**30),
    )
    assert second.parts is None
    assert driver.health().keys() == {"MIG-a", "MIG-b"}


def test_one_that_does_not_know_a_field_tells_the_others(smi):
    smi("""
case "$1" in
  *mig.mode*|*uncorrected*|*compute-apps*) echo 'Field is not valid to query.'; exit 2;;
  *) echo "GPU-1, Tesla K80, 11441";;
esac""")
    driver = NvidiaSmi()
    assert [one.gpu.model for one in driver.physical()] == ["Tesla K80"]
    assert driver.health() == {}
    assert driver.holders("GPU-1") == []


def test_a_driver_that_does_not_work_is_none(smi):
    smi('echo "NVIDIA-SMI has failed because it could not communicate" >&2; exit 9')
    assert open_driver() is None


def test_a_driver_that_does_not_answer_is_told_of(smi, monkeypatch):
    monkeypatch.setattr(nvidia_smi, "_ANSWERS_WITHIN_S", 0.2)
    smi("exec sleep 600")
    with pytest.raises(ConfigError, match=r"does not answer within 0\.2 s"):
        open_driver()
