"""Format a farm's answers as tables for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.core.placement.placement_reasons import device_set_aside
from tunemq_scheduler.output.terminal.formatting import (
    GAP,
    TableColumn,
    clean,
    duration,
    fit,
    parameters,
    resources,
    text_table,
    value,
)
from tunemq_shared.base.safe_text import harmless

_STYLES: Final = {
    **dict.fromkeys(("RUNNING", "ready"), "cyan"),
    **dict.fromkeys(("PAUSED", "STOPPING", "draining", "drained", "set aside", "silent"), "yellow"),
    **dict.fromkeys(("QUEUED", "PENDING", "STOPPED", "gone"), "bright_black"),
    **dict.fromkeys(("FINISHED", "TERMINATED"), "green"),
    **dict.fromkeys(("FAILED", "ERROR"), "red"),
}
#: The most characters of a reason in a table.
_REASON: Final = 60
_J_PER_WH: Final = 3600.0


def show_experiments(rows: Sequence[a.ExperimentRow], now: float | None = None) -> None:
    """Print a table of experiments."""
    now = time.time() if now is None else now
    show(
        [
            _column("name", (row.name for row in rows)),
            _column("state", (row.state for row in rows)),
            _column("owner", (row.owner for row in rows), rank=3),
            _column("prio", (str(row.priority) for row in rows), right=True, rank=4),
            _column("trials", map(_trials, rows), rank=1),
            _column("age", (duration(now - row.submitted) for row in rows), right=True, rank=2),
            _column("ran", (_ran(row, now) for row in rows), right=True, rank=2),
            _column("", (clean(_note(row), _REASON) for row in rows), rank=5),
        ]
    )


def show_detail(detail: a.ExperimentDetail, now: float | None = None) -> None:
    """Print an experiment and a table of its trials."""
    now = time.time() if now is None else now
    row = detail.experiment
    facts = [
        ("state", f"{row.state}" + (f": {clean(_note(row))}" if _note(row) else "")),
        ("owner", f"{row.owner}, priority {row.priority}"),
        ("ran", _ran(row, now)),
        ("trials", _trials(row)),
        ("best", _best(detail)),
        ("uses", resources(detail.resources, detail.resources)),
        ("folder", clean(detail.folder)),
        ("store", clean(detail.store.partition("?")[0])),
    ]
    write_lines([clean(row.name), *(f"  {name:8}{fact}" for name, fact in facts if fact)])
    write_lines(f"  {clean(note)}" for note in detail.notes)
    if not detail.trials:
        return
    trials = detail.trials
    metric = clean(detail.metric, 24) or "metric"
    write_lines([""])
    show(
        [
            _column("trial", (trial.trial for trial in trials)),
            _column("status", (trial.status for trial in trials)),
            _column("node", (trial.node for trial in trials), rank=3),
            _column("iter", (str(trial.step) for trial in trials), right=True, rank=1),
            _column(metric, (value(trial.metric) for trial in trials), right=True),
            _column("time", (duration(trial.time_total_s) for trial in trials), right=True, rank=2),
            *_gpu_use(trials),
            _column("config", (parameters(trial.config) for trial in trials), rank=4),
            _column("", (clean(_trial_note(trial), _REASON) for trial in trials), rank=5),
        ]
    )
    if detail.hidden:
        write_lines([f"... {detail.hidden} more not shown"])


def show_nodes(rows: Sequence[a.NodeRow], now: float | None = None) -> None:
    """Print a table of nodes."""
    now = time.time() if now is None else now
    show(
        [
            _column("node", (row.node for row in rows)),
            _column("state", (row.state for row in rows)),
            _column("health", (clean(row.health, _REASON) for row in rows), rank=1),
            _column("trials", (str(row.trials) for row in rows), right=True),
            _column("in use", (resources(row.used, row.total) for row in rows)),
            _column("memory", (_memory(row) for row in rows), right=True, rank=3),
            _column("gpus", (_gpus(row) for row in rows), rank=2),
            _column("version", (row.version for row in rows), rank=4),
            _column("here for", (_here(row, now) for row in rows), right=True, rank=5),
        ]
    )
    write_lines(clean(line) for row in rows for gpu in row.gpus for line in _troubles(row, gpu))


def show(columns: Sequence[TableColumn]) -> None:
    """Print a table; on a terminal with colours, fitted to its width."""
    console = Console()
    if not console.is_terminal:
        write_lines(text_table(columns))
        return
    columns = fit(columns, console.width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(
            Text(column.header, style="bold"),
            justify="right" if column.right else "left",
            no_wrap=True,
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        # Text, not str: users' names may look like markup.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    console.print(table)


def write_lines(lines: Iterable[str]) -> None:
    """Print lines of text with control characters escaped."""
    sys.stdout.writelines(f"{harmless(line)}\n" for line in lines)


def _column(
    header: str, cells: Iterable[str], *, right: bool = False, rank: int = 0
) -> TableColumn:
    return TableColumn(header=header, cells=[clean(cell) for cell in cells], right=right, rank=rank)


def _trials(row: a.ExperimentRow) -> str:
    if not row.trials:
        return ""
    over = row.trials.get("TERMINATED", 0) + row.trials.get("ERROR", 0)
    told = [f"{over}/{row.total}" if row.total is not None else str(over)]
    told += [
        f"{row.trials[state]} {word}"
        for state, word in (("RUNNING", "running"), ("PAUSED", "paused"), ("ERROR", "failed"))
        if row.trials.get(state)
    ]
    return ", ".join(told)


def _ran(row: a.ExperimentRow, now: float) -> str:
    return "" if row.started is None else duration((row.ended or now) - row.started)


def _note(row: a.ExperimentRow) -> str:
    if row.trouble or row.reason or row.position is None:
        return row.trouble or row.reason
    return "next" if not row.position else f"behind {row.position}"


def _trial_note(trial: a.TrialRow) -> str:
    newest = trial.note or trial.decision
    told = [newest] if newest else []
    if trial.preemptions:
        told.append(
            f"preempted {trial.preemptions} times" if trial.preemptions > 1 else "preempted"
        )
    if trial.repeated:
        told.append(f"{trial.repeated} step{'' if trial.repeated == 1 else 's'} repeated")
    return ", ".join(told)


def _gpu_use(trials: Sequence[a.TrialRow]) -> list[TableColumn]:
    """The column of GPU use (utilisation, memory, energy), if any trial used a GPU."""
    if not any(trial.devices_used for trial in trials):
        return []
    return [_column("gpu", (_used_of_gpus(trial.devices_used) for trial in trials), rank=3)]


def _used_of_gpus(uses: Sequence[a.DeviceUseRow]) -> str:
    """Summarise a trial's GPU use, as far as it is known: ``87% 12.3 GB 40.1 Wh``."""
    busy = [(one.utilisation, one.seconds) for one in uses if one.utilisation is not None]
    seconds = sum(weight for _, weight in busy)
    told = []
    if seconds:
        told.append(f"{sum(part * weight for part, weight in busy) / seconds:.0%}")
    if peaks := [one.memory_peak for one in uses if one.memory_peak is not None]:
        told.append(decimal(int(max(peaks))))
    if energies := [one.energy_j for one in uses if one.energy_j is not None]:
        told.append(f"{sum(energies) / _J_PER_WH:.1f} Wh")
    return " ".join(told)


def _best(detail: a.ExperimentDetail) -> str:
    best = detail.best
    if best is None:
        return ""
    name = clean(detail.metric) or "metric"
    return f"{name} {value(best.metric)}  {clean(best.trial)}  {parameters(best.config)}"


def _memory(row: a.NodeRow) -> str:
    total = row.total.get("memory", 0)
    return decimal(int(total)) if total else ""


def _gpus(row: a.NodeRow) -> str:
    counts: dict[str, tuple[int, int]] = {}
    for gpu in row.gpus:
        usable, count = counts.get(gpu.model or "GPU", (0, 0))
        counts[gpu.model or "GPU"] = usable + (gpu.withheld is None), count + 1
    return ", ".join(
        f"{count} x {model}" if usable == count else f"{usable} of {count} x {model}"
        for model, (usable, count) in counts.items()
    )


def _troubles(row: a.NodeRow, gpu: a.GpuRow) -> Iterator[str]:
    """Iterate over lines about problems of a GPU."""
    if gpu.withheld is not None:
        yield device_set_aside(row.node, gpu.uuid, gpu.withheld)
    if gpu.foreign and gpu.foreign not in (gpu.withheld or ""):
        yield f"other processes use GPU {gpu.uuid} of node {row.node}: {gpu.foreign}"


def _here(row: a.NodeRow, now: float) -> str:
    return duration(now - row.since) if row.since else ""
