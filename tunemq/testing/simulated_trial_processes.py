"""Simulated trial hosts: they step in virtual time, report, save, and end as real ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunemq.testing.simulated_store import SimulatedStore
from tunemq.testing.simulated_uploads import SimulatedUploads, UploadSettings
from tunemq.testing.virtual_time import VirtualTime
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.conditions import Condition, Horizon, first_that_holds

#: (config, step) -> the metrics that the simulated trainable reports.
Metrics = Callable[[dict[str, Any], int], dict[str, Any]]
#: (config, step) -> seconds that this step takes.
StepTime = Callable[[dict[str, Any], int], float]
#: (node, events): a node states these.
Report = Callable[..., None]


class SimulatedTrialProcess:
    """A simulated trial host: steps in virtual time until told otherwise."""

    __slots__ = (
        "alive",
        "config",
        "elapsed",
        "epoch",
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
        self.node = order.incarnation
        self.epoch = order.epoch
        self.step = self.saved = step
        self.run_until: Horizon = order.run_until
        self.elapsed = 0.0
        self.alive = True
        self.shown: dict[str, Any] = {}
        self.waits = False
        self.is_pausing = False
        #: Whether the trial is done after the save for which there is no room yet; None without.
        self.unsaved: bool | None = None


class SimulatedTrialProcesses:
    """All hosts of all nodes, by trial and epoch.

    Args:
        time: in which they step.
        metrics, step_time: the trainable.
        report: takes what a node states.
        uploads, seed: how their checkpoints come to the store.
        store: which that is; None where nobody looks into it.
        horizon_error: run on so many steps past each horizon.
        cleanup_s: how long a host takes to end behind its last result.
        linger_s: how long something of a host is left after it has ended.
        skew: by how much each node's clock is wrong.
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
        self._hosts: dict[tuple[str, int], SimulatedTrialProcess] = {}
        #: By trial and node, those that wait for room for a checkpoint.
        self._saving: dict[tuple[str, str], SimulatedTrialProcess] = {}
        #: Ended, and not quite gone: what they hold of their node.
        self._lingering: dict[tuple[str, int], SimulatedTrialProcess] = {}
        self._uploads = SimulatedUploads(
            uploads,
            seed,
            at=time.after,
            report=report,
            on_room=self._go_on_saving,
            on_given_up=self._give_up,
            store=store,
        )
        self._stop: tuple[Condition, ...] = ()
        self._frequency = 0
        self._saves_at_end = False
        self._uploads_waiting = 1

    def open(self, plan: ExperimentPlan) -> None:
        """Get to know the experiment whose trials are hosted."""
        self._stop = plan.stop
        self._frequency = plan.checkpoint_frequency
        self._saves_at_end = plan.checkpoint_at_end
        self._uploads_waiting = plan.uploads_waiting

    def get(self, trial: str, epoch: int) -> SimulatedTrialProcess | None:
        """The host of an incarnation, unless it has ended."""
        return self._hosts.get((trial, epoch))

    def all(self) -> list[SimulatedTrialProcess]:
        """All hosts that have not ended."""
        return list(self._hosts.values())

    def held(self, node: str) -> list[StartTrial]:
        """The orders of all hosts of which something is left on a node."""
        hosts = (*self._hosts.values(), *self._lingering.values())
        return [host.order for host in hosts if host.node == node]

    # --- orders, when they have arrived -----------------------------------------------------------

    def start(self, order: StartTrial) -> None:
        """Begin to host an incarnation."""
        ref, damaged = self._uploads.usable(order)
        at = self._time.now + self._skew(order.incarnation)
        started = m.TrialStarted(order.trial, order.epoch, 1, order.incarnation, "127.0.0.1", at)
        self._report(order.incarnation, started, *damaged)
        host = SimulatedTrialProcess(
            order, unpack_config(order.config), 0 if ref is None else ref.step
        )
        self._hosts[order.trial, order.epoch] = host
        if ref is None and order.restore:
            self._report(host.node, *self._failed(host, "restore", "no checkpoint is usable"))
        else:
            self._next_step(host)

    def run_on(self, trial: str, epoch: int, run_until: Horizon) -> None:
        """Let one run on to a new horizon."""
        host = self._hosts.get((trial, epoch))
        if host is not None:
            host.run_until = run_until
            if host.waits and not self._has_reached(host):
                host.waits = False
                self._next_step(host)

    def end(self, trial: str, epoch: int) -> None:
        """End one, which saves if that is due."""
        host = self._hosts.get((trial, epoch))
        if host is not None:
            self._report(host.node, *self._saved_at_last(host), *self._gone(host))

    def kill(self, trial: str, epoch: int) -> None:
        """End one that is not wanted any more: it says nothing but that it is gone."""
        host = self._hosts.get((trial, epoch))
        if host is not None:
            self._report(host.node, *self._gone(host))

    def pause(self, trial: str, epoch: int) -> None:
        """Save one and end it; one that is within a step ends that first, and states its result."""
        host = self._hosts.get((trial, epoch))
        if host is None:
            return
        if host.waits or host.unsaved is not None:
            self._report(host.node, *self._saved_at_last(host), *self._paused(host))
        else:
            host.is_pausing = True

    # --- what goes wrong --------------------------------------------------------------------------

    def die(self, trial: str, epoch: int) -> None:
        """A host is killed by somebody else; its node says so."""
        host = self._hosts.get((trial, epoch))
        if host is not None:
            at = self._time.now + self._skew(host.node)
            died = m.TrialProcessDied(trial, epoch, 1, 9, None, at)
            self._report(host.node, died, *self._gone(host))

    def node_died(self, node: str) -> None:
        """Nothing of a node is left, and nobody says so."""
        for hosts in (self._hosts, self._lingering):
            for key, host in list(hosts.items()):
                if host.node == node:
                    host.alive = False
                    del hosts[key]
        self._uploads.node_died(node)

    def _give_up(self, trial: str, node: str, reason: str) -> None:
        """The host of this trial on this node cannot keep its checkpoints."""
        for host in list(self._hosts.values()):
            if (host.order.trial, host.node) == (trial, node):
                self._report(host.node, *self._failed(host, "storage", reason))

    # --- steps ------------------------------------------------------------------------------------

    def _next_step(self, host: SimulatedTrialProcess) -> None:
        seconds = self._step_time(host.config, host.step + 1)
        self._time.after(seconds, self._step, host, seconds)

    def _step(self, host: SimulatedTrialProcess, seconds: float) -> None:
        if not host.alive:
            return
        host.step += 1
        host.elapsed += seconds
        metrics = self._metrics(host.config, host.step)
        host.shown = {**metrics, "training_iteration": host.step, "time_total_s": host.elapsed}
        done = first_that_holds(self._stop, host.shown) is not None
        events: list[m.NodeEvent] = [self._result(host, metrics, seconds, done=done)]
        frequency = self._frequency
        if (frequency and host.step % frequency == 0) or (done and self._saves_at_end):
            if self._uploads.waiting(host.order.trial, host.node) > self._uploads_waiting:
                host.unsaved = done
                self._saving[host.order.trial, host.node] = host
                events.append(m.TrialWaits(host.order.trial, host.epoch, "save", "simulated"))
                self._report(host.node, *events)
                return
            events.append(self._checkpoint(host))
        self._finish_step(host, done, events)

    def _go_on_saving(self, trial: str, node: str) -> None:
        """There is room for one checkpoint more of this trial on this node."""
        host = self._saving.get((trial, node))
        if host is not None and host.alive and host.unsaved is not None:
            done = host.unsaved
            self._finish_step(host, done, self._saved_at_last(host))

    def _saved_at_last(self, host: SimulatedTrialProcess) -> list[m.NodeEvent]:
        """What is stated when a host gets the room that it waited for."""
        if host.unsaved is None:
            return []
        host.unsaved = None
        self._saving.pop((host.order.trial, host.node), None)
        return [m.TrialWaits(host.order.trial, host.epoch, "", ""), self._checkpoint(host)]

    def _finish_step(
        self, host: SimulatedTrialProcess, done: bool, events: list[m.NodeEvent]
    ) -> None:
        if done and self._cleanup_s:
            self._report(host.node, *events)
            self._time.after(self._cleanup_s, self._finish, host)
            return
        if done:
            events += self._finished(host)
        elif host.is_pausing:
            events += self._paused(host)
        self._report(host.node, *events)
        if host.alive:
            host.shown["training_iteration"] -= self._horizon_error
            if self._has_reached(host):
                host.waits = True
            else:
                self._next_step(host)

    def _finish(self, host: SimulatedTrialProcess) -> None:
        """It has cleaned up."""
        if host.alive:
            self._report(host.node, *self._finished(host))

    def _has_reached(self, host: SimulatedTrialProcess) -> bool:
        """Whether somebody has to decide; nobody does about a repeated step."""
        is_new = host.step > host.order.last_step
        return is_new and first_that_holds(host.run_until, host.shown) is not None

    def _result(
        self, host: SimulatedTrialProcess, metrics: dict[str, Any], seconds: float, *, done: bool
    ) -> m.ResultReported:
        return m.ResultReported(
            trial=host.order.trial,
            epoch=host.epoch,
            step=host.step,
            metrics=metrics,
            timestamp=self._time.now + self._skew(host.node),
            time_this_iter_s=seconds,
            time_total_s=host.elapsed,
            time_since_restore=host.elapsed,
            iterations_since_restore=host.step,
            done=done,
        )

    def _checkpoint(
        self, host: SimulatedTrialProcess
    ) -> m.CheckpointWritten | m.CheckpointCommitted:
        host.saved = host.step
        return self._uploads.save(host.order.trial, host.epoch, host.step, host.node)

    def _failed(self, host: SimulatedTrialProcess, kind: str, reason: str) -> list[m.NodeEvent]:
        at = self._time.now + self._skew(host.node)
        failed = m.TrialFailed(host.order.trial, host.epoch, kind, reason, "", at)
        return [failed, *self._gone(host)]

    def _finished(self, host: SimulatedTrialProcess) -> list[m.NodeEvent]:
        return [m.TrialFinished(host.order.trial, host.epoch), *self._gone(host)]

    def _paused(self, host: SimulatedTrialProcess) -> list[m.NodeEvent]:
        events: list[m.NodeEvent] = [self._checkpoint(host)] if host.step > host.saved else []
        return [*events, m.TrialPaused(host.order.trial, host.epoch), *self._gone(host)]

    def _gone(self, host: SimulatedTrialProcess) -> list[m.NodeEvent]:
        """A host has ended; returns the news that nothing of it is left, if that is so."""
        host.alive = False
        key = host.order.trial, host.epoch
        del self._hosts[key]
        if not self._linger_s:
            return [m.SlotFreed(*key)]
        self._lingering[key] = host
        self._time.after(self._linger_s, self._leave, host)
        return []

    def _leave(self, host: SimulatedTrialProcess) -> None:
        key = host.order.trial, host.epoch
        if self._lingering.pop(key, None) is not None:
            self._report(host.node, m.SlotFreed(*key))
