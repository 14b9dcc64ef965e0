"""Findings of `tunemq doctor` about the reports of a scheduler and its nodes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tunemq_scheduler.api.farm_answer_types import (
    ExperimentRow,
    ExperimentState,
    GpuRow,
    NodeList,
    NodeRow,
    RejectionRow,
    StoreTroubleRow,
)
from tunemq_scheduler.security.doctor.node_reports import NodeReport
from tunemq_scheduler.security.doctor.report_checks import (
    check_backup,
    check_node_reports,
    check_scheduler_reports,
    check_searches,
)
from tunemq_scheduler.security.findings import FindingLevel
from tunemq_shared.health.node_metrics import NodeDescription, NodeMetrics
from tunemq_shared.objects.store_traffic import StoreTraffic


def node(**node_metrics) -> NodeReport:
    about = NodeDescription("w1", "w1.lan", "3.11", {})
    return NodeReport("i1", NodeMetrics("1.2", about=about, **node_metrics), None)


def row(name: str = "w1", state: str = "ready", **more) -> NodeRow:
    return NodeRow(node=name, instance_id=f"i-{name}", state=state, **more)


@pytest.mark.parametrize(
    ("seconds", "level"), [(99.0, FindingLevel.PROBLEM), (4.0, FindingLevel.WARNING)]
)
def test_check_node_reports_with_a_failing_store_names_node_time_and_error(seconds, level):
    store = StoreTraffic(9, 9, 0, seconds, "SignatureDoesNotMatch")
    (finding,) = check_node_reports([node(store=store)])
    assert (finding.check, finding.level) == ("store-requests", level)
    assert f"node w1 have been failing for {seconds:.0f} s: SignatureDoesNotMatch" in finding.what
    assert time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() - seconds)) in finding.what
    assert "on w1.lan" in finding.fix
    assert "AWS_SHARED_CREDENTIALS_FILE" in finding.fix


def test_check_node_reports_with_many_unjournalled_reports_warns():
    found = check_node_reports([node(outbox=2**25)])
    assert [(one.check, one.level) for one in found if one.fix] == [
        ("node-outbox", FindingLevel.WARNING)
    ]
    assert "32" in found[0].what


def test_check_scheduler_reports_with_a_failing_store_names_the_search():
    stores = (
        StoreTroubleRow(failing_s=40.0, problem="no answer"),
        StoreTroubleRow(experiment="s1", failing_s=400.0, problem="bad", copy_behind_s=400.0),
    )
    found = check_scheduler_reports(NodeList(nodes=(row(),), stores=stores))
    assert [(one.check, one.level) for one in found if one.fix] == [
        ("store-requests", FindingLevel.PROBLEM),
        ("store-requests", FindingLevel.PROBLEM),
        ("journal-copy", FindingLevel.PROBLEM),
    ]
    assert "of the scheduler have been failing for 40 s: no answer" in found[0].what
    assert "process of s1 have been failing for 400 s: bad" in found[1].what
    assert "start the scheduler again" in found[1].fix


def test_check_scheduler_reports_with_a_copy_that_is_little_behind_is_ok():
    stores = (StoreTroubleRow(experiment="s1", copy_behind_s=20.0),)
    found = check_scheduler_reports(NodeList(nodes=(row(),), stores=stores))
    assert {one.level for one in found} == {FindingLevel.OK}


def test_check_scheduler_reports_with_drained_nodes_only_warns():
    rows = (row("a", "drained"), row("b", "draining"), row("c", "gone"))
    found = [one for one in check_scheduler_reports(NodeList(nodes=rows)) if one.fix]
    assert [(one.check, one.level) for one in found] == [("nodes", FindingLevel.WARNING)]
    assert "no node takes trials: a, b are drained" in found[0].what
    ready = NodeList(nodes=(*rows, row("d")))
    assert not [one for one in check_scheduler_reports(ready) if one.fix]


def test_check_scheduler_reports_with_a_withheld_gpu_warns():
    gpus = (GpuRow(uuid="GPU-1", withheld="Xid 79"), GpuRow(uuid="GPU-2"))
    found = check_scheduler_reports(NodeList(nodes=(row(gpus=gpus),)))
    (finding,) = [one for one in found if one.fix]
    assert (finding.check, finding.level) == ("node-gpus", FindingLevel.WARNING)
    assert "GPU GPU-1 of node w1: Xid 79" in finding.what


def test_check_scheduler_reports_with_rejected_messages_notes_dishonest_ones():
    rejected = (
        RejectionRow(kind="events", reason="repeated", times=5),
        RejectionRow(node="w1", kind="command", reason="altered", times=2),
    )
    found = check_scheduler_reports(NodeList(nodes=(row(),), rejected=rejected))
    (finding,) = [one for one in found if one.check == "messages"]
    assert finding.level is FindingLevel.OK
    assert finding.what == "node w1 refused 2 of the kind command (altered), since each began"


def test_check_backup_with_an_old_note_warns(tmp_path: Path):
    note = tmp_path / "last-backup"
    assert check_backup(note) == []
    note.touch()
    assert check_backup(note)[0].level is FindingLevel.OK
    os.utime(note, (time.time() - 9 * 86400,) * 2)
    assert check_backup(note)[0].level is FindingLevel.WARNING


def test_check_searches_names_one_that_waits_for_another_version():
    waits = "waits: tuner.pkl was written with TuneMQ 0.1.1"
    about = {"id": "1", "owner": "ann", "priority": 0, "submitted": 0.0}
    rows = [
        ExperimentRow(name=name, state=ExperimentState.RUNNING, reason=reason, **about)
        for name, reason in (("first", ""), ("second", waits))
    ]
    (finding,) = check_searches(rows)
    assert (finding.level, finding.what) == (FindingLevel.PROBLEM, f"second {waits}")
    assert [one.level for one in check_searches(rows[:1])] == [FindingLevel.OK]
