"""Converts a `FarmSnapshot` to Prometheus metrics. Importing it needs the extra ``metrics``.

Names follow the conventions of Prometheus: base units, and ``_total`` for counters only. A series
belongs to a node's *name*, so it continues after a restart of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.farm.allocation.allocation_reasons import OwnerAccount
from tunemq_scheduler.farm.allocation.amounts import GPUS
from tunemq_scheduler.farm.monitoring.metrics_snapshot import BUCKETS_S, FarmSnapshot, NodeSnapshot

_Labels = TypeVar("_Labels", bound=tuple[str, ...])
#: For each resource: the name of its metric, that of its use, and a description.
_RESOURCES: Final = {
    "cpu": ("cpus", "cpus_used", "CPUs"),
    "gpu": ("gpus", "gpus_used", "GPUs"),
    "memory": ("memory_bytes", "memory_used_bytes", "Bytes of memory"),
}
_NODE_STATES: Final = ("ready", "draining", "drained", "set aside", "silent")
#: For each node, by the name of the metric; None if a node does not report it.
_OF_NODE: Final[Mapping[str, tuple[str, Callable[[NodeSnapshot], float | None]]]] = {
    "trials": ("Trials that a node is to host.", lambda node: node.row.trials),
    "trial_processes": (
        "Processes of trials on a node.",
        lambda node: node.node_metrics.trial_processes,
    ),
    "lease_age_seconds": ("How long ago a node renewed its lease.", lambda node: node.silence_s),
    "outbox_bytes": (
        "What a node has reported and no journal has yet.",
        lambda node: node.node_metrics.outbox,
    ),
    "cache_bytes": ("Copies of checkpoints on a node.", lambda node: node.node_metrics.cache),
    "load1": ("A node's load average of a minute.", lambda node: node.node_metrics.load),
    "memory_available_bytes": (
        "Available memory of a node.",
        lambda node: node.node_metrics.memory_free,
    ),
    "disk_free_bytes": (
        "Free space on the disk of a node's working folder.",
        lambda node: node.node_metrics.disk_free,
    ),
    "disk_free_inodes": (
        "How many more files the disk of a node's working folder has inodes for.",
        lambda node: node.node_metrics.disk_free_inodes,
    ),
    "disk_unwritable": (
        "1 while no file can be made in a node's working folder or cache.",
        lambda node: float(bool(node.node_metrics.disk_problem)),
    ),
}
_OF_OWNER: Final[Mapping[str, tuple[str, str, Callable[[OwnerAccount], float]]]] = {
    "owner_gpus_held": ("GPUs that an owner holds.", GPUS, lambda one: one.held),
    "owner_gpus_entitled": ("GPUs that an owner is entitled to.", GPUS, lambda one: one.entitled),
    "owner_share_held_ratio": (
        "The part of the farm that an owner holds without GPUs.",
        "",
        lambda one: one.held,
    ),
    "owner_share_entitled_ratio": (
        "The part of the farm that an owner is entitled to without GPUs.",
        "",
        lambda one: one.entitled,
    ),
}


def metrics_of(farm: FarmSnapshot) -> Iterator[Metric]:
    """Yield all known metrics of a farm at one moment."""
    yield from _of_scheduler(farm)
    yield from _of_head(farm)
    if not farm.is_known:
        return
    yield from _of_experiments(farm)
    states = dict.fromkeys(_NODE_STATES, 0)
    nodes: dict[str, NodeSnapshot] = {}
    for node in farm.nodes:
        states[node.row.state] = states.get(node.row.state, 0) + 1
        known = nodes.get(node.row.node)
        if known is None or known.row.since <= node.row.since:
            nodes[node.row.node] = node
    about = "Nodes in each state."
    yield _gauge("nodes", about, {(state,): count for state, count in states.items()}, "state")
    yield from _of_stores(farm, nodes)
    yield from _of_nodes(nodes)
    yield from _of_gpus(nodes)
    yield from _of_owners(farm)


def _of_experiments(farm: FarmSnapshot) -> Iterator[Metric]:
    states = {(str(state),): farm.experiments.get(state, 0) for state in State}
    yield _gauge("experiments", "Experiments in each state.", states, "state")
    queued = {(): states[str(State.QUEUED),]}
    yield _gauge("queue_length", "Experiments that wait to begin.", queued)
    trials = {
        (name, state): count
        for name, counts in farm.trials.items()
        for state, count in counts.items()
    }
    about = "Trials of each running experiment in each state."
    yield _gauge("trials", about, trials, "experiment", "state")
    about = "1 for each experiment that stands still, and why: failing, silent or waiting."
    troubles = dict.fromkeys(farm.troubles.items(), 1)
    yield _gauge("search_trouble", about, troubles, "experiment", "kind")
    waiting = {
        (name, resource): count
        for name, counts in farm.waiting.items()
        for resource, count in counts.items()
    }
    about = "Trials that a running experiment would begin at once, had it the slots."
    yield _gauge("trials_waiting", about, waiting, "experiment", "resource")
    about = "Results of trials that experiments were given to handle."
    results = CounterMetricFamily("tunemq_results", about)
    results.add_metric((), farm.results)
    yield results


def _of_scheduler(farm: FarmSnapshot) -> Iterator[Metric]:
    counts, seconds = farm.turns
    bounds = (*map(str, BUCKETS_S), "+Inf")
    yield HistogramMetricFamily(
        "tunemq_scheduler_turn_seconds",
        "How long turns of the scheduler's loop last, less the waiting.",
        buckets=list(zip(bounds, counts, strict=True)),
        sum_value=seconds,
    )
    about = "When the scheduler's loop said all this; Unix time."
    yield _gauge("scheduler_said_timestamp_seconds", about, {(): farm.at})
    about = "1 while Redis cannot be reached, or cannot write to its disk."
    yield _gauge("redis_away", about, {(): int(farm.is_redis_away)})
    about = "For so long Redis has had no memory for orders and results; 0 while it has."
    yield _gauge("redis_full_seconds", about, {(): farm.redis_full_s})
    rejected = CounterMetricFamily(
        "tunemq_messages_refused",
        "Messages that were not believed; node is who refused them, empty for the scheduler.",
        labels=("node", "kind", "reason"),
    )
    for (node, kind, reason), times in _by_node(farm).items():
        rejected.add_metric((node, kind, reason), times)
    yield rejected


def _of_stores(farm: FarmSnapshot, nodes: Mapping[str, NodeSnapshot]) -> Iterator[Metric]:
    """Yield the store metrics of the scheduler's processes (empty node) and of nodes."""
    said = {"": farm.traffic} | {name: one.node_metrics.store for name, one in nodes.items()}
    requests = CounterMetricFamily(
        "tunemq_store_requests",
        "Requests to object stores; node is who made them, empty for the scheduler.",
        labels=("node",),
    )
    failures = CounterMetricFamily(
        "tunemq_store_failures",
        "Requests to object stores that were refused or not answered.",
        labels=("node",),
    )
    for name, traffic in said.items():
        requests.add_metric((name,), traffic.requests)
        failures.add_metric((name,), traffic.failures)
    yield requests
    yield failures
    about = "Bytes of checkpoints and journals that wait to be sent to object stores."
    queued = {(name,): traffic.queue_bytes for name, traffic in said.items()}
    yield _gauge("store_queue_bytes", about, queued, "node")
    about = "For so long no request to a store has succeeded; 0 while all do."
    failing = {(name,): traffic.failing_s for name, traffic in said.items()}
    yield _gauge("store_failing_seconds", about, failing, "node")
    about = "Trials of each running experiment that wait for an object store."
    waiting = {(name,): use.waiting for name, use in farm.store_uses.items()}
    yield _gauge("trials_waiting_for_store", about, waiting, "experiment")
    about = "For so long the copy of an experiment's journal in the store has lacked turns."
    behind = {(name,): use.copy_behind_s for name, use in farm.store_uses.items()}
    yield _gauge("journal_copy_behind_seconds", about, behind, "experiment")


def _of_head(farm: FarmSnapshot) -> Iterator[Metric]:
    """Yield the metrics of the scheduler's own machine that no other exporter provides."""
    disks = farm.head.disks.items()
    free = {(what,): disk.free for what, disk in disks}
    yield _gauge("head_disk_free_bytes", "Free space on a disk of the head.", free, "disk")
    size = {(what,): disk.size for what, disk in disks}
    yield _gauge("head_disk_size_bytes", "The size of a disk of the head.", size, "disk")
    about = "How many more files a disk of the head has inodes for."
    inodes = {(what,): disk.free_inodes for what, disk in disks}
    yield _gauge("head_disk_free_inodes", about, inodes, "disk")
    about = "1 while no file can be written to a disk of the head, for instance a read-only one."
    unwritable = {(what,): float(not disk.is_writable) for what, disk in disks}
    yield _gauge("head_disk_unwritable", about, unwritable, "disk")
    about = "When a certificate expires that the scheduler meets or trusts; Unix time."
    expires = {(what,): at for what, at in farm.head.certificates.items()}
    yield _gauge("certificate_expiry_timestamp_seconds", about, expires, "certificate")
    about = "When the last backup was noted; Unix time. Missing where none was."
    yield _gauge("last_backup_timestamp_seconds", about, {(): farm.head.backup_at})


def _by_node(farm: FarmSnapshot) -> Mapping[tuple[str, str, str], int]:
    """Return the number of rejected messages; instances of the same node are added up."""
    rejected: dict[tuple[str, str, str], int] = {}
    for row in farm.rejected:
        key = row.node, row.kind, row.reason
        rejected[key] = rejected.get(key, 0) + row.times
    return rejected


def _of_nodes(nodes: Mapping[str, NodeSnapshot]) -> Iterator[Metric]:
    for resource, (total, used, words) in _RESOURCES.items():
        amounts = {(name,): one.row.total.get(resource, 0.0) for name, one in nodes.items()}
        yield _gauge(f"node_{total}", f"{words} that a node offers.", amounts, "node")
        amounts = {(name,): one.row.used.get(resource, 0.0) for name, one in nodes.items()}
        yield _gauge(f"node_{used}", f"{words} that experiments have of a node.", amounts, "node")
    custom = {
        (name, resource): (amount, one.row.used.get(resource, 0.0))
        for name, one in nodes.items()
        for resource, amount in one.row.total.items()
        if resource not in _RESOURCES
    }
    about = "Other resources that a node offers."
    offered = {key: amounts[0] for key, amounts in custom.items()}
    yield _gauge("node_resource", about, offered, "node", "resource")
    about = "Other resources that experiments have of a node."
    taken = {key: amounts[1] for key, amounts in custom.items()}
    yield _gauge("node_resource_used", about, taken, "node", "resource")
    for metric, (about, of) in _OF_NODE.items():
        values = {(name,): of(one) for name, one in nodes.items()}
        yield _gauge(f"node_{metric}", about, values, "node")


def _of_gpus(nodes: Mapping[str, NodeSnapshot]) -> Iterator[Metric]:
    labels = ("node", "uuid", "model")
    held: dict[tuple[str, ...], float | None] = {}
    memory: dict[tuple[str, ...], float | None] = {}
    busy: dict[tuple[str, ...], float | None] = {}
    used: dict[tuple[str, ...], float | None] = {}
    for name, one in nodes.items():
        said = {gpu.uuid: gpu for gpu in one.node_metrics.gpus}
        for gpu in one.row.gpus:
            key = name, gpu.uuid, gpu.model
            held[key], memory[key] = gpu.used, gpu.memory or None
            if gpu.uuid in said:
                busy[key], used[key] = said[gpu.uuid].busy, said[gpu.uuid].memory_used
    yield _gauge("gpu_held_ratio", "The part of a GPU that experiments have.", held, *labels)
    yield _gauge("gpu_memory_bytes", "The memory of a GPU.", memory, *labels)
    about = "The part of the time in which a GPU does something."
    yield _gauge("gpu_busy_ratio", about, busy, *labels)
    about = "GPUs of a node on which no trial begins, for something is wrong with them."
    withheld = {
        (name,): sum(gpu.withheld is not None for gpu in one.row.gpus)
        for name, one in nodes.items()
    }
    yield _gauge("node_gpus_withheld", about, withheld, "node")
    about = "Memory of a GPU that all processes together use."
    yield _gauge("gpu_memory_used_bytes", about, used, *labels)


def _of_owners(farm: FarmSnapshot) -> Iterator[Metric]:
    for metric, (about, pool, of) in _OF_OWNER.items():
        values = {
            (one.owner, str(one.priority)): of(one)
            for one in farm.accounts
            if (one.pool == GPUS) == (pool == GPUS)
        }
        yield _gauge(metric, about, values, "owner", "priority")
    behind = {(one.owner, str(one.priority), one.pool): one.behind_s for one in farm.accounts}
    about = "Seconds of its share that an owner has missed; below 0 it had beyond it."
    yield _gauge("owner_behind_seconds", about, behind, "owner", "priority", "pool")


def _gauge(name: str, about: str, values: Mapping[_Labels, float | None], *labels: str) -> Metric:
    family = GaugeMetricFamily(f"tunemq_{name}", about, labels=labels)
    for key, value in values.items():
        if value is not None:
            family.add_metric(key, value)
    return family
