"""Which GPUs a node offers, and how it keeps other workers away from them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import eventually
from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import Gpu
from tunemq_shared.vitals import GpuVitals, decode_vitals
from tunemq_workers import gpu_drivers
from tunemq_workers.gpu_drivers import NvidiaSmi, open_driver
from tunemq_workers.gpu_locks import take_gpus
from tunemq_workers.gpus import offered_gpus
from tunemq_workers.machine_watch import MachineWatch

GPUS = [Gpu(f"GPU-{letter}0", "NVIDIA H200", 1e9) for letter in "abc"]


class Driver:
    period_s = 60.0

    def __init__(self, gpus: list[Gpu]) -> None:
        self._gpus = gpus

    def gpus(self) -> list[Gpu]:
        return self._gpus

    def vitals(self) -> list[GpuVitals]:
        return [GpuVitals(gpu.uuid, 0.5, 7.0) for gpu in self._gpus]


def with_gpus() -> Driver:
    return Driver(GPUS)


def without_gpus() -> None:
    return None


def nobody_asks() -> None:
    pytest.fail("the driver was asked")


def uuids(option: str | None, visible: str | None = None) -> list[str]:
    offered = offered_gpus(option, visible, with_gpus)
    assert offered.number == len(offered.gpus)
    return [gpu.uuid for gpu in offered.gpus]


def test_all_gpus_are_offered_where_nothing_is_said():
    assert offered_gpus(None, None, with_gpus).gpus == tuple(GPUS)
    assert offered_gpus(None, None, without_gpus).number == 0


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["GPU-c0", "GPU-a0"]),
        ("GPU-b,GPU-a0", ["GPU-b0", "GPU-a0"]),
        ("1,7,0", ["GPU-b0"]),
        ("MIG-x,1", ["MIG-x", "GPU-b0"]),
        ("GPU-", []),
    ],
)
def test_what_cuda_programs_may_not_see_is_not_offered(visible, seen):
    assert uuids(None, visible) == seen


def test_a_number_is_so_many_of_them():
    assert uuids("2") == ["GPU-a0", "GPU-b0"]
    assert uuids("1", "2,1") == ["GPU-c0"]
    with pytest.raises(ConfigError, match=r"--gpus is 2, and there are: GPU-c0 \(NVIDIA H200\)"):
        uuids("2", "2")


def test_a_number_where_nobody_knows_of_any_is_of_gpus_without_names():
    offered = offered_gpus("2", None, without_gpus)
    assert (offered.gpus, offered.number) == ((), 2)


def test_none_are_offered_and_nobody_is_asked_where_none_are_wanted():
    assert offered_gpus("0", None, nobody_asks).number == 0


def test_gpus_are_named_by_index_or_uuid_among_those_that_may_be_seen():
    assert uuids("2,GPU-a") == ["GPU-c0", "GPU-a0"]
    assert uuids("1,") == ["GPU-b0"]
    assert uuids("0,", "2") == ["GPU-c0"]
    assert uuids("MIG-1/2/3") == ["MIG-1/2/3"]
    with pytest.raises(ConfigError, match="--gpus names GPU-a0, and there are: GPU-c0"):
        uuids("GPU-a0", "2")
    with pytest.raises(ConfigError, match="there is none"):
        uuids("0,1", "")


def test_where_nobody_knows_of_any_those_that_are_named_are_believed_in():
    assert offered_gpus("GPU-x, 1", None, without_gpus).gpus == (Gpu("GPU-x"), Gpu("1"))


@pytest.mark.parametrize("option", ["", "-1", "1.5", "a b", ",", "GPU-a,,GPU-b", "65"])
def test_an_option_that_says_nothing_is_refused(option):
    with pytest.raises(ConfigError, match="--gpus is"):
        offered_gpus(option, None, without_gpus)


def test_a_gpu_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="names GPU-a0 twice"):
        uuids("0,GPU-a0")


# --- nvidia-smi -----------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has another program be nvidia-smi."""

    def be(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return be


def test_nvidia_smi_is_asked_where_there_are_no_bindings(smi):
    smi("""
case "$1" in
  *utilization*) echo "GPU-1, 37, 2048"; echo "GPU-2, [N/A], [N/A]";;
  *) echo "GPU-1, NVIDIA H200, 143771"; echo "GPU-2, Tesla T4, 15360";;
esac""")
    driver = open_driver()
    assert isinstance(driver, NvidiaSmi)
    assert driver.gpus() == [
        Gpu("GPU-1", "NVIDIA H200", 143771 * 2.0**20),
        Gpu("GPU-2", "Tesla T4", 15360 * 2.0**20),
    ]
    assert driver.vitals() == [GpuVitals("GPU-1", 0.37, 2.0**31), GpuVitals("GPU-2")]


def test_a_driver_that_does_not_work_is_none(smi):
    smi('echo "NVIDIA-SMI has failed because it could not communicate" >&2; exit 9')
    assert open_driver() is None


def test_a_driver_that_does_not_answer_is_told_of(smi, monkeypatch):
    monkeypatch.setattr(gpu_drivers, "_ANSWERS_WITHIN_S", 0.2)
    smi("exec sleep 30")
    with pytest.raises(ConfigError, match=r"does not answer within 0\.2 s"):
        open_driver()


# --- locks ----------------------------------------------------------------------------------------

_HOLDER = """
import sys
from tunemq_shared.messages import Gpu
from tunemq_workers.gpu_locks import take_gpus
take_gpus([Gpu("GPU-b")], "worker other", sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_gpu_is_one_workers_until_its_process_is_gone(tmp_path):
    line = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        who = rf"GPU-b is offered .*: process {holder.pid} \(worker other\)"
        with pytest.raises(ConfigError, match=who):
            take_gpus([Gpu("GPU-a"), Gpu("GPU-b")], "worker me", str(tmp_path))
        holder.kill()
    held = take_gpus([Gpu("GPU-a"), Gpu("GPU-b")], "worker me", str(tmp_path))
    assert len(held) == 2
    for descriptor in held:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_a_lock_follows_no_link_and_may_be_taken_by_other_users(tmp_path):
    (tmp_path / "tunemq-gpu-GPU-l.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="GPU-l cannot be locked"):
        take_gpus([Gpu("GPU-l")], "worker me", str(tmp_path))
    (descriptor,) = take_gpus([Gpu("MIG-1/2")], "worker me", str(tmp_path))
    file = tmp_path / "tunemq-gpu-MIG-1_2.lock"
    assert stat.S_IMODE(file.stat().st_mode) == 0o666
    assert file.read_text() == f"process {os.getpid()} (worker me)\n"
    os.close(descriptor)


# --- what is said of the machine ------------------------------------------------------------------


def test_a_node_says_how_its_machine_is_and_what_its_own_gpus_do(tmp_path):
    watch = MachineWatch("1.2", str(tmp_path), GPUS[:1], with_gpus())
    assert decode_vitals(watch.said()).load is None
    watch.start()
    watch.hosts, watch.outbox, watch.cache = 1, 2, 3
    eventually(lambda: decode_vitals(watch.said()).gpus)
    eventually(lambda: decode_vitals(watch.said()).load is not None)
    watch.close()
    said = decode_vitals(watch.said())
    assert (said.version, said.hosts, said.outbox, said.cache) == ("1.2", 1, 2, 3)
    assert said.gpus == (GpuVitals("GPU-a0", 0.5, 7.0),)
    assert said.memory_free is not None
    assert said.memory_free > 0
    assert said.disk_free is not None
    assert said.disk_free > 0
