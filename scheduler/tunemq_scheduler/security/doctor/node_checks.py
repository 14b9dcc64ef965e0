"""Check a farm's nodes: their versions, libraries, GPUs, disks and clocks.

These checks do no I/O: they judge what `farm_facts` read.
"""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import cloudpickle
import msgspec

from tunemq_scheduler.api.farm_answer_types import FarmDescription
from tunemq_scheduler.security.doctor.disk_checks import MAKE_ROOM, judge_disk
from tunemq_scheduler.security.doctor.node_reports import FarmReport, NodeReport
from tunemq_scheduler.security.doctor.report_checks import check_node_reports
from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_shared.base.safe_text import harmless

#: Seconds; smaller differences of clocks come from the network and busy machines.
_DIFFERS_S: Final = 5.0
#: Seconds; signatures of requests to Redis and the store expire after minutes.
_WRONG_S: Final = 60.0
#: The most searches that a line names.
_NAMED: Final = 5
#: This package must match the scheduler's, whatever other nodes have.
_PICKLER: Final = "cloudpickle"
#: CVE-2025-32434 and CVE-2026-24747: in older ones `weights_only` checkpoints could run code.
_SAFE_TORCH: Final = (2, 10)
_NODE_DISK_FIX: Final = (
    "look at the folders of its --workdir and --cache on its machine (df -h; df -i; ls -ld; findmnt"
    " -T): mount for writing, or give its user the right to write; the node gets trials again by"
    f" itself. Where it is full, {MAKE_ROOM}"
)


class RequiredVersions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that nodes must have; of Python only the first two numbers."""

    tunemq: str
    python: str
    cloudpickle: str
    whose: str

    @classmethod
    def of_farm(cls, farm: FarmDescription | None) -> RequiredVersions:
        """The scheduler's versions; without a scheduler, this interpreter's."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        tunemq = importlib.metadata.version("tunemq")
        if farm is None:
            pickler = str(cloudpickle.__version__)
            return cls(tunemq=tunemq, python=python, cloudpickle=pickler, whose="this machine")
        return cls(
            tunemq=tunemq,  # a scheduler of another version would not have answered
            python=farm.python,
            cloudpickle=farm.cloudpickle,
            whose="the scheduler",
        )


def check_nodes(
    farm_report: FarmReport, wanted: RequiredVersions, searches: Sequence[str] = ()
) -> list[Finding]:
    """Run all checks of the nodes, and of the clocks of all machines.

    Args:
        farm_report: The nodes as read from Redis.
        wanted: The versions that nodes must have.
        searches: Running and queued ones, for which a farm without nodes is a problem.
    """
    nodes = farm_report.nodes
    if not nodes and not farm_report.unreadable and not farm_report.signed:
        return [_no_node(searches), *check_clocks(farm_report)]
    return [
        *check_messages(farm_report),
        *check_versions(nodes, wanted),
        *check_libraries(nodes),
        *check_gpus(nodes),
        *check_disks(nodes),
        *check_node_reports(nodes),
        *check_clocks(farm_report),
    ]


def _no_node(searches: Sequence[str]) -> Finding:
    what, fix = "no node is there: nothing can run", "on each machine: tunemq worker"
    if not searches:
        return warning("nodes", what, fix)
    named = ", ".join(searches[:_NAMED]) + (", ..." if len(searches) > _NAMED else "")
    fix += "; where one ran, its log and the log of its service say why it ended"
    return problem("nodes", f"{what}, and these searches wait for one: {named}", fix)


def check_messages(farm_report: FarmReport) -> list[Finding]:
    """Check that the nodes' messages are valid."""
    found = [
        problem(
            "nodes",
            f"what the node with the instance {instance_id} says {why}; it is not believed",
            "start that worker with the farm's key file, tunemq worker --keys worker.toml, and"
            " with the TuneMQ of the scheduler; if you know of no such worker, a foreign"
            " client writes to this Redis: change its passwords",
        )
        for instance_id, why in farm_report.unreadable.items()
    ]
    if farm_report.signed:
        found.append(
            warning(
                "nodes",
                f"{farm_report.signed} nodes sign what they say; checking that needs keys",
                "run this where the scheduler runs: tunemq doctor --keys scheduler.toml",
            )
        )
    names = ", ".join(node.name for node in farm_report.nodes)
    return found or [ok("nodes", f"{len(farm_report.nodes)}: {names}")]


def check_versions(nodes: Iterable[NodeReport], wanted: RequiredVersions) -> list[Finding]:
    """Check that nodes have the scheduler's versions of Python, cloudpickle and TuneMQ."""
    found: list[Finding] = []
    for node in nodes:
        about = node.node_metrics.about
        if about is None:
            continue
        python = ".".join(about.python.split(".")[:2])
        pickler = about.libraries.get(_PICKLER, "")
        if python != wanted.python:
            found.append(
                problem(
                    "node-python",
                    f"node {node.name} has Python {about.python}, {wanted.whose} {wanted.python}:"
                    " the node is refused",
                    f"on {about.hostname}: python{wanted.python} -m venv VENV, install TuneMQ"
                    f" {wanted.tunemq} into it as on the head, and start VENV/bin/tunemq worker",
                )
            )
        if pickler != wanted.cloudpickle:
            found.append(
                problem(
                    "node-libraries",
                    f"node {node.name} has cloudpickle {pickler}, {wanted.whose}"
                    f" {wanted.cloudpickle}: the node is refused",
                    f"on {about.hostname}: pip install cloudpickle=={wanted.cloudpickle}, and start"
                    " the worker again",
                )
            )
        if node.node_metrics.version != wanted.tunemq:
            found.append(
                warning(
                    "node-libraries",
                    f"node {node.name} has TuneMQ {node.node_metrics.version}, {wanted.whose}"
                    f" {wanted.tunemq}",
                    f"on {about.hostname}: install TuneMQ {wanted.tunemq} as on the head, and start"
                    " the worker again",
                )
            )
    if not any(one.check == "node-python" for one in found):
        found.append(ok("node-python", f"{wanted.python} everywhere"))
    return found


def check_libraries(nodes: Iterable[NodeReport]) -> list[Finding]:
    """Check that the libraries that trials use are the same on all nodes."""
    found: list[Finding] = []
    abouts = [about for node in nodes if (about := node.node_metrics.about) is not None]
    for library in sorted({name for about in abouts for name in about.libraries} - {_PICKLER}):
        usual = _most_common(about.libraries.get(library, "") for about in abouts)
        for about in abouts:
            version = about.libraries.get(library, "")
            if version != usual:
                has = f"has {library} {version}" if version else f"lacks {library}"
                found.append(
                    warning(
                        "node-libraries",
                        f"node {about.node} {has}, others have {usual}: a trial that moves there"
                        " may fail, or continue differently",
                        f"on {about.hostname}: pip install {library}=={usual}",
                    )
                )
            elif library == "torch" and _numbers(version) < _SAFE_TORCH:
                found.append(
                    warning(
                        "node-libraries",
                        f"node {about.node} has torch {version}, in which torch.load runs code"
                        " from a checkpoint even with weights_only=True (CVE-2026-24747)",
                        f"on {about.hostname}: pip install 'torch>=2.10'",
                    )
                )
    if not found:
        found.append(ok("node-libraries", "the same everywhere, as far as trials use them"))
    return found


def check_gpus(nodes: Iterable[NodeReport]) -> list[Finding]:
    """Check that each GPU belongs to one node; a restarted node counts once."""
    owners: dict[str, dict[str, str]] = {}
    for node in nodes:
        if (about := node.node_metrics.about) is not None:
            for uuid in about.gpus:
                owners.setdefault(uuid, {})[about.node] = f"{about.node} on {about.hostname}"
    found = [
        problem(
            "node-gpus",
            f"GPU {uuid} is offered by {len(who)} workers: {', '.join(who.values())}",
            f"stop all but one of them, or give each its own GPUs: tunemq worker --gpus {uuid} for"
            " one, others for the rest; workers in containers of one machine have to share its"
            " /dev/shm to see each other",
        )
        for uuid, who in owners.items()
        if len(who) > 1
    ]
    return found or [ok("node-gpus", f"{len(owners)}, each of one worker")]


def check_disks(nodes: Iterable[NodeReport]) -> list[Finding]:
    """Check that nodes have disk space for what trials write."""
    found = [
        problem(
            "node-disk", f"no trial begins on node {node.name}: {harmless(why)}", _NODE_DISK_FIX
        )
        if (why := node.node_metrics.why_no_trial)
        else judge_disk(
            "node-disk",
            f"the working folder of node {node.name}",
            node.node_metrics.disk_free or 0.0,
            node.node_metrics.disk_size,
        )
        for node in nodes
        if node.node_metrics.why_no_trial or node.node_metrics.disk_free is not None
    ]
    bad = [one for one in found if one.fix]
    return bad or [ok("node-disk", "every node has room")]


def check_clocks(farm_report: FarmReport) -> list[Finding]:
    """Check that the clocks of Redis, this machine and the nodes agree with the median."""
    ahead: dict[str, float] = {"Redis": 0.0, "this machine": farm_report.clock_ahead_s}
    for node in farm_report.nodes:
        if node.clock_ahead_s is not None:
            ahead[f"node {node.name}"] = node.clock_ahead_s
    truth = statistics.median_low(ahead.values())
    off = {who: seconds - truth for who, seconds in ahead.items()}
    found = []
    for who, seconds in off.items():
        if abs(seconds) < _DIFFERS_S:
            continue
        kind = problem if abs(seconds) >= _WRONG_S else warning
        direction = "ahead of" if seconds > 0 else "behind"
        found.append(
            kind(
                "clocks",
                f"the clock of {who} is {_duration(abs(seconds))} {direction} the others",
                f"set it by NTP on the machine of {who}: timedatectl set-ntp true, and see that"
                " `timedatectl` says that it is synchronised",
            )
        )
    return found or [ok("clocks", f"{len(ahead)} agree within {_DIFFERS_S:g} s")]


def _most_common(versions: Iterable[str]) -> str:
    """The most common version; the newest of equally common ones."""
    counted = Counter(version for version in versions if version)
    return max(counted, key=lambda version: (counted[version], _numbers(version), version))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:4]))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
