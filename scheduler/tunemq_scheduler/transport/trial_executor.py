"""`TrialExecutor`: where trials run. The backend is an extension point; subclass it freely."""

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
    """Carries out the runner's orders and brings back what happened.

    **Thread safety.** All methods but `wake` are called by the thread that runs the loop.

    **Order.** `perform` is called once a turn, after the turn stands in the journal, with the
    orders in the order in which the runner gave them. `poll` returns facts in the order in which
    each node stated them; a node's events come as one `BatchRead` followed by them. `acknowledge`
    follows the journal.

    **Idempotence.** An executor may state a fact twice (the loop drops numbers it has); it may not
    leave one out.
    """

    def open(self, plan: ExperimentPlan) -> None:  # noqa: B027  a backend may need nothing here
        """Get ready for an experiment; nodes that are there are announced by `poll`.

        Raises:
            WireUnavailable: the backend cannot be reached.
        """

    def reattach(  # noqa: B027  nothing of most backends is left when their scheduler has ended
        self,
        nodes: Iterable[NodeJoined],
        away: Iterable[NodeJoined],
        acknowledged: Mapping[str, int],
    ) -> None:
        """Go on with the nodes of a scheduler that went before this one.

        Called once, after `open` and before the first `poll`. What they are to host follows, as
        `ReattachTrial` orders. Each that shows no sign of life is stated as lost, in its time.

        Args:
            nodes: those that the runner takes for alive.
            away: those that it takes for lost, and that may come back.
            accepted: how far their events are journalled, by attempt.
        """

    def perform(self, commands: Sequence[ExecutorCommand]) -> None:
        """Carry out a turn's orders."""
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
        """Host a trial; failing to is stated as a fact by `poll`, never raised."""

    @abstractmethod
    def continue_training(self, order: ContinueTrial) -> None:
        """Let a hosted trial run on to a new horizon."""

    @abstractmethod
    def stop_trial(self, order: StopTrial) -> None:
        """End a hosted trial; its `SlotFreed` follows when nothing of it is left."""

    @abstractmethod
    def pause_trial(self, order: PauseTrial) -> None:
        """Save a hosted trial and end its host: `TrialPaused`, then `SlotFreed`.

        Whatever fails is stated as a fact by `poll`, never raised, and `SlotFreed` follows even so.
        What the trial reported meanwhile is stated before, and not lost.
        """

    def release_trial(self, order: ReleaseTrial) -> None:  # noqa: B027  a backend may keep no list
        """Forget a trial whose host is gone."""

    def reattach_trial(self, order: ReattachTrial) -> None:  # noqa: B027  one may lose no nodes
        """Repeat all orders about a trial to a node that may have missed some.

        Follows a `NodeReturned`; what of that node is not repeated in its turn is not there. To a
        node that has the host already it makes no difference. Where it has none and never had, the
        host is started; one that is not wanted is ended at once, `SlotFreed` follows.
        """

    def drop_node(self, order: DropNode) -> None:  # noqa: B027  likewise
        """Forget a node instance that is lost and will not return."""

    def on_step_end(self) -> None:  # noqa: B027  a backend may send each order at once
        """The turn's orders have all been given: send what was put together."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Facts since the last call; waits up to ``timeout`` seconds for the first."""

    def pause(self, seconds: float) -> None:
        """Let time pass in which the loop can do nothing: its journal's disk is full."""
        time.sleep(seconds)

    def acknowledge(self, acknowledged: dict[str, int]) -> None:  # noqa: B027  a backend may keep nothing
        """All events up to these numbers (by node instance) are journalled."""

    def wake(self) -> None:  # noqa: B027  a backend that never waits needs no waking
        """Make a waiting `poll` return soon; may be called from any thread or signal handler."""

    def notes(self) -> list[str]:
        """What holds now and a person should know, e.g. that Redis is away."""
        return []

    def notices(self) -> list[str]:
        """What happened since the last call and a person should know, e.g. a node's restart."""
        return []

    def close(self, *, now: bool = False) -> None:  # noqa: B027
        """End everything that still runs of this experiment; ``now`` leaves out all grace."""
