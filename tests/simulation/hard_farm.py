"""A simulated farm with temporary and permanent faults of nodes, the store, GPUs and trials."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tunemq.testing.simulated_executor import SimulationSettings
from tunemq.testing.simulated_farm import SimulatedFarm
from tunemq.testing.simulated_trial_processes import SimulatedTrialProcess, SimulatedTrialProcesses
from tunemq.testing.simulated_uploads import SimulatedUploads
from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Horizon

FOR_EVER: Final = float("inf")
#: How often a node asks again whether the store or a GPU is back.
_ASKS_AGAIN_S: Final = 5.0
#: The pattern for which the log policy of these searches excludes a node.
PATTERN: Final = "NVRM: Xid"


class Fate(NamedTuple):
    """A failure that happens to a trial the first ``times`` times that it reaches this step.

    ``what`` is a kind of `TrialFailed`, or ``death`` of its process, or ``node``: the node dies,
    too. ``prints``: the trial first prints an error that excludes its node.
    """

    step: int
    what: str
    times: float
    prints: bool = False


class Shapes(SimulationSettings, frozen=True, kw_only=True):
    """Nodes with different resources.

    Attributes:
        shapes: the resources of each.
    """

    shapes: tuple[dict[str, float], ...]

    def joined(self, instance_id: str, node: str, withheld: Any = None) -> m.NodeJoined:
        """The registration of a node instance."""
        place = self.names().index(node)
        resources = self.shapes[place]
        gpus = tuple(
            m.Gpu(f"GPU-{place}-{one}", "A100", 80e9) for one in range(int(resources.get("gpu", 0)))
        )
        address = "127.0.0.1"
        return m.NodeJoined(
            instance_id, node, node, address, resources, gpus, withheld=dict(withheld or {})
        )


class HardFarm(SimulatedFarm):
    """The nodes and their faults, and those of the store and the GPUs.

    Attributes:
        gone: the names of the nodes that never restart.
        bad: by name of a node, how its trials fail there, and until when.
        store_away_until, gpus_busy_until: the store does not answer, or no GPU is free, until then.
        fates: by the number of a trial.
        sync_timeout: seconds that a node waits for the store; None is for ever.
        limit_s: total seconds that a trial may run; None is for ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gone: set[str] = set()
        self.bad: dict[str, tuple[str, float]] = {}
        self.store_away_until = self.gpus_busy_until = 0.0
        self.fates: dict[int, Fate] = {}
        self.sync_timeout: float | None = 60.0
        self.limit_s = FOR_EVER
        faults = self.faults.settings
        self._processes = FatedProcesses(
            self,
            self.time,
            args[2],
            args[3],
            self._state,
            uploads=self.settings.uploads,
            seed=self.settings.seed,
            store=self.store,
            cleanup_s=faults.cleanup_s,
            linger_s=faults.linger_s,
        )

    @property
    def is_store_away(self) -> bool:
        """Whether the store gives no answer now."""
        return self.time.now < self.store_away_until

    def name_of(self, instance_id: str) -> str:
        """The name of its node."""
        return self.nodes[instance_id].node

    def is_bad(self, name: str) -> str:
        """How trials fail on a node now; empty where they do not."""
        what, until = self.bad.get(name, ("", 0.0))
        return what if self.time.now < until else ""

    def remove(self, name: str) -> None:
        """Remove a node for good, without a message from it."""
        self.gone.add(name)
        instance_id = self.current[name]
        if self.nodes[instance_id].is_alive:
            self.kill(instance_id)

    def remove_all(self) -> None:
        """No node is left."""
        for name in self.settings.names():
            self.remove(name)

    def lack(self, what: str, seconds: float) -> None:
        """The ``store`` is away, or the ``gpus`` are used by others, for so long."""
        until = self.time.now + seconds
        if what == "store":
            self.store_away_until = until
        else:
            self.gpus_busy_until = until

    def cut_off_for(self, name: str, seconds: float) -> None:
        """Cut a node off: it keeps running, but the scheduler gets no messages from it."""
        instance_id = self.current[name]
        self.nodes[instance_id].cuts += 1
        if seconds < FOR_EVER:
            self.time.after(seconds, self._reach_again, instance_id)

    def _boot(self, name: str) -> None:
        if name not in self.gone:
            super()._boot(name)


class FatedProcesses(SimulatedTrialProcesses):
    """Trial processes that wait for the store or a GPU, and trials with planned failures."""

    def __init__(self, farm: HardFarm, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._farm = farm
        self._blocked: dict[tuple[str, int], float] = {}
        self._suffered: dict[tuple[int, str], int] = {}
        self._uploads = SlowUploads(
            kwargs["uploads"],
            kwargs["seed"],
            at=self._time.after,
            report=self._report,
            on_slot_free=self._continue_saving,
            on_given_up=self._give_up,
            store=kwargs["store"],
        )
        self._uploads.farm = farm

    def start(self, order: StartTrial) -> None:
        what, reason = self._lacks(order)
        if not what:
            super().start(order)
            return
        key = order.trial, order.attempt
        process = self._processes[key] = SimulatedTrialProcess(
            order, unpack_config(order.config), 0
        )
        self._blocked[key] = self._time.now
        self._report(order.instance_id, m.TrialWaits(*key, what, reason))
        self._time.after(_ASKS_AGAIN_S, self._ask_again, process)

    def run_on(self, trial: str, attempt: int, run_until: Horizon) -> None:
        if (trial, attempt) in self._blocked and (trial, attempt) in self._processes:
            self._processes[trial, attempt].run_until = run_until
        else:
            super().run_on(trial, attempt, run_until)

    def pause(self, trial: str, attempt: int) -> None:
        process = self._processes.get((trial, attempt))
        if process is not None and (trial, attempt) in self._blocked:
            self._report(process.node, m.TrialPaused(trial, attempt), *self._gone(process))
        else:
            super().pause(trial, attempt)

    def _lacks(self, order: StartTrial) -> tuple[str, str]:
        if order.devices and self._time.now < self._farm.gpus_busy_until:
            return "device", "another process has memory of it"
        here = any(self._uploads.has_here(order, one) for one in order.restore)
        if order.restore and self._farm.is_store_away and not here:
            return "restore", "the store gives no answer"
        return "", ""

    def _ask_again(self, process: SimulatedTrialProcess) -> None:
        order = process.order
        key = order.trial, order.attempt
        if not process.alive:
            self._blocked.pop(key, None)
            return
        what, _ = self._lacks(order)
        patience = self._farm.sync_timeout
        waited = self._time.now - self._blocked[key]
        if what == "restore" and patience is not None and waited >= patience:
            del self._blocked[key]
            self._report(process.node, *self._failed(process, "restore", "the store is away"))
        elif what:
            self._time.after(_ASKS_AGAIN_S, self._ask_again, process)
        else:
            del self._blocked[key], self._processes[key]
            self._report(process.node, m.TrialWaits(*key, "", ""))
            super().start(order)
            if key in self._processes:
                self._processes[key].run_until = process.run_until

    def _step(self, process: SimulatedTrialProcess, seconds: float) -> None:
        if process.alive and not self._suffers(process):
            super()._step(process, seconds)

    def _suffers(self, process: SimulatedTrialProcess) -> bool:
        order, farm = process.order, self._farm
        bad = farm.is_bad(farm.name_of(process.node))
        fate = farm.fates.get(order.number, Fate(0, "", 0))
        if process.elapsed > farm.limit_s:
            bad = "trial_limit"
        if bad:
            fate = Fate(process.step + 1, bad, FOR_EVER, prints=bad == "user")
        is_due = fate.step == process.step + 1
        if not is_due or self._suffered.get((order.number, fate.what), 0) >= fate.times:
            return False
        key = order.number, fate.what
        self._suffered[key] = self._suffered.get(key, 0) + 1
        if fate.prints:
            line = f"{PATTERN} 79"
            self._report(
                process.node, m.LogMatched(order.trial, process.attempt, PATTERN, line, 0.0)
            )
        if fate.what == "node":
            farm.kill(process.node)
        elif fate.what == "death":
            self.die(order.trial, process.attempt)
        else:
            self._report(process.node, *self._failed(process, fate.what, "it is its fate"))
        return True


class SlowUploads(SimulatedUploads):
    """Uploads that wait while the store is away, as long as the experiment's `sync_timeout`."""

    farm: HardFarm

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._since: dict[str, float] = {}

    def has_here(self, order: StartTrial, ref: m.CheckpointRef) -> bool:
        queue = self._queues.get((order.trial, order.instance_id), ())
        return any(written.key == ref.key for written in queue)

    def _done(self, trial: str, node: str, written: m.CheckpointWritten) -> None:
        queue = self._queues.get((trial, node))
        if queue is None or not self.farm.is_store_away:
            super()._done(trial, node, written)
            return
        now = self.farm.time.now
        since = self._since.setdefault(written.key, now)
        patience = self.farm.sync_timeout
        if patience is not None and now - since >= patience:
            queue.popleft()
            self._give_up(trial, node, written)
        else:
            self._at(_ASKS_AGAIN_S, self._done, trial, node, written)
