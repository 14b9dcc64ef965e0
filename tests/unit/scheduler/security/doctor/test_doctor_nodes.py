"""Findings of `tunemq doctor` about the reports of nodes."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import NoReturn

import pytest

from tunemq_scheduler.api.farm_answer_types import FarmDescription
from tunemq_scheduler.security.doctor.disk_checks import check_folder, judge_disk
from tunemq_scheduler.security.doctor.node_checks import (
    RequiredVersions,
    check_clocks,
    check_disks,
    check_gpus,
    check_libraries,
    check_nodes,
    check_versions,
)
from tunemq_scheduler.security.doctor.node_reports import FarmReport, NodeReport
from tunemq_scheduler.security.findings import FindingLevel
from tunemq_shared.health.node_metrics import NodeDescription, NodeMetrics

WANTED = RequiredVersions(tunemq="1.2", python="3.11", cloudpickle="3.1", whose="the scheduler")


def node(
    name: str,
    *,
    instance_id: str = "",
    tunemq: str = "1.2",
    python: str = "3.11.9",
    ahead: float | None = 0.0,
    gpus: tuple[str, ...] = (),
    free: float | None = 1e12,
    inodes: float | None = None,
    disk_problem: str = "",
    **libraries: str,
) -> NodeReport:
    about = NodeDescription(name, f"{name}.lan", python, {"cloudpickle": "3.1", **libraries}, gpus)
    node_metrics = NodeMetrics(
        tunemq,
        disk_free=free,
        disk_size=2e12,
        disk_free_inodes=inodes,
        disk_problem=disk_problem,
        about=about,
    )
    return NodeReport(instance_id or f"i-{name}", node_metrics, ahead)


def farm_report(*nodes: NodeReport, here: float = 0.0, **unreadable: str) -> FarmReport:
    return FarmReport(nodes=nodes, unreadable=unreadable, signed=0, clock_ahead_s=here)


def levels(findings) -> dict[str, FindingLevel]:
    return {one.check: one.level for one in findings}


def test_equal_nodes_are_ok():
    found = check_nodes(farm_report(node("a", numpy="2.1"), node("b", numpy="2.1")), WANTED)
    assert set(levels(found).values()) == {FindingLevel.OK}
    assert set(levels(found)) == {
        "nodes",
        "node-python",
        "node-libraries",
        "node-gpus",
        "node-disk",
        "store-requests",
        "clocks",
    }


def test_farm_without_nodes_is_a_problem_only_where_searches_need_one():
    assert levels(check_nodes(farm_report(), WANTED))["nodes"] == FindingLevel.WARNING
    names = [f"s{number} (RUNNING)" for number in range(6)]
    (finding, _clocks) = check_nodes(farm_report(), WANTED, names)
    assert (finding.check, finding.level) == ("nodes", FindingLevel.PROBLEM)
    assert "s0 (RUNNING), " in finding.what
    assert finding.what.endswith("s4 (RUNNING), ...")


def test_node_of_an_older_tunemq_with_fewer_fields_is_ok():
    old = NodeReport("i-old", NodeMetrics("1.2"), None)
    found = check_nodes(farm_report(old, node("b")), WANTED)
    assert set(levels(found).values()) == {FindingLevel.OK}
    assert "i-old" in found[0].what


def test_patch_version_of_python_may_differ():
    assert levels(check_versions([node("a", python="3.11.2")], WANTED)) == {
        "node-python": FindingLevel.OK
    }
    assert levels(check_versions([node("a", python="3.12.0")], WANTED)) == {
        "node-python": FindingLevel.PROBLEM
    }
    assert levels(check_versions([node("a", python="3.1")], WANTED)) == {
        "node-python": FindingLevel.PROBLEM
    }


def test_another_tunemq_is_a_warning_and_another_cloudpickle_a_problem():
    (first, _) = check_versions([node("a", tunemq="1.1")], WANTED)
    assert (first.check, first.level) == ("node-libraries", FindingLevel.WARNING)
    assert "install TuneMQ 1.2" in first.fix
    other = node("a", cloudpickle="2.0")
    (second, _) = check_versions([other], WANTED)
    assert (second.check, second.level) == ("node-libraries", FindingLevel.PROBLEM)


def test_without_a_scheduler_nodes_are_compared_with_this_interpreter():
    assert RequiredVersions.of_farm(None).whose == "this machine"
    farm = FarmDescription(store="s", scheduler="h", python="3.99", cloudpickle="9")
    said = RequiredVersions.of_farm(farm)
    assert (said.python, said.cloudpickle, said.whose) == ("3.99", "9", "the scheduler")


@pytest.mark.parametrize(
    ("versions", "blamed"),
    [
        (["2.1", "2.1", "2.0"], "2.0"),
        (["2.10", "2.9"], "2.9"),  # equally many of each: the newer one counts as right
        (["2.1", "", "2.1"], "lacks"),
        (["2.1", ""], "lacks"),
    ],
)
def test_node_with_a_library_version_unlike_most_is_named(versions: list[str], blamed: str):
    nodes = [
        node(f"n{number}", **({"scipy": version} if version else {}))
        for number, version in enumerate(versions)
    ]
    (finding,) = check_libraries(nodes)
    assert finding.level is FindingLevel.WARNING
    assert blamed in finding.what


@pytest.mark.parametrize(
    ("version", "is_safe"), [("2.10.0", True), ("2.9.1+cu128", False), ("2.11.0a0", True)]
)
def test_torch_that_runs_code_from_checkpoints_is_named(version: str, is_safe: bool):
    found = check_libraries([node("a", torch=version)])
    assert (levels(found)["node-libraries"] is FindingLevel.OK) == is_safe


def test_restarted_node_shares_no_gpu_with_itself():
    before, after = (node("a", instance_id=name, gpus=("GPU-1",)) for name in ("x", "y"))
    assert levels(check_gpus([before, after])) == {"node-gpus": FindingLevel.OK}
    others = [node("a", gpus=("GPU-1", "GPU-2")), node("b", gpus=("GPU-2",))]
    (finding,) = check_gpus(others)
    assert "GPU-2 is offered by 2 workers: a on a.lan, b on b.lan" in finding.what


def test_clock_that_most_others_contradict_is_wrong():
    def blamed(*nodes: NodeReport, here: float = 0.0) -> list[tuple[str, FindingLevel]]:
        found = check_clocks(farm_report(*nodes, here=here))
        return [(one.what.split(" is ")[0], one.level) for one in found if one.fix]

    right = [node("a", ahead=0.4), node("b", ahead=-1.0)]
    assert blamed(*right) == []
    assert blamed(*right, node("c", ahead=3600)) == [("the clock of node c", FindingLevel.PROBLEM)]
    assert blamed(*right, node("c", ahead=-20)) == [("the clock of node c", FindingLevel.WARNING)]
    assert blamed(*right, here=-3600) == [("the clock of this machine", FindingLevel.PROBLEM)]
    off = [node("a", ahead=3600), node("b", ahead=3600.5), node("c", ahead=None)]
    assert blamed(*off, here=3601) == [("the clock of Redis", FindingLevel.PROBLEM)]


def test_clock_offset_has_a_suitable_unit():
    for seconds, text in ((61, "61 s ahead"), (-3600, "60 min behind"), (1e6, "277.8 h ahead")):
        found = check_clocks(farm_report(node("a"), node("b", ahead=seconds)))
        assert text in found[0].what


@pytest.mark.parametrize(
    ("free", "size", "level"),
    [
        (1e6, 1e12, FindingLevel.PROBLEM),
        (1e6, None, FindingLevel.PROBLEM),
        (2e9, 1e12, FindingLevel.WARNING),
        (2e9, 10e9, FindingLevel.OK),  # a fifth of a small disk
        (2e10, 1e12, FindingLevel.OK),
        (2e9, None, FindingLevel.OK),
    ],
)
def test_enough_disk_space_is_ok(free: float, size: float | None, level: FindingLevel):
    assert judge_disk("disk", "the disk", free, size).level is level


@pytest.mark.parametrize(
    ("free", "inodes", "disk_problem", "told"),
    [
        (1e12, 5e6, "/w/blobs: Read-only file system", "/w/blobs: Read-only file system"),
        (None, None, "/w/blobs: Permission denied", "/w/blobs: Permission denied"),
        (1e12, 12.0, "", "inodes for 12 more files only"),
        (1e6, None, "", "the disk is full: 977 KiB are free"),
    ],
)
def test_node_whose_disk_fails_is_a_problem(
    free: float | None, inodes: float | None, disk_problem: str, told: str
):
    bad = node("b", free=free, inodes=inodes, disk_problem=disk_problem)
    (finding,) = check_disks([node("a", inodes=5e6), bad])
    assert (finding.check, finding.level) == ("node-disk", FindingLevel.PROBLEM)
    assert finding.what.startswith("no trial begins on node b: ")
    assert told in finding.what


def test_missing_folder_is_looked_up_in_its_parents(tmp_path):
    finding = check_folder("disk", "the results in", str(tmp_path / "not" / "there"))
    assert str(tmp_path / "not" / "there") in finding.what


def test_check_folder_disk_that_fails_a_write_is_a_problem(tmp_path, monkeypatch):
    def fails(_file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    finding = check_folder("disk", "the results in", str(tmp_path))
    assert finding.level is FindingLevel.PROBLEM
    assert f"{tmp_path} cannot be written: Input/output error" in finding.what
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("owner", "level"), [(0, FindingLevel.PROBLEM), (1, FindingLevel.WARNING)])
def test_check_folder_of_another_user_without_rights_is_not_judged(
    tmp_path, monkeypatch, owner: int, level: FindingLevel
):
    def refused(dir: str) -> NoReturn:  # noqa: A002
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    user = os.geteuid() + owner
    monkeypatch.setattr(os, "geteuid", lambda: user)
    finding = check_folder("disk", "the results in", str(tmp_path))
    assert finding.level is level
    assert ("was not checked" in finding.what) == bool(owner)


def test_rejected_node_is_named():
    found = check_nodes(farm_report(node("a"), i7="was altered"), WANTED)
    assert "i7 says was altered" in found[0].what
    assert found[0].level is FindingLevel.PROBLEM
    signed = FarmReport(nodes=(), unreadable={}, signed=3, clock_ahead_s=0.0)
    assert levels(check_nodes(signed, WANTED))["nodes"] is FindingLevel.WARNING
    assert levels(check_nodes(farm_report(), WANTED))["nodes"] is FindingLevel.WARNING
