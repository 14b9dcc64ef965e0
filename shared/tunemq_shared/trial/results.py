"""The automatic keys of a result, and the complete result that loggers and algorithms see.

A `ResultReported` carries only what changes from step to step. The rest of a complete result stays
the same while the trial's process lives, and a `ResultTemplate` holds it. An automatic key
overrides a reported metric of the same name.
"""

from __future__ import annotations

import time
from typing import Any, Final

from tunemq_shared.protocol import result_conditions
from tunemq_shared.protocol.messages import ResultReported, TrialStarted

TRAINING_ITERATION: Final = result_conditions.TRAINING_ITERATION
TIME_THIS_ITER_S: Final = "time_this_iter_s"
TIME_TOTAL_S: Final = "time_total_s"
TIME_SINCE_RESTORE: Final = "time_since_restore"
ITERATIONS_SINCE_RESTORE: Final = "iterations_since_restore"
TIMESTEPS_THIS_ITER: Final = "timesteps_this_iter"
TIMESTEPS_TOTAL: Final = "timesteps_total"
TIMESTEPS_SINCE_RESTORE: Final = "timesteps_since_restore"
EPISODES_THIS_ITER: Final = "episodes_this_iter"
EPISODES_TOTAL: Final = "episodes_total"
MEAN_LOSS: Final = "mean_loss"
NEG_MEAN_LOSS: Final = "neg_mean_loss"
DONE: Final = "done"
SHOULD_CHECKPOINT: Final = "should_checkpoint"
TIMESTAMP: Final = "timestamp"
DATE: Final = "date"
TRIAL_ID: Final = "trial_id"
EXPERIMENT_ID: Final = "experiment_id"
EXPERIMENT_TAG: Final = "experiment_tag"
PID: Final = "pid"
HOSTNAME: Final = "hostname"
NODE_IP: Final = "node_ip"
CONFIG: Final = "config"
LINEAGE: Final = "lineage"

#: The latest time of a result, in Unix seconds: the end of the year 9998, in every time zone.
LATEST: Final = 253_370_678_400.0

#: Keys of every result, whatever the trainable reports.
ALWAYS_THERE: Final = frozenset(
    {
        TRAINING_ITERATION,
        TIME_THIS_ITER_S,
        TIME_TOTAL_S,
        TIME_SINCE_RESTORE,
        ITERATIONS_SINCE_RESTORE,
        TIMESTEPS_SINCE_RESTORE,
        TIMESTAMP,
        DONE,
    }
)
#: Keys of a result if the trainable reports them, or the metric that they derive from.
DERIVED: Final = {
    TIMESTEPS_TOTAL: TIMESTEPS_THIS_ITER,
    EPISODES_TOTAL: EPISODES_THIS_ITER,
    NEG_MEAN_LOSS: MEAN_LOSS,
}


def split_derived(keys: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split ``keys`` into those that only the trainable reports, and those derived from them."""
    plain = tuple(key for key in keys if key not in ALWAYS_THERE and key not in DERIVED)
    return plain, tuple(key for key in keys if key in DERIVED)


def measured(event: ResultReported) -> dict[str, Any]:
    """The reported metrics and all automatic keys that differ from one result to the next.

    Trial processes and scheduler evaluate stop criteria and horizons on it.
    """
    metrics = event.metrics
    result = {
        **metrics,
        DONE: event.done,
        TRAINING_ITERATION: event.step,
        TIME_THIS_ITER_S: event.time_this_iter_s,
        TIME_TOTAL_S: event.time_total_s,
        TIME_SINCE_RESTORE: event.time_since_restore,
        ITERATIONS_SINCE_RESTORE: event.iterations_since_restore,
        TIMESTEPS_TOTAL: event.timesteps_total,
        TIMESTEPS_SINCE_RESTORE: event.timesteps_since_restore,
        EPISODES_TOTAL: event.episodes_total,
        TIMESTAMP: whole_seconds(event.timestamp),
    }
    if MEAN_LOSS in metrics and metrics.get(NEG_MEAN_LOSS) is None:
        loss = metrics[MEAN_LOSS]
        if isinstance(loss, int | float):
            result[NEG_MEAN_LOSS] = -loss
    return result


def whole_seconds(timestamp: float) -> int:
    """A time in whole Unix seconds, or the nearest that a date can show.

    Nodes reject others (`tunemq_workers.broker.event_validation`), but a journal of an earlier
    version may hold any number.
    """
    if 0.0 <= timestamp <= LATEST:
        return int(timestamp)
    return int(LATEST) if timestamp > LATEST else 0


class ResultTemplate:
    """The part that all results of a trial share while one process runs it.

    ``config`` is not copied: all results share it, and a change in one changes all.
    """

    __slots__ = ("fixed",)

    def __init__(
        self,
        started: TrialStarted,
        config: dict[str, Any],
        *,
        experiment_id: str = "",
        experiment_tag: str = "",
        lineage: int = 0,
    ) -> None:
        self.fixed: Final[dict[str, Any]] = {
            TRIAL_ID: started.trial,
            EXPERIMENT_ID: experiment_id,
            EXPERIMENT_TAG: experiment_tag,
            PID: started.pid,
            HOSTNAME: started.hostname,
            NODE_IP: started.node_ip,
            CONFIG: config,
            LINEAGE: lineage,
        }


def full_result(event: ResultReported, frame: ResultTemplate) -> dict[str, Any]:
    """Make the complete result: reported metrics, measured keys, and the template's keys."""
    result = measured(event)
    result[DATE] = _date(result[TIMESTAMP])
    result.update(frame.fixed)
    return result


_last_date: tuple[int, str] = (-1, "")


def _date(second: int) -> str:
    """Local time as ``2026-01-31_12-00-00``; cached per second, since formatting is slow."""
    global _last_date
    if second != _last_date[0]:
        _last_date = (second, time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(second)))
    return _last_date[1]
