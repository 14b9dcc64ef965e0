"""Builds the summary of an ended search: best trials, best configuration, errors, places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tunemq_scheduler.core.failure_policy import CLASSES
from tunemq_scheduler.output.terminal.formatting import (
    TableColumn,
    clean,
    duration,
    fit,
    text_table,
    value,
)
from tunemq_scheduler.output.terminal.rows import (
    STATES,
    TableOptions,
    TrialRowView,
    columns_of,
    is_reported_metric,
    newest_decision,
    score,
    sorted_by_metric,
)
from tunemq_scheduler.results.csv_cells import flatten
from tunemq_scheduler.storage.stored_checkpoint import StoredCheckpoint
from tunemq_shared.objects.store_address import without_settings
from tunemq_shared.protocol.result_conditions import lookup

if TYPE_CHECKING:
    from tunemq_scheduler.output.terminal.display_view import SearchView
    from tunemq_scheduler.results.result import Result
    from tunemq_scheduler.results.trial_failures import FailureGroup
    from tunemq_shared.checkpoints.checkpoint import Checkpoint

#: The most metrics of the best trial to show.
_METRICS: Final = 10
#: The most parameters of the best trial to show.
_PARAMETERS: Final = 50
#: The most characters of an error; a store's error says where, what, why and what to do.
_ERROR: Final = 500


class SummarySection(msgspec.Struct, kw_only=True):
    """A part of a summary: a title and either lines or a table."""

    title: str
    lines: list[str] = []
    columns: list[TableColumn] = []
    is_error: bool = False


def sections(
    view: SearchView, results: Sequence[Result], options: TableOptions, width: int
) -> list[SummarySection]:
    """Return all parts of a summary, in order."""
    metric, mode = options.metric or view.metric, options.mode or view.mode
    rows = _best_rows(results, metric, mode, options.max_rows)
    best = next((row for row in rows if score(row.result, metric, mode) is not None), None)
    found = [_trials(rows, len(results), options, metric, best, width)] if rows else []
    if best is not None and metric is not None:
        found.append(_best(best, results, metric))
    found += error_sections(view.failures)
    return [*found, _where(view, rows, metric)]


def plain(parts: Iterable[SummarySection]) -> list[str]:
    """Return the lines of a summary without colours."""
    lines: list[str] = []
    for part in parts:
        table = text_table(part.columns) if part.columns else []
        lines += ["", part.title, *(f"  {line}" for line in (*table, *part.lines))]
    return lines


def error_sections(failures: Sequence[FailureGroup], most: int = 5) -> list[SummarySection]:
    """Return the failures by cause: the user's own exceptions first."""
    if not failures:
        return []
    lines: list[str] = []
    for group in failures[:most]:
        times = "once" if group.count == 1 else f"{group.count} times"
        hosts = f" on {', '.join(map(clean, group.hostnames))}" if group.hostnames else ""
        lines.append(f"{clean(group.error, _ERROR)}")
        if group.cause:
            lines.append(f"  began with: {clean(group.cause, _ERROR)}")
        if group.place:
            lines.append(f"  raised at {clean(group.place)}")
        # A traceback already shows that the trial's code failed.
        what = "" if group.kind == "user" else f"{CLASSES[group.kind].description}: "
        lines.append(f"  {what}{times}{hosts}; trials {_names(group)}")
        if group.file:
            lines.append(f"  see {clean(group.file)}")
    if len(failures) > most:
        lines.append(f"... and {len(failures) - most} other causes")
    return [SummarySection(title="errors", lines=lines, is_error=True)]


def _names(group: FailureGroup) -> str:
    names = ", ".join(map(clean, group.trials))
    return f"{names}, ..." if group.count > len(group.trials) else names


def _best_rows(
    results: Sequence[Result], metric: str | None, mode: str | None, limit: int
) -> list[TrialRowView]:
    """Return the best trials first; without the metric, in the order of the search."""
    rows = (
        TrialRowView(
            result.trial_id,
            n,
            result.status,
            flatten(result.config),
            result.metrics,
            decision=newest_decision(result.decisions),
        )
        for n, result in enumerate(results)
    )
    return sorted_by_metric(rows, metric, mode)[:limit]


def _trials(
    rows: list[TrialRowView],
    count: int,
    options: TableOptions,
    metric: str | None,
    best: TrialRowView | None,
    width: int,
) -> SummarySection:
    columns = columns_of(rows, options, metric, best.trial_id if best else None)
    more = [f"... {count - len(rows)} more not shown"] if count > len(rows) else []
    title = f"trials, best {clean(metric)} first" if best and metric else "trials"
    return SummarySection(title=title, columns=fit(columns, width - 2), lines=more)


def _best(best: TrialRowView, results: Sequence[Result], metric: str) -> SummarySection:
    result = results[best.number]
    others: Mapping[str, Any] = {
        key: found
        for key, found in flatten(best.result).items()
        if key != metric and is_reported_metric(key, found)
    }
    told = {
        "trial": [clean(best.trial_id)],
        "config": _parameters(best.params),
        "metrics": [f"{clean(key)} = {value(found)}" for key, found in others.items()][:_METRICS],
        "checkpoint": [clean(_place(result.checkpoint)) if result.checkpoint else "none"],
        "folder": [clean(result.path)],
    }
    lines = [
        f"{name if n == 0 else '':<12}{line}"
        for name, found in told.items()
        for n, line in enumerate(found)
    ]
    return SummarySection(title=f"best {clean(metric)}: {lookup(best.result, metric)}", lines=lines)


def _parameters(params: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the first parameters."""
    shown = islice(params.items(), _PARAMETERS)
    lines = [f"{clean(key)} = {value(found, 60)}" for key, found in shown]
    more = len(params) - len(lines)
    return [*lines, f"and {more} more"] if more else lines


def _place(checkpoint: Checkpoint) -> str:
    """Return a checkpoint's location, without downloading it."""
    if isinstance(checkpoint, StoredCheckpoint):
        return without_settings(checkpoint.uri)
    return checkpoint.path


def _where(view: SearchView, rows: Sequence[TrialRowView], metric: str | None) -> SummarySection:
    counts = ", ".join(
        f"{view.counts[state]} {state}" for state in STATES if view.counts.get(state)
    )
    lines = [
        f"{counts or 'no trials'} in {duration(view.elapsed_s)}",
        f"results in {clean(view.path)}",
    ]
    if view.store:
        lines.append(f"checkpoints in {clean(view.store)}")
    if metric and rows and all(score(row.result, metric, None) is None for row in rows):
        lines.append(f"no trial reported a finite value of {clean(metric)}")
    lines += [clean(note) for note in view.notes]
    return SummarySection(title=f"{clean(view.name)} {clean(view.outcome, 300)}", lines=lines)
