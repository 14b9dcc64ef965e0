"""Check what a farm's scheduler and nodes report about themselves.

Only `check_backup` does I/O. These checks find the same problems as the alerts on metrics.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tunemq_scheduler.api.farm_answer_types import WAITS, ExperimentRow, NodeList, NodeRow
from tunemq_scheduler.security.doctor.node_reports import NodeReport, harmless_word
from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.protocol.rejection_counter import OFTEN_HONEST

#: Seconds; a store that fails for less may have been slow or restarting.
_FAILS_S: Final = 30.0
#: Seconds; a journal's copy may lag for less, as in the alert.
_BEHIND_S: Final = 300.0
_STORE: Final = "store-requests"
#: Trials wait at several times this size of unjournalled events on a node.
_OUTBOX_BYTES: Final = 2**24
#: Seconds; backups are due weekly.
_BACKUP_S: Final = 8 * 86400.0
#: The most characters of a search process's message.
_SHOWN: Final = 500


def check_scheduler_reports(listed: NodeList) -> list[Finding]:
    """Check the scheduler's reports about itself and its nodes."""
    return [
        *_silent(listed.nodes),
        *_idle(listed.nodes),
        *_withheld(listed.nodes),
        *_scheduler_store(listed),
        *_rejected(listed),
    ]


def check_searches(rows: Iterable[ExperimentRow]) -> list[Finding]:
    """Check by the scheduler's report that each running search has a process."""
    found = [
        problem(
            "searches",
            harmless(" ".join((row.trouble or f"{row.name} {row.reason}").split()))[:_SHOWN],
            f"see what it printed (tunemq logs {harmless_word(row.name)}) and the scheduler's log;"
            " it is tried again by itself",
        )
        for row in rows
        if row.trouble or row.reason.startswith(WAITS)
    ]
    return found or [ok("searches", "no process of a search fails to start")]


def check_node_reports(nodes: Iterable[NodeReport]) -> list[Finding]:
    """Check the nodes' reports about store requests and unjournalled events."""
    found: list[Finding] = []
    for node in nodes:
        if store := node.node_metrics.store.shown(f"node {node.name}"):
            what = f"{store} (it began at {_ago(node.node_metrics.store.failing_s)})"
            kind = problem if node.node_metrics.store.failing_s >= _FAILS_S else warning
            found.append(kind(_STORE, what, _fix_of_node(node)))
        if node.node_metrics.outbox > _OUTBOX_BYTES:
            found.append(
                warning(
                    "node-outbox",
                    f"node {node.name} has {show_bytes(node.node_metrics.outbox)} of reports"
                    " that no journal has: trials of the searches with most of them wait at 64 MiB",
                    "see the logs of the searches (tunemq ls, tunemq logs NAME) and the disk of"
                    " the head: a search's process hangs (tunemq stop NAME), is slow or gone",
                )
            )
    if not any(one.check == _STORE for one in found):
        found.append(ok(_STORE, "the nodes report no failure"))
    return found


def check_backup(note: Path) -> list[Finding]:
    """Check the age of the last noted backup; no finding if none was ever noted."""
    try:
        days = (time.time() - note.stat().st_mtime) / 86400
    except OSError:
        return []
    what = f"the last backup was noted {days:.1f} days ago"
    if days * 86400 < _BACKUP_S:
        return [ok("backup", what)]
    return [warning("backup", what, f"see why the job that makes it ended, run it, touch {note}")]


def _silent(rows: Iterable[NodeRow]) -> list[Finding]:
    return [
        problem(
            "nodes",
            f"node {harmless_word(row.node)} is silent: {harmless_word(row.health)}; its trials go"
            " on elsewhere",
            "see that its machine is up, that it reaches Redis, and that `tunemq worker` runs"
            " there; start it again if not",
        )
        for row in rows
        if row.state == "silent"
    ]


def _idle(rows: Iterable[NodeRow]) -> list[Finding]:
    """Warn if every node is drained."""
    there = [row for row in rows if row.state in ("ready", "draining", "drained")]
    if not there or any(row.state == "ready" for row in there):
        return []
    names = ", ".join(harmless_word(row.node) for row in there)
    return [
        warning("nodes", f"no node takes trials: {names} are drained", "tunemq nodes resume NODE"),
    ]


def _withheld(rows: Iterable[NodeRow]) -> list[Finding]:
    return [
        warning(
            "node-gpus",
            f"no trial begins on GPU {harmless_word(gpu.uuid)} of node {harmless_word(row.node)}:"
            f" {gpu.withheld}",
            "docs/gpus.md says what helps; the GPU is used again by itself when that has ended",
        )
        for row in rows
        for gpu in row.gpus
        if gpu.withheld is not None
    ]


def _scheduler_store(listed: NodeList) -> list[Finding]:
    found = []
    fix = (
        "correct the scheduler's keys of the store, its certificate or network; keys in a file"
        " (AWS_SHARED_CREDENTIALS_FILE) are read again by itself and its searches, for those in"
        " variables (AWS_ACCESS_KEY_ID) start the scheduler again"
    )
    for row in listed.stores:
        search = harmless_word(row.experiment)
        who = f"the scheduler's process of {search}" if search else "the scheduler"
        if row.failing_s:
            kind = problem if row.failing_s >= _FAILS_S else warning
            what = (
                f"store requests of {who} have been failing for {row.failing_s:.0f} s:"
                f" {row.problem} (it began at {_ago(row.failing_s)})"
            )
            found.append(kind(_STORE, what, fix))
        if row.copy_behind_s >= _BEHIND_S:
            what = (
                f"the copy of the journal of {search} in the store has lacked turns for"
                f" {row.copy_behind_s:.0f} s: if the head is lost now, they are lost with it"
            )
            found.append(problem("journal-copy", what, f"tunemq logs {search}; {fix}"))
    return found or [ok(_STORE, "the scheduler reports no failure")]


def _rejected(listed: NodeList) -> list[Finding]:
    """Count rejected messages: only a note, because they may be old."""
    counts = [
        f"{f'node {harmless_word(row.node)}' if row.node else 'the scheduler'} refused {row.times}"
        f" of the kind {harmless_word(row.kind)} ({harmless_word(row.reason)})"
        for row in listed.rejected
        if row.reason not in OFTEN_HONEST
    ]
    return [ok("messages", f"{'; '.join(counts) or 'none rejected'}, since each began")]


def _fix_of_node(node: NodeReport) -> str:
    about = node.node_metrics.about
    return (
        f"on {about.hostname if about else 'its machine'}: see that the store is reached from"
        " there (a shared folder: is mounted), and correct the worker's keys of the store"
        " (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file that"
        " AWS_SHARED_CREDENTIALS_FILE names) or its certificate"
    )


def _ago(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(max(0.0, time.time() - seconds)))
