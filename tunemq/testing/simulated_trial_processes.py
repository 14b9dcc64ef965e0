"""Simulated trial processes: they step in virtual time, report, save, and end like real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tunemq.testing.simulated_store import SimulatedStore
from tunemq.testing.simulated_uploads import SimulatedUploads, UploadSettings
from tunemq.testing.virtual_time import VirtualTime
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition, Horizon, first_that_holds

#: (config, step) -> the metrics that the simulated trainable reports.
Metrics = Callable[[dict[str, Any], int], dict[str, Any]]
#: (config, step) -> seconds that this step takes.
StepTime = Callable[[dict[str, Any], int], float]
#: (node, events): a node reports these.
Report = Callable[..., None]


class SimulatedTrialProcess:
    """A simulated trial process: steps in virtual time until ordered otherwise."""

    __slots__ = (
        "alive",
        "attempt",
        "config",
        "elapsed",
        "is_pausing",
        "node",
        "order",
        "run_until",
        "saved",
        "shown",
        "step",
        "unsaved",
        "waits",
    )

    def __init__(self, order: StartTrial, config: dict[str, Any], step: int) -> None:
        self.order = order
        self.config = config
        self.node = order.instance_id
        self.attempt = order.attempt
        self.step = self.saved = step
        self.run_until: Horizon = order.run_until
        self.elapsed = 0.0
        self.alive = True
        self.shown: dict[str, Any] = {}
        self.waits = False
        self.is_pausing = False
        #: Whether the trial is done after the save that waits for the upload queue; else None.
        self.unsaved: bool | None = None


class SimulatedTrialProcesses:
    """All trial processes of all nodes, by trial and attempt.

    Args:
        time: the virtual time.
        metrics, step_time: the trainable.
        report: receives the events that a node reports.
        uploads, seed: how checkpoints reach the store.
        store: the store; None disables its checks.
        horizon_error: steps to run past each horizon.
        cleanup_s: seconds from a trial process's last result to its end.
        linger_s: seconds for which remains of an ended trial process hold its slot.
        skew: the clock error of each node, in seconds.
    """

    def __init__(
        self,
        time: VirtualTime,
        metrics: Metrics,
        step_time: StepTime,
        report: Report,
        *,
        uploads: UploadSettings,
        seed: int,
        store: SimulatedStore | None = None,
        horizon_error: int = 0,
        cleanup_s: float = 0.0,
        linger_s: float = 0.0,
        skew: Callable[[str], float] = lambda _node: 0.0,
    ) -> None:
        self._time = time
        self._metrics, self._step_time = metrics, step_time
        self._report = report
        self._horizon_error = horizon_error
        self._cleanup_s, self._linger_s = cleanup_s, linger_s
        self._skew = skew
        self._processes: dict[tuple[str, int], SimulatedTrialProcess] = {}
        #: By trial and node, the trial processes that wait for the upload queue.
        self._saving: dict[tuple[str, str], SimulatedTrialProcess] = {}
        #: Ended trial processes whose remains still hold their slots.
        self._lingering: dict[tuple[str, int], SimulatedTrialProcess] = {}
        self._uploads = SimulatedUploads(
            uploads,
            seed,
            at=time.after,
            report=report,
            on_slot_free=self._continue_saving,
            on_given_up=self._give_up,
            store=store,
        )
        self._stop: tuple[Condition, ...] = ()
        self._frequency = 0
        self._saves_at_end = False
        self._uploads_waiting = 1

    def open(self, plan: ExperimentPlan) -> None:
        """Set the experiment whose trials run here."""
        self._stop = plan.stop
        self._frequency = plan.checkpoint_frequency
        self._saves_at_end = plan.checkpoint_at_end
        self._uploads_waiting = plan.uploads_waiting

    def get(self, trial: str, attempt: int) -> SimulatedTrialProcess | None:
        """Return the trial process of an attempt, unless it has ended."""
        return self._processes.get((trial, attempt))

    def all(self) -> list[SimulatedTrialProcess]:
        """Return all trial processes that have not ended."""
        return list(self._processes.values())

    def held(self, node: str) -> list[StartTrial]:
        """Return the orders of all trial processes that still hold a slot of a node."""
        processes = (*self._processes.values(), *self._lingering.values())
        return [process.order for process in processes if process.node == node]

    # --- orders, on arrival -----------------------------------------------------------------------

    def start(self, order: StartTrial) -> None:
        """Start the trial process of an attempt."""
        ref, damaged = self._uploads.usable(order)
        at = self._time.now + self._skew(order.instance_id)
        started = m.TrialStarted(order.trial, order.attempt, 1, order.instance_id, "127.0.0.1", at)
        self._report(order.instance_id, started, *damaged)
        process = SimulatedTrialProcess(
            order, unpack_config(order.config), 0 if ref is None else ref.step
        )
        self._processes[order.trial, order.attempt] = process
        if ref is None and order.restore:
            self._report(process.node, *self._failed(process, "restore", "no checkpoint is usable"))
        else:
            self._next_step(process)

    def run_on(self, trial: str, attempt: int, run_until: Horizon) -> None:
        """Let a trial process run up to a new horizon."""
        process = self._processes.get((trial, attempt))
        if process is not None:
            process.run_until = run_until
            if process.waits and not self._has_reached(process):
                process.waits = False
                self._next_step(process)

    def end(self, trial: str, attempt: int) -> None:
        """End a trial process, which saves first if that is due."""
        process = self._processes.get((trial, attempt))
        if process is not None:
            paused = m.TrialPaused(trial, attempt)
            saved = self._saved_at_last(process)
            self._report(process.node, *saved, paused, *self._gone(process))

    def kill(self, trial: str, attempt: int) -> None:
        """Kill an unwanted trial process: it reports only that its slot is free."""
        process = self._processes.get((trial, attempt))
        if process is not None:
            self._report(process.node, *self._gone(process))

    def pause(self, trial: str, attempt: int) -> None:
        """Save and end a trial process; it first finishes and reports its current step."""
        process = self._processes.get((trial, attempt))
        if process is None:
            return
        if process.waits or process.unsaved is not None:
            self._report(process.node, *self._saved_at_last(process), *self._paused(process))
        else:
            process.is_pausing = True

    # --- faults -----------------------------------------------------------------------------------

    def die(self, trial: str, attempt: int) -> None:
        """Kill a trial process from outside; its node reports that."""
        process = self._processes.get((trial, attempt))
        if process is not None:
            at = self._time.now + self._skew(process.node)
            died = m.TrialProcessDied(trial, attempt, 1, 9, None, at)
            self._report(process.node, died, *self._gone(process))

    def node_died(self, node: str) -> None:
        """Remove everything of a node without a report."""
        for processes in (self._processes, self._lingering):
            for key, process in list(processes.items()):
                if process.node == node:
                    process.alive = False
                    del processes[key]
        self._uploads.node_died(node)

    def _give_up(self, trial: str, node: str, reason: str) -> None:
        """Report that a trial process cannot store its checkpoints."""
        for process in list(self._processes.values()):
            if (process.order.trial, process.node) == (trial, node):
                self._report(process.node, *self._failed(process, "storage", reason))

    # --- steps ------------------------------------------------------------------------------------

    def _next_step(self, process: SimulatedTrialProcess) -> None:
        seconds = self._step_time(process.config, process.step + 1)
        self._time.after(seconds, self._step, process, seconds)

    def _step(self, process: SimulatedTrialProcess, seconds: float) -> None:
        if not process.alive:
            return
        process.step += 1
        process.elapsed += seconds
        metrics = self._metrics(process.config, process.step)
        process.shown = {
            **metrics,
            "training_iteration": process.step,
            "time_total_s": process.elapsed,
        }
        done = self._is_done(process)
        frequency = self._frequency
        is_due = frequency > 0 and process.step % frequency == 0
        result = self._result(process, metrics, seconds, done=done)
        events: list[m.NodeEvent] = [msgspec.structs.replace(result, is_saved=is_due)]
        if is_due or (done and self._saves_at_end):
            if self._uploads.waiting(process.order.trial, process.node) > self._uploads_waiting:
                process.unsaved = done
                self._saving[process.order.trial, process.node] = process
                events.append(
                    m.TrialWaits(process.order.trial, process.attempt, "save", "simulated")
                )
                self._report(process.node, *events)
                return
            events.append(self._checkpoint(process))
        self._finish_step(process, done, events)

    def _continue_saving(self, trial: str, node: str) -> None:
        """Continue a save: the trial's upload queue has room for one more checkpoint."""
        process = self._saving.get((trial, node))
        if process is not None and process.alive and process.unsaved is not None:
            done = process.unsaved
            self._finish_step(process, done, self._saved_at_last(process))

    def _saved_at_last(self, process: SimulatedTrialProcess) -> list[m.NodeEvent]:
        """Return the events to report when a waiting trial process can save."""
        if process.unsaved is None:
            return []
        process.unsaved = None
        self._saving.pop((process.order.trial, process.node), None)
        return [
            m.TrialWaits(process.order.trial, process.attempt, "", ""),
            self._checkpoint(process),
        ]

    def _finish_step(
        self, process: SimulatedTrialProcess, done: bool, events: list[m.NodeEvent]
    ) -> None:
        if done and self._cleanup_s:
            self._report(process.node, *events)
            self._time.after(self._cleanup_s, self._finish, process)
            return
        if done:
            events += self._finished(process)
        elif process.is_pausing:
            events += self._paused(process)
        self._report(process.node, *events)
        if process.alive:
            process.shown["training_iteration"] -= self._horizon_error
            if self._has_reached(process):
                process.waits = True
            else:
                self._next_step(process)

    def _finish(self, process: SimulatedTrialProcess) -> None:
        """End a trial process after its clean-up."""
        if process.alive:
            self._report(process.node, *self._finished(process))

    def _is_done(self, process: SimulatedTrialProcess) -> bool:
        """Return whether this step is the trial's last; never for a repeated step."""
        order = process.order
        if order.is_complete:
            return process.step >= order.last_step
        return process.step > order.last_step and bool(first_that_holds(self._stop, process.shown))

    def _has_reached(self, process: SimulatedTrialProcess) -> bool:
        """Return whether a decision is due; never for a repeated step."""
        is_new = process.step > process.order.last_step
        return is_new and first_that_holds(process.run_until, process.shown) is not None

    def _result(
        self, process: SimulatedTrialProcess, metrics: dict[str, Any], seconds: float, *, done: bool
    ) -> m.ResultReported:
        return m.ResultReported(
            trial=process.order.trial,
            attempt=process.attempt,
            step=process.step,
            metrics=metrics,
            timestamp=self._time.now + self._skew(process.node),
            time_this_iter_s=seconds,
            time_total_s=process.elapsed,
            time_since_restore=process.elapsed,
            iterations_since_restore=process.step,
            done=done,
        )

    def _checkpoint(
        self, process: SimulatedTrialProcess
    ) -> m.CheckpointWritten | m.CheckpointCommitted:
        process.saved = process.step
        return self._uploads.save(process.order.trial, process.attempt, process.step, process.node)

    def _failed(self, process: SimulatedTrialProcess, kind: str, reason: str) -> list[m.NodeEvent]:
        at = self._time.now + self._skew(process.node)
        failed = m.TrialFailed(process.order.trial, process.attempt, kind, reason, "", at)
        return [failed, *self._gone(process)]

    def _finished(self, process: SimulatedTrialProcess) -> list[m.NodeEvent]:
        return [m.TrialFinished(process.order.trial, process.attempt), *self._gone(process)]

    def _paused(self, process: SimulatedTrialProcess) -> list[m.NodeEvent]:
        events: list[m.NodeEvent] = (
            [self._checkpoint(process)] if process.step > process.saved else []
        )
        return [*events, m.TrialPaused(process.order.trial, process.attempt), *self._gone(process)]

    def _gone(self, process: SimulatedTrialProcess) -> list[m.NodeEvent]:
        """Remove an ended trial process; return the event that its slot is free, if it is."""
        process.alive = False
        key = process.order.trial, process.attempt
        del self._processes[key]
        if not self._linger_s:
            return [m.SlotFreed(*key)]
        self._lingering[key] = process
        self._time.after(self._linger_s, self._leave, process)
        return []

    def _leave(self, process: SimulatedTrialProcess) -> None:
        key = process.order.trial, process.attempt
        if self._lingering.pop(key, None) is not None:
            self._report(process.node, m.SlotFreed(*key))
