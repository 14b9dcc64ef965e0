"""Benchmark scenarios; each yields rows of the table.

Budgets are those of the design, on a machine with two cores. Where the peer would take minutes, it
does less work, and the row says so.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

from benchmarks.bench import Bench
from benchmarks.checkpoints import checkpoints, saving_beside
from benchmarks.figures import Row
from benchmarks.peers import Peer, Running
from benchmarks.trees import footprint


def first_result(bench: Bench) -> Iterator[Row]:
    """From the start of the script's process to its first result."""
    row = Row("process start to first result", "s", goal=0.6)
    for peer in bench.repeat():
        running = peer.search("--announce", 1)
        row.add(peer.name, running.figures["first_result"] - running.started)
    yield row


def short_trials(bench: Bench) -> Iterator[Row]:
    """Trials of one result, two at a time, when things have settled."""
    for what, goal, options, trials in (
        ("one-result trials, processes reused", 2.0, ("--reuse",), {"tunemq": 1_000, "ray": 80}),
        ("one-result trials, a process each", 5.0, (), {"tunemq": 600, "ray": 14}),
        (
            "the same with scikit-learn",
            15.0,
            ("--trainable", "model"),
            {"tunemq": 300, "ray": 10},
        ),
    ):
        row = Row(what, "ms a trial", goal=goal)
        for peer in bench.repeat():
            running = peer.search("--trials", trials[peer.name], *options)
            row.add(peer.name, _ms_a_trial(running.figures["ends"]))
        yield row


def _ms_a_trial(ends: list[float]) -> float:
    """Between one end and the next, the first sixth not counted."""
    ends = sorted(ends)
    skipped = max(1, len(ends) // 6)
    return 1_000 * (ends[-1] - ends[skipped]) / (len(ends) - 1 - skipped)


def many_results(bench: Bench) -> Iterator[Row]:
    """Results a second, from the first report to the last record, with the loggers on."""
    for what, results in (
        ("8 trials x 500 results", {"tunemq": 500, "ray": 500}),
        ("8 trials x 20,000 results (Ray: 8 x 2,000)", {"tunemq": 20_000, "ray": 2_000}),
    ):
        row = Row(what, "results/s", goal=50_000, more_is_better=True)
        for peer in bench.repeat():
            count = results[peer.name]
            options = ("--trainable", "many", "--trials", 8, "--cpus", 8, "--results", count)
            row.add(peer.name, _results_a_second(peer.search(*options), 8 * count))
        yield row


def _results_a_second(running: Running, results: int) -> float:
    return results / (max(running.figures["ends"]) - running.figures["began"])


def lock_step(bench: Bench) -> Iterator[Row]:
    """A decision on every result, beside a bare Celery task there and an entry back."""
    rate = Row("1 trial x 2,000, a decision on each", "results/s", more_is_better=True)
    ratio = Row("the same / bare Celery round trips", "", goal=0.7, more_is_better=True)
    for peer in bench.repeat():
        options = ("--trainable", "many", "--results", 2_000, "--lock-step")
        rate.add(peer.name, _results_a_second(peer.search(*options), 2_000))
        if peer is bench.ours:
            trips = 1_000 / _floors(peer).figures["celery_round_trip_ms"]
            rate.add("floor", trips)
            ratio.add("tunemq", rate.values["tunemq"][-1] / trips)
    yield rate
    yield ratio


def idle(bench: Bench) -> Iterator[Row]:
    """The resources of all processes while an experiment with two slots is idle."""
    for what, until, options in (
        ("between two searches", "ends", ("--stay",)),
        (
            "2 trials asleep",
            "first_result",
            ("--trainable", "sleep", "--trials", 2, "--announce", 2),
        ),
    ):
        rows = {
            "pss": Row(f"idle, {what}: PSS", "MiB", goal=150),
            "rss": Row(f"idle, {what}: RSS", "MiB"),
            "cpu": Row(f"idle, {what}: CPU", "% of a core", goal=1),
            "processes": Row(f"idle, {what}: processes", ""),
        }
        for peer in bench.peers:
            with peer.searching(*options) as running:
                running.wait_for(until)
                footprint(running.pid, 3)  # until earlier work has settled
                found = footprint(running.pid, 15)
            for name, row in rows.items():
                row.add(peer.name, getattr(found, name))
        yield from rows.values()


def core(bench: Bench) -> Iterator[Row]:
    """The scheduler's own costs, on the simulated executor."""
    figures = {"tunemq": bench.ours.measure("core.py", until="asha_us").figures}
    for peer in bench.peers[1:]:
        figures[peer.name] = peer.measure("ray_core.py", until="asha_us").figures
    for name, what, goal in (
        ("asha_us", "ASHA's decision, {} trials", 20.0),
        ("turn_us", "a turn of the loop, {} trials finished", 30.0),
        ("event_us", "1,000 nodes, ASHA, {} trials: an event", None),
    ):
        for size in figures["tunemq"][name]:
            row = Row(what.format(f"{int(size):,}"), "us", goal=goal)
            for peer, measured in figures.items():
                if name in measured:
                    row.add(peer, measured[name][size])
            yield row
    ours = figures["tunemq"]
    kept = Row("memory a finished trial leaves", "bytes", goal=1_024)
    kept.add("tunemq", ours["bytes_per_finished_trial"])
    yield kept
    whole = Row("1,000 nodes, ASHA, 10,000 trials x 23 results", "s", goal=60)
    whole.add("tunemq", ours["scale_s"])
    yield whole


def faults(bench: Bench) -> Iterator[Row]:
    """1,000,000 events of a simulated farm in which everything goes wrong, audited."""
    rate = Row(
        "1,000,000 events under faults, audited", "events/s", goal=20_000, more_is_better=True
    )
    for _ in range(bench.runs):
        found = bench.ours.measure("faults.py", until="events_per_s").figures
        rate.add("tunemq", found["events_per_s"])
    yield rate


def farm(bench: Bench) -> Iterator[Row]:
    """The scheduler of a farm is killed, and started again by the same command."""
    row = Row("farm: SIGKILL of the scheduler, restart to a new result", "s", goal=1.5)
    for _ in range(bench.runs):
        found = bench.ours.measure("farm_restart.py", 5, until="restart_s").figures
        row.add("tunemq", found["restart_s"])
    yield row


def farm_queue(bench: Bench) -> Iterator[Row]:
    """An urgent experiment is submitted to a farm with 1,000 that wait."""
    row = Row("farm, 1,000 wait: submission of an urgent one to its first trial", "s", goal=1.0)
    for _ in range(bench.runs):
        found = bench.ours.measure("farm_queue.py", 1_000, 5, until="first_trial_s").figures
        row.add("tunemq", found["first_trial_s"])
    yield row


def farm_neighbours(bench: Bench) -> Iterator[Row]:
    """From a result to its decision, on a farm with misbehaving experiments; runs once."""
    found = bench.ours.measure("farm_neighbours.py", 18, 4, until="ratio").figures
    for name, what, unit, goal in (
        ("alone_ms", "farm: a result to its decision, alone, p99", "ms", None),
        ("beside_ms", "the same beside a sleeper, a crasher and a reader of keys, p99", "ms", None),
        ("ratio", "the same / alone", "", 1.2),
        ("ratio_low", "the same, lower end of its 95 % interval", "", None),
        ("ratio_high", "the same, upper end of it", "", None),
        ("control", "a control without neighbours / alone", "", None),
        ("control_low", "the same, lower end of its 95 % interval", "", None),
        ("control_high", "the same, upper end of it", "", None),
    ):
        row = Row(what, unit, goal=goal)
        row.add("tunemq", found[name])
        yield row


def scale(bench: Bench) -> Iterator[Row]:
    """10,000 GPUs in virtual time, and the CPU time of Redis; docs/scaling.md explains it."""
    found = bench.ours.measure("farm_scale.py", until="urgent").figures
    for name, what in (("steady", "one a turn"), ("batched", "a turn each 0.1 s")):
        part = found[name]
        in_process = part["cpu_s"].pop("experiment: turn")
        for who, spent in (
            ("its experiment", in_process),
            ("the supervisor", sum(part["cpu_s"].values())),
        ):
            row = Row(f"10,000 GPUs: a result, {what}, costs {who}", "us")
            row.add("tunemq", spent / part["seen"]["results"] * 1e6)
            yield row
    filled = found["filled"]
    row = Row("10,000 GPUs: a placement on the empty farm costs the supervisor", "us")
    placed = sum(spent for part, spent in filled["cpu_s"].items() if part != "experiment: turn")
    row.add("tunemq", placed / filled["seen"]["trials"] * 1e6)
    yield row
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:  # a socket's path has to be short
        rates = bench.ours.measure(
            "wire_rates.py", os.path.join(folder, "redis"), until="publish"
        ).figures
    result = rates["append"]["1"], rates["read"], rates["release"]
    for what, spent in (
        ("a node's lease", rates["lease"]["server_us"]),
        ("a result by itself", sum(one["server_us"] for one in result)),
        ("an assignment", rates["publish"]["server_us"]),
    ):
        row = Row(f"{what} costs Redis", "us")
        row.add("tunemq", spent)
        yield row


def gpu(bench: Bench) -> Iterator[Row]:
    """On a real GPU: how soon CUDA is ready, and what a trial leaves behind for the next."""
    soon = Row("fork to the first CUDA call, torch preloaded; floor: a fresh interpreter", "s")
    left = Row("GPU memory that a trial finds taken by the one before, at most", "MiB", goal=300)
    for _ in range(bench.runs):
        found = bench.ours.measure("gpu.py", until="why_not").figures
        if found["why_not"]:
            print(f"    left out: {found['why_not']}")
            return
        soon.add("tunemq", found["cuda_s"])
        soon.add("floor", found["fresh_s"])
        left.add("tunemq", found["left_mib"])
    yield from (soon, left)


def floors(bench: Bench) -> Iterator[Row]:
    """The cost of each part alone."""
    figures = _floors(bench.ours).figures
    for name, what, unit in (
        ("celery_round_trip_ms", "a Celery task there, a stream entry back", "ms"),
        ("redis_round_trip_ms", "a Redis round trip", "ms"),
        ("xadds_per_s", "XADD, pipelined", "entries/s"),
        ("fork_ms", "fork, exit, wait", "ms"),
        ("durable_write_ms", "4 KiB appended and on the disk", "ms"),
    ):
        row = Row(what, unit)
        row.add("floor", figures[name])
        yield row


def _floors(peer: Peer) -> Running:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:  # a socket's path has to be short
        socket = os.path.join(folder, "redis")
        return peer.measure("floors.py", socket, 1_000, until="celery_round_trip_ms")


SCENARIOS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "first": first_result,
    "trials": short_trials,
    "results": many_results,
    "lockstep": lock_step,
    "idle": idle,
    "checkpoints": checkpoints,
    "beside": saving_beside,
    "core": core,
    "faults": faults,
    "farm": farm,
    "queue": farm_queue,
    "neighbours": farm_neighbours,
    "scale": scale,
    "gpu": gpu,
    "floors": floors,
}
