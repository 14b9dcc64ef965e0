"""Whether a node may divide its control group; what is divided is in the integration tests."""

from __future__ import annotations

import logging
import os

import pytest

from tunemq_workers.processes.memory_groups import MemoryCgroups


def world(folder, line, files, *, at="service"):
    """Where the kernel shows control groups, and the file that says which is this process's."""
    group = folder / "cgroup" / at
    group.mkdir(parents=True)
    files = {"cgroup.procs": f"{os.getpid()}\n", **files}
    for name, text in files.items():
        (group / name).write_text(text)
    (folder / "about").write_text(line)
    return MemoryCgroups("ab", str(folder / "cgroup"), str(folder / "about"))


@pytest.mark.parametrize(
    ("line", "files", "at", "why"),
    [
        ("3:cpu:/service\n", {}, "service", "the kernel has no control groups for memory"),
        ("0::/other\n", {}, "service", "cannot find its control group /other"),
        ("0::/service\n", {"cgroup.procs": "1\n"}, "service", "cannot find its control group"),
        (
            "0::/service\n",
            {"cgroup.controllers": "cpu pids\n"},
            "service",
            "the control group /service has no memory controller",
        ),
        (
            "0::/service\n",
            {"cgroup.controllers": "cpu memory\n"},
            "service",
            "the control group /service is not delegated to the worker",
        ),
        (
            "4:memory:/service\n0::/service\n",
            {"memory.use_hierarchy": "0\n"},
            "memory/service",
            "limits of the control group /service do not hold for groups below it",
        ),
    ],
)
def test_memory_groups_of_a_node_that_may_not_divide_its_own_are_none_and_say_why_once(
    tmp_path, caplog, line, files, at, why
):
    groups = world(tmp_path, line, files, at=at)
    with caplog.at_level(logging.INFO):
        assert groups.begin("h1", 2**20) is None
        assert groups.begin("h2", 2**20) is None
    (said,) = caplog.messages
    assert said.startswith("memory.polled reason=")
    assert why in said
    groups.enter("h1", 1)
    assert groups.held_at_kill("h1") == 0
    groups.leave("h1")
    groups.close()
    assert not list((tmp_path / "cgroup").rglob("tunemq-*"))
