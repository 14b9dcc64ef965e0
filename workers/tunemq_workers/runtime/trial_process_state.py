"""`TrialProcess`: a trial process as its node sees it, and who is told what happens to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from tunemq_shared.base.errors import TransportError
from tunemq_shared.protocol.messages import TrialOrder, TrialSpec
from tunemq_shared.protocol.result_conditions import Horizon
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.reactor import Timer

#: A trial and its attempt.
AttemptId: TypeAlias = tuple[str, int]


#: Takes (events stream, encoded event).
Emit: TypeAlias = Callable[[str, bytes], object]


class TrialKey(NamedTuple):
    """A trial of an experiment on this node, in any attempt."""

    events_key: str
    trial: str


class TrialProcessListener(Protocol):
    """Callbacks about trial processes: `tunemq_workers.trials.trial_supervisor.TrialSupervisor`.

    For each process they come in this order: `forked`, `said` and `closed` any number of times,
    `exited`; or only `not_started`. `lost` may replace `exited`, or come before `forked`. The last
    one is always `gone`.
    """

    def said(self, name: str, kind: int, payload: bytes) -> None:
        """A process sent a frame that is not a plain event."""

    def closed(self, name: str) -> None:
        """A process closed its socket."""

    def forked(self, name: str, pid: int) -> None:
        """A process was forked."""

    def not_started(self, name: str, reason: str) -> None:
        """A process could not be forked."""

    def exited(self, name: str, signal: int | None, exit_code: int | None) -> None:
        """A process ended, by a signal or with an exit code."""

    def lost(self, name: str, reason: str) -> None:
        """The process's forkserver died, and with it the process, if it was forked."""

    def gone(self, name: str) -> None:
        """The process and its process tree are gone."""


class TrialProcess(msgspec.Struct, eq=False):
    """One trial process, its order and its state."""

    name: str
    order: TrialOrder
    start: TrialSpec
    connection: FrameConnection
    pid: int = 0
    #: It reported that its trial ended.
    has_ended: bool = False
    #: It was stopped or killed on order, so its end is not reported.
    is_given_up: bool = False
    is_killed: bool = False
    #: SIGTERM killed it, which its node did not send, and that is not reported yet.
    is_terminated: bool = False
    #: The node failed its trial and ends it; all it sends is ignored.
    is_condemned: bool = False
    #: It was ordered at least once to pause or stop, so it may report a pause.
    was_to_pause: bool = False
    is_parked: bool = False
    #: It is parked and has the order to exit.
    is_dismissed: bool = False
    #: It is saving a checkpoint; a stop waits for that until this time of the monotonic clock.
    is_saving: bool = False
    saves_until: float = 0.0
    #: The kind of the answer that it waits for; 0 if none.
    awaits: int = 0
    timer: Timer | None = None

    @property
    def key(self) -> AttemptId:
        """The attempt that it runs, or ran last."""
        return self.order.trial, self.order.attempt

    @property
    def trial(self) -> TrialKey:
        """The trial that it runs, or ran last."""
        return TrialKey(self.start.events_key, self.order.trial)

    @property
    def is_leaving(self) -> bool:
        """Whether it is ordered to stop or pause, so that nothing may delay it."""
        return self.order.stop or self.order.pause

    @property
    def is_stopping(self) -> bool:
        """Whether it is ordered to stop and has not ended yet."""
        return self.order.stop and not (self.has_ended or self.is_killed)

    def asks(self, answer: int) -> None:
        """Note that the process asked a question with this kind of answer.

        Raises:
            TransportError: the node has not answered its previous question.
        """
        if self.awaits:
            raise TransportError("it asked again before it was answered")
        self.awaits = answer

    def answer(self, payload: bytes) -> None:
        """Send the answer that the process waits for."""
        kind, self.awaits = self.awaits, 0
        self.connection.send(kind, payload)

    def could_run(self, start: TrialSpec) -> bool:
        """Return whether this process, when parked, can run ``start`` as well as a new process."""
        was = self.start
        return (
            start.reuse
            and was.code.sha256 == start.code.sha256
            and was.environment == start.environment
            and was.resources == start.resources
            and was.devices.keys() == start.devices.keys()
            and was.experiment == start.experiment
        )


def how_far(order: TrialOrder) -> tuple[Horizon, bool, bool]:
    """Return the parts of an order that a running trial process has to know."""
    return order.run_until, order.pause, order.at_checkpoint
