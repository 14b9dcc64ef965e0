"""Which resource limits of another process are lower than this one's."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator

import pytest

from tunemq_workers.system.lowered_limits import lowered_limits


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_child_has_the_limits_of_its_parent(child):
    assert lowered_limits(child.pid) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (resource.RLIMIT_FSIZE, "Max file size"),
        (resource.RLIMIT_NPROC, "Max processes"),
        (resource.RLIMIT_NOFILE, "Max open files"),
        (resource.RLIMIT_AS, "Max address space"),
    ],
)
@pytest.mark.parametrize("is_hard", [False, True])
def test_lowered_limit_is_named(child, kind, name, is_hard):
    _, hard = resource.prlimit(child.pid, kind)
    resource.prlimit(child.pid, kind, (10, 10 if is_hard else hard))
    assert lowered_limits(child.pid) == [name]


def test_core_dumps_do_not_count_nor_does_a_higher_soft_limit(child):
    _, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (hard, hard))
    resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
    assert lowered_limits(child.pid) == []


def test_lowered_priority_is_named(child):
    os.setpriority(os.PRIO_PROCESS, child.pid, 19)
    assert lowered_limits(child.pid) == ["nice value"]
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    assert lowered_limits(child.pid) == ["scheduling policy", "nice value"]


def test_process_that_is_gone_has_none(child):
    child.kill()
    child.wait()
    assert lowered_limits(child.pid) == []
