"""`Result`: the results of one trial; its history is read from the trial's folder on demand."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Self

import msgspec

from tunemq_scheduler.core.trial_decisions import MOST_DECISIONS, TrialDecision
from tunemq_scheduler.results.csv_cells import flatten
from tunemq_scheduler.results.decision_rows import decisions_in
from tunemq_scheduler.results.json_encoding import is_finite, is_number
from tunemq_scheduler.storage.folders import PARAMS_JSON, RESULT_JSON
from tunemq_shared.base.decoding_errors import NO_JSON, UNDECODABLE
from tunemq_shared.base.errors import ConfigError, MetricError, TuneError
from tunemq_shared.protocol.result_conditions import lookup
from tunemq_shared.system.plain_files import open_to_read
from tunemq_shared.trial.results import LINEAGE, TRAINING_ITERATION, TRIAL_ID

if TYPE_CHECKING:
    import pandas as pd

    from tunemq_shared.checkpoints.checkpoint import Checkpoint
    from tunemq_shared.protocol.device_use import DeviceUse

_decode = msgspec.json.Decoder().decode
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Result:
    """The outcome of one trial: its last metrics, checkpoints, error and folder.

    Attributes:
        metrics (dict): the last result, including the automatic keys; empty if the trial never
            reported.
        checkpoint (Checkpoint): the newest checkpoint; None if there is none.
        error (Exception): the error that put the trial into ERROR; otherwise None.
        path (str): the trial's folder.
        trial_id (str): the ID, unique in the experiment.
        trial_name (str): the trial's name.
        status (str): the trial's state when this object was made.
        best_checkpoints (sequence of (Checkpoint, dict)): the kept checkpoints, each with the
            result it belongs to.
        devices_used (sequence of DeviceUse): the use of each GPU over all attempts: seconds, busy
            fraction, bytes, joules. Empty where the node cannot identify its GPUs. For trials
            of a few seconds it may be zero.
        decisions (tuple of TrialDecision): the decisions about the trial other than that it
            continues, oldest first, each with its step and its reason; of more than 32 the newest.

    Example:
        >>> from tunemq import Result
        >>> Result(metrics={"loss": 0.25}, path="/results/mnist/trial_1").metrics["loss"]
        0.25
    """

    metrics: dict[str, Any]
    checkpoint: Checkpoint | None = None
    error: Exception | None = None
    path: str
    trial_id: str = ""
    trial_name: str = ""
    status: str = "TERMINATED"
    best_checkpoints: Sequence[tuple[Checkpoint, dict[str, Any]]] = ()
    devices_used: Sequence[DeviceUse] = ()
    decisions: tuple[TrialDecision, ...] = field(default=(), repr=False)
    trial_config: dict[str, Any] | None = field(default=None, repr=False)
    #: Whether ``metrics`` is the journal's last result and the result file is complete.
    has_ended: bool = field(default=False, repr=False)

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Self:
        """Load a result from a trial's folder: metrics and configuration, without checkpoints.

        Args:
            path (str or path): the trial's folder.

        Returns:
            The result; ``status`` and ``error`` are the defaults, whatever became of the trial.
            ``decisions`` lacks those after its last result.

        Raises:
            ConfigError: the folder is not a trial's folder.
        """
        folder = os.path.abspath(os.path.expanduser(os.fspath(path)))
        try:
            with open_to_read(os.path.join(folder, PARAMS_JSON)) as file:
                config = json.load(file)
        except (OSError, *NO_JSON) as error:
            raise ConfigError(
                f"{folder} is not a trial's folder: {PARAMS_JSON} cannot be read ({error})."
            ) from error
        result = cls(
            metrics={}, path=folder, trial_name=os.path.basename(folder), trial_config=config
        )
        if result.history:
            result.metrics = result.history[-1]
            result.trial_id = result.metrics.get("trial_id", "")
            result.decisions = tuple(decisions_in(result.history))[-MOST_DECISIONS:]
        return result

    @property
    def config(self) -> dict[str, Any]:
        """The trial's configuration, a dict."""
        if self.trial_config is not None:
            return self.trial_config
        found: dict[str, Any] = self.metrics.get("config") or {}
        return found

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """All results of the trial, from its ``result.json``; lines torn by a crash are left out.

        For a finished trial the file is compared with the journal's last result: a repeated step
        counts once, and missing steps are logged as a warning.
        """
        path = os.path.join(self.path, RESULT_JSON)
        try:
            with open_to_read(path) as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            # If the search ran on another machine, this one has no file of the trial at all.
            if self._last_step > 1 and os.path.exists(os.path.join(self.path, PARAMS_JSON)):
                _warn(f"{path} is missing: of {self._last_step} steps only the last is known.")
            return [self.metrics] if self.metrics else []
        rows = [result for line in lines if (result := _read(line)) is not None]
        return self._compared(path, rows, len(lines) - len(rows)) if self._last_step else rows

    @property
    def _last_step(self) -> int:
        """The step of the journal's last result; 0 if the file must not be compared with it."""
        step = self.metrics.get(TRAINING_ITERATION) if self.has_ended else 0
        return step if isinstance(step, int) else 0

    def _compared(
        self, path: str, rows: list[dict[str, Any]], unreadable: int
    ) -> list[dict[str, Any]]:
        """Return the trial's rows, each step once; warn if they differ from what was reported."""
        by_place: dict[tuple[int, int], dict[str, Any]] = {}
        for row in rows:
            step, lineage = row.get(TRAINING_ITERATION), row.get(LINEAGE, 0)
            is_own = row.get(TRIAL_ID) == self.trial_id
            if is_own and isinstance(step, int) and isinstance(lineage, int):
                by_place.setdefault((lineage, step), row)
        kept = [by_place[place] for place in sorted(by_place)]
        ends_with = max(by_place, default=(0, 0))[1]
        wrong = []
        if unreadable:
            wrong.append(f"{unreadable} lines that cannot be read")
        if len(kept) < len(rows):
            wrong.append(f"{len(rows) - len(kept)} rows that are doubled or not of this trial")
        if wrong or ends_with != self._last_step:
            with_those = f", and {' and '.join(wrong)}, which are left out" if wrong else ""
            _warn(
                f"{path} is damaged: it has {len(kept)} rows up to step {ends_with}{with_those};"
                f" the journal ends with step {self._last_step}."
            )
        return kept

    @cached_property
    def metric_analysis(self) -> dict[str, dict[str, float]]:
        """The ``max``, ``min``, ``avg`` and ``last`` of each numeric metric.

        Nested keys are ``outer/inner``. NaN is never a maximum or minimum; it makes an average NaN.
        """
        columns: dict[str, list[float]] = {}
        for result in self.history:
            for key, value in flatten(result).items():
                if is_number(value):
                    columns.setdefault(key, []).append(value)
        return {key: _analysis(values) for key, values in columns.items()}

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """All results as a pandas table, one row for each; nested keys are ``outer/inner``.

        Raises:
            TuneError: pandas is not installed.
        """
        pandas = need_pandas("Result.metrics_dataframe")
        table: pd.DataFrame = pandas.DataFrame(map(flatten, self.history))
        return table

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """Return the kept checkpoint whose result is best.

        Args:
            metric (str): the result key to compare; nested keys are ``outer/inner``.
            mode (str): ``"min"`` or ``"max"``: which values are best.

        Returns:
            The checkpoint; None if there is none, or none has a finite value.

        Raises:
            ConfigError: ``mode`` is neither ``"min"`` nor ``"max"``.
            MetricError: there are checkpoints, but none of their results has the metric.
        """
        sign = sign_of(mode)
        found = [(lookup(result, metric), one) for one, result in self.best_checkpoints]
        if found and all(value is None for value, _ in found):
            known = sorted(flatten(self.best_checkpoints[0][1]))
            raise MetricError(
                f"no checkpoint has the metric {metric!r}; there are: {', '.join(known)}."
            )
        ranked = [(sign * value, one) for value, one in found if is_finite(value)]
        return max(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def values(self, metric: str) -> list[float]:
        """Return all numeric values of a metric, in the order of the reports."""
        found = (lookup(result, metric) for result in self.history)
        return [value for value in found if is_number(value)]


@cache
def _warn(what: str) -> None:
    """Log a warning once, however often the results are read."""
    _log.warning("%s", what)


def sign_of(mode: str | None) -> int:
    """Return 1 for ``"max"`` and -1 for ``"min"``.

    Raises:
        ConfigError: ``mode`` is neither.
    """
    if mode not in {"min", "max"}:
        raise ConfigError(f"mode must be 'min' or 'max', not {mode!r}.")
    return 1 if mode == "max" else -1


def need_pandas(who: str) -> Any:
    """Import and return pandas.

    Args:
        who: the feature that needs it, for the message.

    Raises:
        TuneError: pandas is not installed; the message says how to install it.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise TuneError(
            f"{who} needs pandas, which is not installed: pip install 'pandas>=2.2'"
        ) from error
    return pd


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        read = _decode(line)
    except UNDECODABLE:
        try:
            read = json.loads(line)  # NaN and infinities
        except NO_JSON:
            return None
    return read if isinstance(read, dict) else None


def _analysis(values: list[float]) -> dict[str, float]:
    ordered = [value for value in values if value == value] or values  # noqa: PLR0124 (NaN differs)
    return {
        "max": max(ordered),
        "min": min(ordered),
        "avg": sum(values) / len(values),
        "last": values[-1],
    }
