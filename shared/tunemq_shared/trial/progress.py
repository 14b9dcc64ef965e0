"""`TrialProgress`: a trial's iteration, times and counts, across all restores.

One object counts for a trial, whether a session of a trial process drives it or a caller steps a
`Trainable` by hand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from tunemq_shared.base.errors import MetricError
from tunemq_shared.protocol.messages import ResultReported
from tunemq_shared.trial.results import (
    DONE,
    EPISODES_THIS_ITER,
    EPISODES_TOTAL,
    TIME_THIS_ITER_S,
    TIME_TOTAL_S,
    TIMESTEPS_THIS_ITER,
    TIMESTEPS_TOTAL,
    TRAINING_ITERATION,
)

logger = logging.getLogger(__name__)

#: Metrics with a special meaning. Most results have none, which one set operation detects.
_RESERVED: Final = frozenset(
    {
        DONE,
        EPISODES_THIS_ITER,
        EPISODES_TOTAL,
        TIME_THIS_ITER_S,
        TIMESTEPS_THIS_ITER,
        TIMESTEPS_TOTAL,
        TRAINING_ITERATION,
    }
)


class TrialProgress:
    """Counts results; ``iteration`` is the number of the last one, from 1."""

    def __init__(self) -> None:
        self._warned = False
        self.clear()

    def clear(self) -> None:
        """Reset to before the first result."""
        self.restore({})

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores, in plain values."""
        return {
            TRAINING_ITERATION: self.iteration,
            TIME_TOTAL_S: self.time_total_s,
            TIMESTEPS_TOTAL: self.timesteps_total,
            EPISODES_TOTAL: self.episodes_total,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; counts since the restore start at 0."""
        self.iteration: int = state.get(TRAINING_ITERATION, 0)
        self.time_total_s: float = state.get(TIME_TOTAL_S, 0.0)
        self.timesteps_total: int | None = state.get(TIMESTEPS_TOTAL)
        self.episodes_total: int | None = state.get(EPISODES_TOTAL)
        self.time_since_restore = 0.0
        self.iterations_since_restore = 0
        self.timesteps_since_restore = 0

    def advance(
        self,
        trial: str,
        attempt: int,
        metrics: dict[str, Any],
        elapsed_s: float,
        *,
        is_saved: bool = False,
    ) -> ResultReported:
        """Count one result of plain ``metrics`` that took ``elapsed_s`` seconds.

        Values that the trainable reports for its time, timesteps, episodes and end take precedence.

        Raises:
            MetricError: An automatic key has an invalid value; nothing is counted.
        """
        done = False
        if not _RESERVED.isdisjoint(metrics):
            elapsed_s, done = self._honour(metrics, elapsed_s)
        self.iteration += 1
        self.time_total_s += elapsed_s
        self.time_since_restore += elapsed_s
        self.iterations_since_restore += 1
        return ResultReported(
            trial,
            attempt,
            self.iteration,
            metrics,
            time.time(),
            elapsed_s,
            self.time_total_s,
            self.time_since_restore,
            self.iterations_since_restore,
            self.timesteps_total,
            self.episodes_total,
            self.timesteps_since_restore,
            done,
            is_saved,
        )

    def _honour(self, metrics: dict[str, Any], elapsed_s: float) -> tuple[float, bool]:
        """Apply reported automatic keys; returns the iteration's seconds and if it is the last."""
        step = self.iteration + 1
        given = metrics.get(TIME_THIS_ITER_S)
        if given is not None:
            elapsed_s = _seconds(given, step)
        timesteps = _count(metrics, TIMESTEPS_THIS_ITER, step)
        all_timesteps = _count(metrics, TIMESTEPS_TOTAL, step)
        episodes = _count(metrics, EPISODES_THIS_ITER, step)
        all_episodes = _count(metrics, EPISODES_TOTAL, step)
        done = metrics.get(DONE, False)
        if isinstance(done, str):
            raise _unusable(DONE, done, step, "True or False")
        if metrics.get(TRAINING_ITERATION, step) != step and not self._warned:
            self._warned = True
            logger.warning(
                "%s was reported as %r, but it counts reports and stays %d. Use another name, such "
                "as 'epoch'.",
                TRAINING_ITERATION,
                metrics[TRAINING_ITERATION],
                step,
            )
        if timesteps is not None:
            self.timesteps_total = (self.timesteps_total or 0) + timesteps
            self.timesteps_since_restore += timesteps
        if all_timesteps is not None:
            self.timesteps_total = all_timesteps
        if episodes is not None:
            self.episodes_total = (self.episodes_total or 0) + episodes
        if all_episodes is not None:
            self.episodes_total = all_episodes
        return elapsed_s, bool(done)


def _seconds(value: Any, step: int) -> float:
    if isinstance(value, int | float) and 0 <= value < float("inf"):
        return float(value)
    raise _unusable(TIME_THIS_ITER_S, value, step, "seconds, 0 or more")


def _count(metrics: Mapping[str, Any], key: str, step: int) -> int | None:
    """The whole number under ``key``, or None if there is none; 100.0 counts as 100."""
    value = metrics.get(key)
    if value is None:
        return None
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise _unusable(key, value, step, "a whole number")


def _unusable(key: str, value: object, step: int, wanted: str) -> MetricError:
    return MetricError(
        f"{key!r} is {value!r} at step {step}, but this key is automatic: report {wanted} under "
        f"it, or use another name."
    )
