"""Whether a node may divide its control group; integration tests do divide one."""

from __future__ import annotations

import logging
import os
import subprocess

import pytest

from tunemq_workers.processes.memory_groups import MemoryCgroups


def world(folder, line, files, *, at="service"):
    """Fake the kernel's control groups and the file that names this process's group."""
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
def test_memory_groups_of_a_node_that_may_not_divide_its_own_are_none_with_one_warning(
    tmp_path, caplog, line, files, at, why
):
    groups = world(tmp_path, line, files, at=at)
    with caplog.at_level(logging.INFO):
        assert groups.begin("h1", 2**20) is None
        assert groups.begin("h2", 2**20) is None
    (said,) = caplog.messages
    assert said.startswith("memory.polled reason=")
    assert why in said
    groups.enter("h1", None)
    assert groups.held_at_kill("h1") == 0
    groups.leave("h1")
    groups.close()
    assert not list((tmp_path / "cgroup").rglob("tunemq-*"))


def test_process_without_proof_enters_no_group_and_its_trial_begins(tmp_path, caplog):
    groups = MemoryCgroups("ab", str(tmp_path), str(tmp_path / "about"))
    waiting = begun(groups, tmp_path)
    groups.enter("h1", None)
    assert not (tmp_path / "h1" / "cgroup.procs").exists()
    assert os.read(waiting, 1) == b""
    assert "its pid is not known for certain" in caplog.text
    os.close(waiting)


def test_trial_that_waits_at_its_gate_cannot_lock_it(tmp_path):
    """A node that closes a pipe waits for as long as another process has locked it (`splice`)."""
    groups = MemoryCgroups("ab", str(tmp_path), str(tmp_path / "about"))
    waiting = begun(groups, tmp_path)
    with pytest.raises(OSError, match="No such device"):
        os.open(f"/proc/self/fd/{waiting}", os.O_WRONLY)
    groups.enter("h1", None)
    os.close(waiting)


def begun(groups, top):
    groups._was_tried, groups._is_v2, groups._top = True, True, str(top)
    waiting = groups.begin("h1", 2**20)
    assert waiting is not None
    return waiting


def test_process_that_ended_while_it_entered_its_group_leaves_it(tmp_path):
    """Another process may have received its pid by then."""
    groups = MemoryCgroups("ab", str(tmp_path), str(tmp_path / "about"))
    groups._base = str(tmp_path)
    (tmp_path / "h1").mkdir()
    groups._folders["h1"] = str(tmp_path / "h1")
    with subprocess.Popen(["true"]) as process:
        pidfd = os.pidfd_open(process.pid)
        process.wait()
        groups.enter("h1", (pidfd, process.pid))
        os.close(pidfd)
    assert (tmp_path / "cgroup.procs").read_text() == str(process.pid)
