"""Chooses the trials and values that a table shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tunemq_scheduler.core.trials.trial import STATE, awaited
from tunemq_scheduler.output.terminal.formatting import TableColumn, clean, duration, value
from tunemq_scheduler.results.csv_cells import flatten
from tunemq_scheduler.results.json_encoding import is_finite, is_number
from tunemq_shared.protocol.result_conditions import lookup
from tunemq_shared.trial import results as keys

if TYPE_CHECKING:
    from tunemq_scheduler.core.trial_decisions import TrialDecision
    from tunemq_scheduler.results.trial_view import TrialView

T = TypeVar("T")

#: The states in the order in which a table shows them.
STATES: Final = ("RUNNING", "PAUSED", "PENDING", "ERROR", "TERMINATED")
#: The least width for the newest decisions: "stopped at step 9" and the beginning of the reason.
_DECISION: Final = 20
#: The most parameters with a column: no terminal is wide enough for more.
_PARAMETERS: Final = 100

_AUTOMATIC: Final = keys.ALWAYS_THERE | {
    keys.TIMESTEPS_TOTAL,
    keys.EPISODES_TOTAL,
    keys.TIMESTEPS_THIS_ITER,
    keys.EPISODES_THIS_ITER,
    keys.DATE,
    keys.TRIAL_ID,
    keys.EXPERIMENT_ID,
    keys.EXPERIMENT_TAG,
    keys.PID,
    keys.HOSTNAME,
    keys.NODE_IP,
    keys.LINEAGE,
    keys.CONFIG,
    keys.SHOULD_CHECKPOINT,
}


class TableOptions(msgspec.Struct, kw_only=True):
    """User settings of tables.

    Attributes:
        metric_columns: the result keys to show (a dict maps keys to headers). Default: the
            optimised metric and the first few others.
        parameter_columns: the configuration keys to show, likewise. Default: the sampled ones.
        max_rows: the most trials to show.
        max_width: the widest cell, in terminal columns.
        infer_limit: how many metrics to show by default.
        metric, mode: what to optimise, if the search does not define it.
        sort_by_metric: show the best trials first.
    """

    metric_columns: dict[str, str] | None = None
    parameter_columns: dict[str, str] | None = None
    max_rows: int = 20
    max_width: int = 20
    infer_limit: int = 3
    metric: str | None = None
    mode: str | None = None
    sort_by_metric: bool = False


class TrialRowView(msgspec.Struct):
    """The values of one trial that a table shows."""

    trial_id: str
    number: int
    status: str
    params: Mapping[str, Any]
    result: Mapping[str, Any]
    waits: str = ""
    decision: str = ""


def row_of(trial: TrialView) -> TrialRowView:
    """Return a trial's current row."""
    return TrialRowView(
        trial_id=trial.trial_id,
        number=trial.number,
        status=trial.status,
        params=trial.evaluated_params or flatten(trial.config),
        result=trial.last_result,
        waits=trial.waits[0],
        decision=newest_decision(trial.decisions),
    )


def newest_decision(decisions: Sequence[TrialDecision]) -> str:
    """Return the newest decision about a trial in words; empty without any."""
    return str(decisions[-1]) if decisions else ""


def waits_in_words(what: str) -> str:
    """Describe what a waiting trial does; ``what`` is as in `TrialWaits`."""
    known = {
        "save": "saving",
        "restore": "restoring",
        "code": "fetching its code",
        "device": "starting",
        STATE: "continuing",
    }
    return f"{known.get(what, clean(what))}: waits for {awaited(what)}"


def fair_share(groups: Mapping[str, Sequence[T]], limit: int) -> dict[str, int]:
    """Return how many of each group to show if only ``limit`` fit, divided evenly."""
    share = dict.fromkeys(groups, 0)
    left = min(limit, sum(len(group) for group in groups.values()))
    while left > 0:
        for name, group in groups.items():
            if left > 0 and share[name] < len(group):
                share[name] += 1
                left -= 1
    return share


def choose(
    live: Iterable[TrialView], finished: Iterable[TrialRowView], limit: int, most: int = 1000
) -> list[TrialRowView]:
    """Return at most ``limit`` rows, by state; examines ``most`` live trials."""
    groups: dict[str, list[TrialView | TrialRowView]] = {state: [] for state in STATES}
    for trial in islice(live, most):
        groups.setdefault(trial.status, []).append(trial)
    for row in finished:
        groups.setdefault(row.status, []).append(row)
    share = fair_share(groups, limit)
    return [
        one if isinstance(one, TrialRowView) else row_of(one)
        for state, group in groups.items()
        for one in group[: share[state]]
    ]


def score(result: Mapping[str, Any], metric: str | None, mode: str | None) -> float | None:
    """Return a result's score, higher is better; None without a finite value of the metric."""
    found = lookup(result, metric) if metric else None
    if not is_finite(found):
        return None
    return float(-found if mode == "min" else found)


def sorted_by_metric(
    rows: Iterable[TrialRowView], metric: str | None, mode: str | None
) -> list[TrialRowView]:
    """Sort the best first; those without a finite value come last."""

    def order(row: TrialRowView) -> tuple[bool, float]:
        found = score(row.result, metric, mode)
        return found is None, -(found or 0.0)

    return sorted(rows, key=order)


def columns_of(
    rows: Sequence[TrialRowView], options: TableOptions, metric: str | None, best: str | None = None
) -> list[TableColumn]:
    """Return the table's columns; the trial ``best`` gets a star."""
    star = "* " if best is not None and any(row.trial_id == best for row in rows) else ""
    width = options.max_width
    trials = [
        (star if row.trial_id == best else " " * len(star)) + clean(row.trial_id, width)
        for row in rows
    ]
    columns = [
        TableColumn(header=" " * len(star) + "trial", cells=trials),
        TableColumn(header="status", cells=[_status(row) for row in rows]),
    ]
    for rank, (key, name) in enumerate(_parameter_keys(rows, options).items()):
        found = [lookup(row.params, key) for row in rows]
        columns.append(_column(name, found, width, rank=20 + rank))
    steps = [row.result.get(keys.TRAINING_ITERATION) for row in rows]
    columns.append(_column("iter", steps, width, rank=10))
    times = [row.result.get(keys.TIME_TOTAL_S) for row in rows]
    cells = [duration(time) if is_number(time) else "" for time in times]
    columns.append(TableColumn(header="time", cells=cells, right=True, rank=19))
    for rank, (key, name) in enumerate(_metric_keys(rows, options, metric).items()):
        found = [lookup(row.result, key) for row in rows]
        column = _column(name, found, width, rank=5 if key == metric else 30 + rank)
        column.is_main = key == metric
        columns.append(column)
    if any(row.decision for row in rows):
        told = [clean(row.decision) for row in rows]
        columns.append(TableColumn(header="decision", cells=told, rank=29, least_width=_DECISION))
    return columns


def is_reported_metric(key: str, found: Any) -> bool:
    """Return whether a value of a flattened result is a number that the trainable reported."""
    return key not in _AUTOMATIC and not key.startswith("config/") and is_number(found)


def _status(row: TrialRowView) -> str:
    return waits_in_words(row.waits) if row.waits else row.status


def _column(name: str, found: Sequence[Any], width: int, rank: int) -> TableColumn:
    is_numeric = all(one is None or is_number(one) for one in found)
    cells = [value(one, width) for one in found]
    return TableColumn(header=clean(name, width), cells=cells, right=is_numeric, rank=rank)


def _parameter_keys(rows: Sequence[TrialRowView], options: TableOptions) -> dict[str, str]:
    if options.parameter_columns is not None:
        return options.parameter_columns
    names: dict[str, str] = {}
    for row in rows:
        for key in islice(row.params, _PARAMETERS):
            names.setdefault(key, key.rpartition("/")[2])
    if len(set(names.values())) < len(names):
        return {key: key for key in names}
    return names


def _metric_keys(
    rows: Sequence[TrialRowView], options: TableOptions, metric: str | None
) -> dict[str, str]:
    if options.metric_columns is not None:
        return options.metric_columns
    names = {metric: metric} if metric else {}
    for row in rows:
        for key, found in flatten(row.result).items():
            if len(names) >= options.infer_limit:
                return names
            if is_reported_metric(key, found):
                names.setdefault(key, key)
    return names
