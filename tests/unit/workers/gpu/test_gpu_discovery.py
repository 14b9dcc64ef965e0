"""Which GPUs a node offers, and how it locks them against other nodes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain

import pytest

from tests.support.waiting import eventually
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.health.node_metrics import GpuMetrics, NodeDescription, decode_node_metrics
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers.gpu_types import PhysicalGpu
from tunemq_workers.gpu.gpu_discovery import offered_gpus
from tunemq_workers.gpu.gpu_locks import take_gpus
from tunemq_workers.system.library_versions import installed_versions
from tunemq_workers.system.node_metrics_collector import MachineWatch

GPUS = [Gpu(f"GPU-{letter}0", "NVIDIA H200", 1e9) for letter in "abc"]


PARTS = [Gpu(f"MIG-{digit}", "NVIDIA H100 MIG 1g.10gb", 1e9) for digit in "12"]


class Driver:
    """The part of a driver that lists the GPUs."""

    def __init__(self, physical: list[PhysicalGpu]) -> None:
        self._physical = physical

    def physical(self) -> list[PhysicalGpu]:
        return self._physical


def with_gpus() -> Driver:
    return Driver([PhysicalGpu(gpu) for gpu in GPUS])


def with_parts() -> Driver:
    """Put the second GPU into MIG mode."""
    first, second, third = GPUS
    return Driver([PhysicalGpu(first), PhysicalGpu(second, tuple(PARTS)), PhysicalGpu(third)])


def without_gpus() -> None:
    return None


def nobody_asks() -> None:
    pytest.fail("the driver was asked")


def uuids(
    option: str | None, visible: str | None = None, driver: Callable[[], Driver] = with_gpus
) -> list[str]:
    offered = offered_gpus(option, visible, driver)
    assert offered.number == len(offered.gpus)
    return [gpu.uuid for gpu in offered.gpus]


def test_all_gpus_are_offered_by_default():
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
        ("1,MIG-x,0", ["GPU-b0"]),
        ("GPU-", []),
    ],
)
def test_gpus_hidden_from_cuda_are_not_offered(visible, seen):
    assert uuids(None, visible) == seen


def test_number_of_gpus_offers_that_many():
    assert uuids("2") == ["GPU-a0", "GPU-b0"]
    assert uuids("1", "2,1") == ["GPU-c0"]
    with pytest.raises(ConfigError, match=r"--gpus is 2, and there are: GPU-c0 \(NVIDIA H200\)"):
        uuids("2", "2")


def test_number_without_known_gpus_offers_gpus_without_names():
    offered = offered_gpus("2", None, without_gpus)
    assert (offered.gpus, offered.number) == ((), 2)


def test_zero_gpus_offers_none_and_asks_no_driver():
    assert offered_gpus("0", None, nobody_asks).number == 0
    assert offered_gpus(None, " ", nobody_asks).number == 0


def test_gpus_are_named_by_index_or_uuid_among_the_visible_ones():
    assert uuids("2,GPU-a") == ["GPU-c0", "GPU-a0"]
    assert uuids("1,") == ["GPU-b0"]
    assert uuids("0,", "2") == ["GPU-c0"]
    with pytest.raises(ConfigError, match="--gpus names GPU-a0, and there are: GPU-c0"):
        uuids("GPU-a0", "2")
    with pytest.raises(ConfigError, match="there is none"):
        uuids("0,1", "")


def test_named_gpus_without_a_driver_are_accepted():
    assert offered_gpus("GPU-x, 1", None, without_gpus).gpus == (Gpu("GPU-x"), Gpu("1"))


@pytest.mark.parametrize("option", ["", "-1", "1.5", "two", "GPU", ",", "GPU-a,,GPU-b", "65"])
def test_empty_option_is_rejected(option):
    with pytest.raises(ConfigError, match="--gpus is"):
        offered_gpus(option, None, without_gpus)


def test_gpu_that_is_named_twice_is_rejected():
    with pytest.raises(ConfigError, match="names GPU-a0 twice"):
        uuids("0,GPU-a0")


# --- MIG ------------------------------------------------------------------------------------------


def test_gpu_in_mig_mode_offers_its_mig_devices_and_never_itself():
    assert uuids(None, driver=with_parts) == ["GPU-a0", "MIG-1", "MIG-2", "GPU-c0"]
    assert uuids("2", driver=with_parts) == ["GPU-a0", "MIG-1"]


def test_mig_devices_are_named_by_uuid_and_indices_count_gpus():
    assert uuids("MIG-2,2", driver=with_parts) == ["MIG-2", "GPU-c0"]
    assert uuids(None, "MIG-2,0", driver=with_parts) == ["MIG-2", "GPU-a0"]
    assert uuids("MIG-2", "2,MIG-2", driver=with_parts) == ["MIG-2"]


def test_missing_mig_device_is_rejected():
    with pytest.raises(ConfigError, match=r"names MIG-9, and there are: GPU-a0 .*MIG-1 .*MIG-2"):
        uuids("MIG-9", driver=with_parts)
    with pytest.raises(ConfigError, match="names MIG-1, and there are: GPU-c0"):
        uuids("MIG-1", "2", driver=with_parts)


@pytest.mark.parametrize("name", ["1,", "GPU-b", "GPU-b0"])
def test_gpu_in_mig_mode_named_as_a_whole_is_rejected_with_its_mig_devices(name):
    parts = r"MIG-1 \(NVIDIA H100 MIG 1g\.10gb\), MIG-2"
    with pytest.raises(ConfigError, match=rf"--gpus names GPU-b0, which is in MIG mode.*{parts}"):
        uuids(name, driver=with_parts)
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES names GPU-b0, .*MIG mode"):
        uuids(None, name, driver=with_parts)


def test_gpu_in_mig_mode_without_mig_devices_offers_nothing():
    def unmade() -> Driver:
        return Driver([PhysicalGpu(GPUS[0], ()), PhysicalGpu(GPUS[1])])

    assert uuids(None, driver=unmade) == ["GPU-b0"]
    with pytest.raises(ConfigError, match="GPU-a0, which is in MIG mode, and has no MIG devices"):
        uuids("0,", driver=unmade)


# --- locks ----------------------------------------------------------------------------------------

_HOLDER = """
import sys
import time
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.gpu_locks import take_gpus
take_gpus([Gpu("GPU-b")], "worker other", sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_gpu_belongs_to_one_worker_until_its_process_has_ended(tmp_path):
    line = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        who = rf"GPU-b cannot be offered: used by process {holder.pid} \(worker other\)"
        with pytest.raises(ConfigError, match=who):
            take_gpus([Gpu("GPU-a"), Gpu("GPU-b")], "worker me", str(tmp_path))
        holder.kill()
    locks = take_gpus([Gpu("GPU-a"), Gpu("GPU-b")], "worker me", str(tmp_path))
    assert not any(map(os.get_inheritable, chain(*locks._held.values())))
    assert all(map(locks.has, ("GPU-a", "GPU-b")))
    locks.give_back_all()


def test_lock_names_its_process_and_is_usable_by_other_users(tmp_path):
    locks = take_gpus([Gpu("MIG-1/2")], "worker me", str(tmp_path))
    file = tmp_path / "tunemq-gpu-MIG-1_2.lock"
    assert stat.S_IMODE(file.stat().st_mode) == 0o666
    assert file.read_text() == f"process {os.getpid()} (worker me)\n"
    locks.give_back_all()


# --- the description of the machine ---------------------------------------------------------------


def test_node_reports_metrics_of_its_machine_and_of_its_gpus(tmp_path):
    gpus = (GpuMetrics("GPU-a0", 0.5, 7.0),)
    watch = MachineWatch("1.2", str(tmp_path), lambda: gpus)
    assert decode_node_metrics(watch.said()).load is None
    watch.start()
    watch.trial_processes, watch.outbox, watch.cache = 1, 2, 3
    eventually(lambda: decode_node_metrics(watch.said()).load is not None)
    watch.close()
    said = decode_node_metrics(watch.said())
    assert (said.version, said.trial_processes, said.outbox, said.cache) == ("1.2", 1, 2, 3)
    assert said.gpus == gpus
    assert said.memory_free is not None
    assert said.memory_free > 0
    assert said.disk_free is not None
    assert said.disk_size is not None
    assert 0 < said.disk_free <= said.disk_size
    assert said.clock is not None
    assert abs(said.clock - time.time()) < 60


def test_node_reports_its_identity_and_its_installed_packages(tmp_path):
    about = NodeDescription("one", "one.lan", "3.11.2", {"cloudpickle": "3.1"}, ("GPU-a0",))
    watch = MachineWatch("1.2", str(tmp_path), about=about)
    assert decode_node_metrics(watch.said()).about == about
    watch.start()
    eventually(lambda: decode_node_metrics(watch.said()).disk_free is not None)
    watch.close()
    said = decode_node_metrics(watch.said()).about
    assert said is not None
    assert said.libraries == {"cloudpickle": "3.1", **installed_versions()}
    assert (said.node, said.hostname, said.gpus) == ("one", "one.lan", ("GPU-a0",))
