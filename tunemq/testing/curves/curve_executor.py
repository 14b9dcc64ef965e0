"""`CurveExecutor`: an executor in virtual time whose trials follow learning curves.

Unlike `tunemq.testing.simulated_executor` it has no latency and no faults: it shows what algorithms
do, and is fast. The clock jumps from the end of one step to that of the next.
"""

from __future__ import annotations

import heapq
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import (
    ContinueTrial,
    DeleteCheckpoint,
    PauseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.core.result_lookup import reaches
from tunemq_scheduler.experiment.experiment_loop import POLL_S
from tunemq_scheduler.search.objective import is_real
from tunemq_scheduler.storage.checkpoint_garbage_collector import Removal
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import lookup
from tunemq_shared.trial.results import DONE, TIME_THIS_ITER_S

#: (config, step) -> the metrics of this step, from 1.
Curves = Callable[..., Mapping[str, Any]]

_NODE: Final = "simulated"
#: The most steps of a trial: nothing ends one that goes beyond.
_MOST_STEPS: Final = 100_000


class _Process:
    """A trial process: an attempt, its position on its curve, and the step that it computes."""

    __slots__ = (
        *("config", "elapsed", "elapsed_before", "is_pausing", "is_waiting", "metrics", "order"),
        *("run_until", "saved", "seconds", "share", "started", "step", "step_before"),
    )

    def __init__(
        self, order: StartTrial, step: int, elapsed: float, now: float, share: float
    ) -> None:
        self.order, self.started, self.share = order, now, share
        self.config: dict[str, Any] = unpack_config(order.config)
        self.step = self.step_before = self.saved = step
        self.elapsed = self.elapsed_before = elapsed
        self.run_until = order.run_until
        self.is_pausing = self.is_waiting = False
        self.metrics: dict[str, Any] = {}
        self.seconds = 0.0


class CurveExecutor(TrialExecutor):
    """Run trials on a number of workers in virtual time; pass its `clock` to the loop.

    Args:
        curves: see `tunemq.testing.simulate`.
        workers: how many trials run at once.
        per_worker: the resources of one worker.
        restart_s: seconds that a trial needs to continue from a checkpoint.
        time_budget_s: the virtual time at which to return from `poll`, whatever is next.

    Attributes:
        now: the virtual time in seconds.
        worker_s: the worker time used so far, over all workers, in seconds.
        worker_s_of: the worker time that each trial used.
        configs: the configuration of each attempt of each trial.
    """

    def __init__(
        self,
        curves: Curves,
        *,
        workers: int,
        per_worker: Mapping[str, float],
        restart_s: float = 0.0,
        time_budget_s: float | None = None,
    ) -> None:
        self.now = self.worker_s = 0.0
        self.worker_s_of: dict[str, float] = {}
        self.configs: dict[tuple[str, int], dict[str, Any]] = {}
        self._curves, self._restart_s = curves, restart_s
        self._takes_resources = _takes_resources(curves)
        self._per_worker = dict(per_worker)
        self._budget = math.inf if time_budget_s is None else time_budget_s
        total = {name: workers * amount for name, amount in per_worker.items()}
        self._joined = [m.NodeJoined(_NODE, _NODE, _NODE, "127.0.0.1", total)]
        #: The ends of steps: time, number and process.
        self._queue: list[tuple[float, int, _Process]] = []
        self._scheduled = 0
        self._processes: dict[tuple[str, int], _Process] = {}
        self._busy = 0.0
        #: The trials that were told to continue in this turn.
        self._continuing: list[_Process] = []
        #: Step and seconds of training of each checkpoint.
        self._checkpoints: dict[str, tuple[int, float]] = {}
        self._events: list[m.NodeEvent] = []
        #: Whether an event of this moment has not been returned that others follow from.
        self._is_due = False
        self._reported = 0
        self._plan: ExperimentPlan | None = None

    def open(self, plan: ExperimentPlan) -> None:
        """Take the plan's stop criteria and checkpoint frequency."""
        self._plan = plan
        self._stop, self._frequency = plan.stop, plan.checkpoint_frequency
        self._required = plan.required_metrics

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def discard(self, removal: Removal) -> None:
        """Forget a checkpoint that the search does not need any more."""
        if isinstance(removal, DeleteCheckpoint):
            self._checkpoints.pop(removal.key, None)

    # --- commands ---------------------------------------------------------------------------------

    def start_trial(self, order: StartTrial) -> None:
        """Start a trial at step 0, or at the step of its checkpoint."""
        step, elapsed, delay = 0, 0.0, 0.0
        if order.restore:
            (step, elapsed), delay = self._checkpoints[order.restore[0].key], self._restart_s
        share = max(
            order.resources.get(name, 0.0) / amount for name, amount in self._per_worker.items()
        )
        process = _Process(order, step, elapsed, self.now, share)
        self._processes[order.trial, order.attempt] = process
        self.configs[order.trial, order.attempt] = process.config
        self._busy += share
        started = m.TrialStarted(order.trial, order.attempt, 1, _NODE, "127.0.0.1", self.now)
        self._events.append(started)
        self._begin_step(process, delay)

    def continue_training(self, order: ContinueTrial) -> None:
        """Let a trial run up to its new horizon."""
        process = self._processes.get((order.trial, order.attempt))
        if process is not None:
            process.run_until = order.run_until
            if process.is_waiting:
                self._continuing.append(process)

    def on_step_end(self) -> None:
        """Let trials continue to which no other command of the turn applies."""
        for process in self._continuing:
            if process.is_waiting and not self._is_ended(process):
                process.is_waiting = False
                self._begin_step(process)
        self._continuing.clear()

    def stop_trial(self, order: StopTrial) -> None:
        """End a trial at once; the step that it computes is lost."""
        process = self._processes.get((order.trial, order.attempt))
        if process is not None:
            self._end(process, m.TrialPaused(order.trial, order.attempt))
            self._is_due = True

    def pause_trial(self, order: PauseTrial) -> None:
        """Save and end a trial; it first completes and reports its step."""
        process = self._processes.get((order.trial, order.attempt))
        if process is None:
            return
        process.is_pausing = True
        if process.is_waiting:
            self._pause(process)
            self._is_due = True

    # --- events -----------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """Return the next events, all of one moment; none if the search has to do something first.

        Raises:
            ConfigError: a curve is not what it must be; the message says what it returned.
        """
        if self._joined:
            joined, self._joined = self._joined, []
            return [*joined]
        if not self._is_due:
            self._advance(timeout)
        events, self._events, self._is_due = self._events, [], False
        if not events:
            return []
        first = self._reported + 1
        self._reported += len(events)
        return [m.BatchRead(_NODE, first, self._reported, "0-0"), *events]

    def _advance(self, timeout: float) -> None:
        """Go to the end of the next step, or only to the time at which the search wants to act."""
        queue = self._queue
        while queue and self._is_ended(queue[0][2]):
            heapq.heappop(queue)
        limit = self._budget if self.now < self._budget else math.inf
        if not queue or timeout < POLL_S:
            limit = min(limit, self.now + timeout)
        due = min(limit, queue[0][0]) if queue else limit
        self.worker_s += (due - self.now) * self._busy
        self.now = due
        while queue and queue[0][0] <= due:
            process = heapq.heappop(queue)[2]
            if not self._is_ended(process):
                self._end_step(process)

    def _is_ended(self, process: _Process) -> bool:
        return self._processes.get((process.order.trial, process.order.attempt)) is not process

    def _begin_step(self, process: _Process, delay: float = 0.0) -> None:
        step = process.step + 1
        if step > _MOST_STEPS:
            raise ConfigError(
                f"trial {process.order.number} has made {_MOST_STEPS:,} steps, and nothing ends "
                "it; pass stop={'training_iteration': ...}, or return done=True with a curve's "
                "last metrics."
            )
        if self._takes_resources:
            found = self._curves(process.config, step, resources=process.order.resources)
        else:
            found = self._curves(process.config, step)
        if not isinstance(found, Mapping):
            raise self._refused(process, found, "it must return a dict of metrics")
        metrics = dict(found)
        seconds = metrics.pop(TIME_THIS_ITER_S, 1.0)
        if not is_real(seconds) or not 0 < seconds < math.inf:
            raise self._refused(process, found, f"{TIME_THIS_ITER_S} must be above 0")
        for name in self._required:
            if lookup(metrics, name) is None:
                raise self._refused(process, found, f"it must return the metric {name!r}")
        process.metrics, process.seconds = metrics, float(seconds)
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now + delay + seconds, self._scheduled, process))

    def _refused(self, process: _Process, found: object, why: str) -> ConfigError:
        return ConfigError(
            f"curves({process.config!r}, {process.step + 1}) returned {found!r}; {why}."
        )

    def _end_step(self, process: _Process) -> None:
        order, metrics = process.order, process.metrics
        process.step += 1
        process.elapsed += process.seconds
        is_due = self._frequency > 0 and process.step % self._frequency == 0
        is_done = bool(metrics.pop(DONE, False))
        result = m.ResultReported(
            trial=order.trial,
            attempt=order.attempt,
            step=process.step,
            metrics=metrics,
            timestamp=self.now,
            time_this_iter_s=process.seconds,
            time_total_s=process.elapsed,
            time_since_restore=process.elapsed - process.elapsed_before,
            iterations_since_restore=process.step - process.step_before,
            is_saved=is_due,
        )
        is_new = process.step > order.last_step  # otherwise the search has this result already
        is_done = is_new and (is_done or reaches(result, self._stop))
        self._events.append(replace(result, done=True) if is_done else result)
        if is_due:
            self._save(process)
        if is_done:
            self._end(process, m.TrialFinished(order.trial, order.attempt))
        elif process.is_pausing:
            self._pause(process)
        elif is_new and reaches(result, process.run_until):
            process.is_waiting = True
        else:
            self._begin_step(process)

    def _save(self, process: _Process) -> None:
        order, step = process.order, process.step
        key = f"{order.trial}/checkpoint_{order.attempt}-{step:06d}"
        self._checkpoints[key] = (step, process.elapsed)
        process.saved = step
        committed = m.CheckpointCommitted(order.trial, order.attempt, step, step, key, "none", 1)
        self._events.append(committed)

    def _pause(self, process: _Process) -> None:
        if process.step > process.saved:
            self._save(process)
        self._end(process, m.TrialPaused(process.order.trial, process.order.attempt))

    def _end(self, process: _Process, event: m.TrialPaused | m.TrialFinished) -> None:
        trial, attempt = process.order.trial, process.order.attempt
        del self._processes[trial, attempt]
        self._busy -= process.share
        used = (self.now - process.started) * process.share
        self.worker_s_of[trial] = self.worker_s_of.get(trial, 0.0) + used
        self._events += (event, m.SlotFreed(trial, attempt))


def _takes_resources(curves: Curves) -> bool:
    try:
        return "resources" in inspect.signature(curves).parameters
    except (TypeError, ValueError):  # a built-in function may have no signature
        return False
