"""Write dashboards/tunemq.json: `python deploy/grafana/make_dashboard.py`.

The panels fill rows of 24 columns from left to right. One test compares the file with this module's
output, and another one sends each query to a Prometheus.
"""

# ruff: noqa: INP001
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from parts import BLUE, GREEN, GREY, RED, YELLOW, dashboard, lines, matrix, stat, table

_FILE: Final = Path(__file__).parent / "dashboards" / "tunemq.json"
#: States have the same colours in all panels.
TRIALS: Final = {
    "RUNNING": GREEN,
    "PENDING": YELLOW,
    "PAUSED": BLUE,
    "TERMINATED": "dark-green",
    "ERROR": RED,
}
SEARCHES: Final = {
    "RUNNING": GREEN,
    "QUEUED": YELLOW,
    "PAUSED": BLUE,
    "STOPPING": "orange",
    "STOPPED": "orange",
    "FINISHED": "dark-green",
    "FAILED": RED,
}
NODES: Final = {
    "ready": GREEN,
    "draining": YELLOW,
    "drained": BLUE,
    "set aside": GREY,
    "silent": RED,
}


def _said(text: str, color: str) -> dict[str, Any]:
    return {"text": text, "color": color}


ROWS: Final = {
    "At a glance": [
        stat(
            "Alerts",
            "Firing alerts of deploy/prometheus/tunemq.rules.yml, without those of severity info.",
            'count(ALERTS{alertstate="firing",severity!="info",{F}}) or vector(0)',
            steps=[(None, GREEN), (1, RED)],
        ),
        stat(
            "Scheduler heard",
            "Time since the scheduler's loop last reported the farm's state. More than some "
            "seconds: it hangs, or a clock is wrong. Away: it does not answer.",
            "max(timestamp(tunemq_scheduler_said_timestamp_seconds{{F}}) "
            "- tunemq_scheduler_said_timestamp_seconds{{F}})",
            unit="s",
            steps=[(None, GREEN), (20, YELLOW), (40, RED)],
            noValue="away",
            decimals=0,
        ),
        stat(
            "Redis",
            "Whether the scheduler reaches Redis, and Redis has memory left. If not, trials "
            "continue, and nodes keep their reports.",
            "max(tunemq_redis_away{{F}} + 2 * (tunemq_redis_full_seconds{{F}} > bool 0))",
            mappings=[
                {
                    "type": "value",
                    "options": {
                        "0": _said("there", GREEN),
                        "1": _said("away", RED),
                        "2": _said("full", RED),
                    },
                }
            ],
        ),
        stat(
            "Nodes ready",
            "Nodes that take trials.",
            'sum(tunemq_nodes{{F},state="ready"})',
            steps=[(None, RED), (1, GREEN)],
        ),
        stat(
            "Searches running",
            "Searches that have a process on the head.",
            'sum(tunemq_experiments{{F},state="RUNNING"})',
        ),
        stat(
            "Searches in the queue",
            "Searches that wait to begin: at most max_running run at once.",
            "sum(tunemq_queue_length{{F}})",
            steps=[(None, GREY), (1, YELLOW)],
        ),
        stat(
            "Trials running",
            "Trials that have a slot on a node.",
            'sum(tunemq_trials{{F},state="RUNNING"}) or vector(0)',
        ),
        stat(
            "Trials waiting",
            "Trials that only wait for a free slot. `tunemq why NAME` gives the reason.",
            'sum(tunemq_trials_waiting{{F},resource=~"cpu|gpu"}) or vector(0)',
        ),
        stat(
            "Results per second",
            "Results that trials report, over the last minute.",
            "sum(rate(tunemq_results_total{{F}}[1m]))",
            decimals=1,
        ),
        stat(
            "GPUs held",
            "The part of the farm's GPUs that trials hold.",
            "sum(tunemq_node_gpus_used{{F}}) / (sum(tunemq_node_gpus{{F}}) > 0)",
            unit="percentunit",
            noValue="no GPUs",
            decimals=0,
        ),
        stat(
            "GPUs busy",
            "The share of time in which the farm's GPUs are busy, by any user.",
            "avg(tunemq_gpu_busy_ratio{{F}})",
            unit="percentunit",
            noValue="unknown",
            decimals=0,
        ),
        stat(
            "Messages refused",
            "Rejected messages in the last hour, without reasons that healthy farms have, too.",
            "sum(increase(tunemq_messages_refused_total"
            '{{F},reason!~"dead_node|unknown_node|old_term|repeated"}[1h])) or vector(0)',
            steps=[(None, GREEN), (0.5, RED)],
            decimals=0,
        ),
    ],
    "Searches and trials": [
        lines(
            "Trials by state",
            "Trials of searches that have a process. The panel beside also counts trials that a "
            "search has not drawn yet.",
            ("sum by (state) (tunemq_trials{{F}})", "{{state}}"),
            stacked=True,
            colors=TRIALS,
        ),
        lines(
            "Trials waiting, by what they need",
            "Trials that only wait for a free slot, with a GPU or without one.",
            ('sum by (resource) (tunemq_trials_waiting{{F},resource=~"cpu|gpu"})', "{{resource}}"),
        ),
        matrix(
            "Searches now",
            "Trials of each running search, by state.",
            "sum by (experiment, state) (tunemq_trials{{F}})",
            "experiment",
            "state",
            12,
        ),
        lines(
            "Results per second",
            "Results that trials report. Above the rate in docs/scaling.md, decisions come late.",
            ("sum(rate(tunemq_results_total{{F}}[$__rate_interval]))", "results"),
        ),
        lines(
            "Searches that have not ended",
            "By state; QUEUED searches wait: at most max_running run at once.",
            (
                'sum by (state) (tunemq_experiments{{F},state=~"QUEUED|RUNNING|PAUSED|STOPPING"})',
                "{{state}}",
            ),
            stacked=True,
            colors=SEARCHES,
        ),
        lines(
            "Ended searches",
            "By state at their end, without removed searches.",
            (
                'sum by (state) (tunemq_experiments{{F},state=~"FINISHED|STOPPED|FAILED"})',
                "{{state}}",
            ),
            colors=SEARCHES,
        ),
    ],
    "GPUs": [
        lines(
            "GPUs offered, held and busy",
            "Held: GPUs that trials hold. Busy: from the drivers. If they are far apart, trials "
            "wait for data, or hold GPUs that they do not use. GPUs set aside are not offered.",
            ("sum(tunemq_node_gpus{{N}})", "offered"),
            ("sum(tunemq_node_gpus_used{{N}})", "held"),
            ("sum(tunemq_gpu_busy_ratio{{N}})", "busy"),
            ("sum(tunemq_node_gpus_withheld{{N}})", "set aside"),
            dashed="offered",
        ),
        lines(
            "GPU memory",
            "Used and total memory of all GPUs, by any user.",
            ("sum(tunemq_gpu_memory_bytes{{N}})", "total"),
            ("sum(tunemq_gpu_memory_used_bytes{{N}})", "used"),
            unit="bytes",
            dashed="total",
        ),
        lines(
            "How busy each GPU is",
            "The share of time in which each GPU is busy, as its driver reports it.",
            ("tunemq_gpu_busy_ratio{{N}}", "{{node}} {{uuid}}"),
            unit="percentunit",
            most=1,
        ),
        table(
            "GPUs now",
            "Each GPU with a UUID: the part that trials hold, and the numbers of its driver.",
            [
                ("held", "sum by (node, uuid, model) (tunemq_gpu_held_ratio{{N}})", "percentunit"),
                ("busy", "sum by (node, uuid, model) (tunemq_gpu_busy_ratio{{N}})", "percentunit"),
                (
                    "memory used",
                    "sum by (node, uuid, model) (tunemq_gpu_memory_used_bytes{{N}})",
                    "bytes",
                ),
                ("memory", "sum by (node, uuid, model) (tunemq_gpu_memory_bytes{{N}})", "bytes"),
            ],
            {"node": "node", "model": "model", "uuid": "UUID"},
            12,
        ),
    ],
    "Nodes": [
        table(
            "Nodes now",
            "What each node offers, what trials hold, and the state of its machine. `lease`: time "
            "since the node's last sign of life. `outbox`: reports that no journal has yet.",
            [
                ("trials", "sum by (node) (tunemq_node_trials{{N}})", "short"),
                ("CPUs", "sum by (node) (tunemq_node_cpus{{N}})", "short"),
                ("CPUs held", "sum by (node) (tunemq_node_cpus_used{{N}})", "short"),
                ("GPUs", "sum by (node) (tunemq_node_gpus{{N}})", "short"),
                ("GPUs held", "sum by (node) (tunemq_node_gpus_used{{N}})", "short"),
                ("set aside", "sum by (node) (tunemq_node_gpus_withheld{{N}})", "short"),
                ("load", "max by (node) (tunemq_node_load1{{N}})", "short"),
                ("memory left", "min by (node) (tunemq_node_memory_available_bytes{{N}})", "bytes"),
                ("disk left", "min by (node) (tunemq_node_disk_free_bytes{{N}})", "bytes"),
                ("lease", "max by (node) (tunemq_node_lease_age_seconds{{N}})", "s"),
                ("outbox", "sum by (node) (tunemq_node_outbox_bytes{{N}})", "bytes"),
            ],
            {"node": "node"},
        ),
        lines(
            "Nodes by state",
            "A silent node has lost its lease: its trials continue elsewhere.",
            ("sum by (state) (tunemq_nodes{{F}})", "{{state}}"),
            stacked=True,
            colors=NODES,
        ),
        lines(
            "Age of leases",
            "Each node renews its lease every second, and loses it after six.",
            ("tunemq_node_lease_age_seconds{{N}}", "{{node}}"),
            unit="s",
        ),
        lines(
            "CPUs held",
            "The part of each node's CPUs that trials hold.",
            ("tunemq_node_cpus_used{{N}} / (tunemq_node_cpus{{N}} > 0)", "{{node}}"),
            unit="percentunit",
            most=1,
        ),
        lines(
            "Load per CPU",
            "Load average of one minute, divided by the CPUs that the node offers. Above 1: trials "
            "run more than they requested, or others use the machine.",
            ("tunemq_node_load1{{N}} / (tunemq_node_cpus{{N}} > 0)", "{{node}}"),
        ),
        lines(
            "Memory left",
            "Free memory of each node's machine.",
            ("tunemq_node_memory_available_bytes{{N}}", "{{node}}"),
            unit="bytes",
        ),
        lines(
            "Disk left",
            "Free space on the disk of each node's --workdir. Below 256 MiB a node gets no trials.",
            ("tunemq_node_disk_free_bytes{{N}}", "{{node}}"),
            unit="bytes",
        ),
        lines(
            "Reports that no journal has yet",
            "A node keeps reports of its trials until a journal has them. The amount grows when a "
            "search's process, the head's disk or Redis does not keep up.",
            ("tunemq_node_outbox_bytes{{N}}", "{{node}}"),
            unit="bytes",
        ),
        lines(
            "Copies of checkpoints",
            "Copies on each node, from which trials continue there without the store.",
            ("tunemq_node_cache_bytes{{N}}", "{{node}}"),
            unit="bytes",
        ),
        lines(
            "Other resources held",
            "The part of the resources offered with --resources that trials hold.",
            (
                (
                    "sum by (resource) (tunemq_node_resource_used{{N}})"
                    " / (sum by (resource) (tunemq_node_resource{{N}}) > 0)"
                ),
                "{{resource}}",
            ),
            unit="percentunit",
            most=1,
            width=24,
        ),
    ],
    "Store and head": [
        lines(
            "Store requests per second",
            "Requests of the scheduler (without a name) and of nodes to object stores; dashed: "
            "failed ones.",
            (
                "sum by (node) (rate(tunemq_store_requests_total{{N}}[$__rate_interval]))",
                "{{node}}",
            ),
            (
                "sum by (node) (rate(tunemq_store_failures_total{{N}}[$__rate_interval]))",
                "{{node}}, failed",
            ),
            dashed="/.*failed/",
        ),
        lines(
            "No answer from the store",
            "For how long all requests have failed. Trials wait with their next checkpoint.",
            ("max by (node) (tunemq_store_failing_seconds{{N}})", "{{node}}"),
            unit="s",
        ),
        lines(
            "Waiting uploads",
            "Bytes of checkpoints on nodes, and of journals on the head (without a name).",
            ("sum by (node) (tunemq_store_queue_bytes{{N}})", "{{node}}"),
            unit="bytes",
        ),
        lines(
            "Trials that wait for the store",
            "By search: trials that wait to write or read a checkpoint.",
            ("sum by (experiment) (tunemq_trials_waiting_for_store{{F}})", "{{experiment}}"),
        ),
        lines(
            "Journal copies",
            "Time for which the copy of a search's journal in the store has lacked turns.",
            ("max by (experiment) (tunemq_journal_copy_behind_seconds{{F}})", "{{experiment}}"),
            unit="s",
        ),
        lines(
            "Disks of the head",
            "Free space of the scheduler's disks; dashed: size.",
            ("min by (disk) (tunemq_head_disk_free_bytes{{F}})", "{{disk}}"),
            ("min by (disk) (tunemq_head_disk_size_bytes{{F}})", "{{disk}}, size"),
            unit="bytes",
            dashed="/.*size/",
        ),
        lines(
            "Certificates",
            "How long each certificate that the scheduler receives or trusts remains valid.",
            (
                (
                    "min by (certificate) "
                    "(tunemq_certificate_expiry_timestamp_seconds{{F}}) - time()"
                ),
                "{{certificate}}",
            ),
            unit="s",
        ),
        lines(
            "Last backup",
            "Time since the last recorded backup (docs/deploy/monitoring.md).",
            ("time() - max(tunemq_last_backup_timestamp_seconds{{F}})", "backup"),
            unit="s",
        ),
    ],
    "Owners": [
        lines(
            "GPUs of owners",
            "GPUs that each owner holds; dashed: GPUs that it is entitled to.",
            ("sum by (owner) (tunemq_owner_gpus_held{{F}})", "{{owner}}"),
            ("sum by (owner) (tunemq_owner_gpus_entitled{{F}})", "{{owner}}, entitled to"),
            dashed="/.*entitled to/",
        ),
        lines(
            "Shares of owners without GPUs",
            "The part of the farm that each owner holds with trials that need no GPU; dashed: the "
            "part that it is entitled to.",
            ("sum by (owner) (tunemq_owner_share_held_ratio{{F}})", "{{owner}}"),
            ("sum by (owner) (tunemq_owner_share_entitled_ratio{{F}})", "{{owner}}, entitled to"),
            unit="percentunit",
            dashed="/.*entitled to/",
        ),
        lines(
            "How far owners are behind",
            "Seconds of its share that an owner has missed, by pool; below 0 it had more. The "
            "owner that is furthest behind gets the next slots.",
            ("sum by (owner, pool) (tunemq_owner_behind_seconds{{F}})", "{{owner}}, {{pool}}"),
            unit="s",
            least=None,
            width=24,
        ),
    ],
    "Scheduler": [
        lines(
            "Turns of the loop",
            "How long turns last, without waiting. Above some hundred milliseconds decisions come "
            "late (docs/scaling.md).",
            (
                (
                    "histogram_quantile(0.5, sum by (le) "
                    "(rate(tunemq_scheduler_turn_seconds_bucket{{F}}[$__rate_interval])))"
                ),
                "median",
            ),
            (
                (
                    "histogram_quantile(0.99, sum by (le) "
                    "(rate(tunemq_scheduler_turn_seconds_bucket{{F}}[$__rate_interval])))"
                ),
                "99th percentile",
            ),
            unit="s",
        ),
        lines(
            "How busy the loop is",
            "The share of time in which the loop does not wait: at 1 it is full. Also the CPU time "
            "of its whole process.",
            ("sum(rate(tunemq_scheduler_turn_seconds_sum{{F}}[$__rate_interval]))", "loop"),
            (
                (
                    "sum(rate(process_cpu_seconds_total{{F}}[$__rate_interval])"
                    " and on (instance) tunemq_redis_away)"
                ),
                "process",
            ),
            unit="percentunit",
        ),
        lines(
            "Memory of the scheduler",
            "Memory of the scheduler's process; each search has a separate process.",
            (
                "process_resident_memory_bytes{{F}} and on (instance) tunemq_redis_away",
                "{{instance}}",
            ),
            unit="bytes",
        ),
        lines(
            "Messages refused per minute",
            "Rejected messages: who rejected them, their kind and the reason (docs/security.md). "
            "Some of `repeated`, `old_term`, `dead_node` and `unknown_node` are normal.",
            (
                (
                    "sum by (node, kind, reason) "
                    "(rate(tunemq_messages_refused_total{{F}}[$__rate_interval])) * 60"
                ),
                "{{node}} {{kind}}: {{reason}}",
            ),
        ),
        table(
            "Alerts now",
            "Firing and pending alerts; Prometheus shows under Alerts what to do.",
            [
                (
                    "alerts",
                    "count by (alertname, alertstate, severity, node, experiment) (ALERTS{{F}})",
                    "short",
                )
            ],
            {
                "alertname": "alert",
                "alertstate": "state",
                "severity": "severity",
                "node": "node",
                "experiment": "search",
            },
        ),
    ],
}


def text() -> str:
    """Return the contents of the file."""
    return json.dumps(dashboard(ROWS), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    _FILE.write_text(text(), encoding="utf-8")
