"""`TrialExecutor`: the interface of backends that run trials; an extension point to subclass."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import (
    ContinueTrial,
    DropNode,
    ExecutorCommand,
    PauseTrial,
    ReattachTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol.messages import Event, NodeJoined


class TrialExecutor(ABC):
    """Carries out the runner's commands and returns the events.

    **Thread safety.** The thread that runs the loop calls all methods except `wake`.

    **Order.** The loop calls `perform` once per turn, after it has journalled the turn, with the
    commands in the runner's order. `poll` returns each node's events in their order, as one
    `BatchRead` followed by the events. The loop calls `acknowledge` after it has journalled them.

    **Idempotence.** An executor may return an event twice (the loop drops repeated numbers) but
    must not omit one.
    """

    def open(self, plan: ExperimentPlan) -> None:  # noqa: B027  a backend may need nothing here
        """Prepare for an experiment; `poll` announces the nodes that exist.

        Raises:
            RedisUnavailable: the backend cannot be reached.
        """

    def reattach(  # noqa: B027  most backends keep nothing when their scheduler ends
        self,
        nodes: Iterable[NodeJoined],
        away: Iterable[NodeJoined],
        acknowledged: Mapping[str, int],
    ) -> None:
        """Continue with the nodes of a previous scheduler.

        Called once, after `open` and before the first `poll`. `ReattachTrial` commands follow and
        say which trials the nodes should run. `poll` reports each node that shows no sign of life
        as lost, after its lease expires.

        Args:
            nodes: the nodes that the runner considers alive.
            away: the nodes that it considers lost and that may come back.
            acknowledged: the last journalled event number, by node instance.
        """

    def perform(self, commands: Sequence[ExecutorCommand]) -> None:
        """Carry out a turn's commands."""
        for command in commands:
            match command:
                case ContinueTrial():
                    self.continue_training(command)
                case StartTrial():
                    self.start_trial(command)
                case StopTrial():
                    self.stop_trial(command)
                case PauseTrial():
                    self.pause_trial(command)
                case ReleaseTrial():
                    self.release_trial(command)
                case ReattachTrial():
                    self.reattach_trial(command)
                case DropNode():
                    self.drop_node(command)
                case _:
                    raise BugError(f"no executor knows what to do with {command!r}")
        self.on_step_end()

    @abstractmethod
    def start_trial(self, order: StartTrial) -> None:
        """Start a trial; `poll` reports a failure as an event, this never raises it."""

    @abstractmethod
    def continue_training(self, order: ContinueTrial) -> None:
        """Let a running trial continue to a new horizon."""

    @abstractmethod
    def stop_trial(self, order: StopTrial) -> None:
        """End a running trial; `SlotFreed` follows when its whole process tree has ended."""

    @abstractmethod
    def pause_trial(self, order: PauseTrial) -> None:
        """Save a running trial and end its process: `TrialPaused`, then `SlotFreed`.

        `poll` reports failures as events; this never raises them, and `SlotFreed` follows in any
        case. Results that the trial reports meanwhile come before that and are not lost.
        """

    def release_trial(self, order: ReleaseTrial) -> None:  # noqa: B027  a backend may keep no list
        """Forget a trial whose process has ended."""

    def reattach_trial(self, order: ReattachTrial) -> None:  # noqa: B027  a backend may lose none
        """Repeat all orders about a trial to a node that may have missed some.

        Follows a `NodeReturned`; the node drops trials that are not repeated in the same turn. If
        the node already runs the trial process, nothing changes. If it never had one, it starts it.
        It ends an unwanted one at once, and `SlotFreed` follows.
        """

    def drop_node(self, order: DropNode) -> None:  # noqa: B027  likewise
        """Forget a node instance that is lost and will not return."""

    def on_step_end(self) -> None:  # noqa: B027  a backend may send each order at once
        """Send the orders of this turn; `perform` calls it after the last command."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Return the events since the last call; wait up to ``timeout`` seconds for the first."""

    def pause(self, seconds: float) -> None:
        """Wait while the loop can do nothing, because the journal's disk is full."""
        time.sleep(seconds)

    def acknowledge(self, acknowledged: dict[str, int]) -> None:  # noqa: B027  a backend may keep nothing
        """Note that all events up to these numbers (by node instance) are journalled."""

    def wake(self) -> None:  # noqa: B027  a backend that never waits needs no waking
        """Make a waiting `poll` return soon; may be called from any thread or signal handler."""

    def notes(self) -> list[str]:
        """Return current conditions that a person should know, e.g. that Redis is away."""
        return []

    def notices(self) -> list[str]:
        """Return recent happenings that a person should know, e.g. a node restart."""
        return []

    def close(self, *, now: bool = False) -> None:  # noqa: B027
        """End all running trials of this experiment; ``now`` skips all grace periods."""
