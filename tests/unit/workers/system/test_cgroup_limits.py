"""The resource limits of this process, as the kernel's control groups state them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunemq_workers.system import machine
from tunemq_workers.system.cgroup_limits import Cgroup

_GIB = 2**30


def group(folder: Path, about: str, files: dict[str, str]) -> Cgroup:
    """Return a control group with these files."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "about").write_text(about)
    return Cgroup(str(folder / "cgroup"), str(folder / "about"))


def test_container_has_the_limits_of_its_root_group(tmp_path):
    found = group(
        tmp_path,
        "0::/\n",
        {"memory.max": str(4 * _GIB), "memory.current": str(_GIB), "cpu.max": "250000 100000"},
    )
    assert found.memory_bytes() == 4 * _GIB
    assert found.memory_left_bytes() == 3 * _GIB
    assert found.cpus() == 2.5


def test_slurm_job_has_the_limits_of_its_group_and_of_those_above(tmp_path):
    job = "system.slice/slurmstepd.scope/job_7"
    step = f"{job}/step_batch/user/task_0"
    found = group(
        tmp_path,
        f"0::/{step}\n",
        {
            f"{step}/memory.max": "max",
            f"{step}/memory.current": "5",
            f"{job}/step_batch/memory.max": str(8 * _GIB),
            f"{job}/step_batch/memory.current": str(2 * _GIB),
            f"{job}/memory.max": str(6 * _GIB),
            f"{job}/memory.current": str(3 * _GIB),
            f"{job}/cpu.max": "max 100000",
            "system.slice/cpu.max": "400000 100000",
        },
    )
    assert found.memory_bytes() == 6 * _GIB
    assert found.memory_left_bytes() == 3 * _GIB
    assert found.cpus() == 4.0


def test_job_in_groups_of_version_1_has_the_limits_of_its_group(tmp_path):
    job = "slurm/uid_1000/job_7"
    found = group(
        tmp_path,
        f"5:cpu,cpuacct:/{job}\n4:memory:/{job}/step_batch\n1:name=systemd:/user.slice\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "123",
            f"memory/{job}/memory.limit_in_bytes": str(2 * _GIB),
            f"memory/{job}/memory.usage_in_bytes": str(_GIB),
            f"cpu/{job}/cpu.cfs_quota_us": "-1",
            f"cpu/{job}/cpu.cfs_period_us": "100000",
            "cpu/slurm/cpu.cfs_quota_us": "300000",
            "cpu/slurm/cpu.cfs_period_us": "100000",
        },
    )
    assert found.memory_bytes() == 2 * _GIB
    assert found.memory_left_bytes() == _GIB
    assert found.cpus() == 3.0


def test_memory_of_cached_files_counts_as_available(tmp_path):
    job = "system.slice/job_7"
    found = group(
        tmp_path,
        f"0::/{job}\n",
        {
            f"{job}/memory.max": str(4 * _GIB),
            f"{job}/memory.current": str(3 * _GIB),
            f"{job}/memory.stat": f"anon {_GIB}\nactive_file 7\ninactive_file {2 * _GIB}\nslab 9",
        },
    )
    assert found.memory_bytes() == 4 * _GIB
    assert found.memory_left_bytes() == 3 * _GIB


def test_cached_files_below_groups_of_version_1_count_as_available(tmp_path):
    found = group(
        tmp_path,
        "4:memory:/job_7\n",
        {
            "memory/job_7/memory.limit_in_bytes": str(4 * _GIB),
            "memory/job_7/memory.usage_in_bytes": str(3 * _GIB),
            "memory/job_7/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * _GIB}",
        },
    )
    assert found.memory_left_bytes() == 3 * _GIB


def test_memory_in_use_is_never_negative(tmp_path):
    """The kernel does not write the two files at the same moment."""
    found = group(
        tmp_path,
        "0::/\n",
        {"memory.max": "100", "memory.current": "10", "memory.stat": "inactive_file 20"},
    )
    assert found.memory_left_bytes() == 100


@pytest.mark.parametrize("about", ["", "0::/somewhere/else/outside\n"])
def test_groups_without_limits_limit_nothing(tmp_path, about):
    found = group(tmp_path, about, {"memory.max": "max", "cpu.max": "max 100000"})
    assert found.memory_bytes() is None
    assert found.memory_left_bytes() is None
    assert found.cpus() is None


def test_container_that_sees_an_outside_path_has_the_limits_of_its_root_group(tmp_path):
    found = group(
        tmp_path,
        "0::/docker/0123\n",
        {"memory.max": str(_GIB), "memory.current": "0", "cpu.max": "100000 100000"},
    )
    assert found.memory_bytes() == _GIB
    assert found.cpus() == 1.0


def test_this_machine_offers_no_more_than_it_has():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.memory_bytes() <= total
    assert 1 <= machine.cpus() <= len(os.sched_getaffinity(0))
    free = machine.memory_free_bytes()
    assert free is not None
    assert free <= total
