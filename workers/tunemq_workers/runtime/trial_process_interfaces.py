"""What a node knows of a host, and what its decisions need of sockets and processes.

`tunemq_workers.trials.trial_supervisor` decides; `FrameConnection` and `ForkserverPool` are the
real things behind the contracts here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tunemq_shared.base.errors import TransportError
from tunemq_shared.protocol.conditions import Horizon
from tunemq_shared.protocol.messages import TrialOrder, TrialSpec
from tunemq_workers.runtime.reactor import Timer

#: A trial and its epoch.
AttemptId: TypeAlias = tuple[str, int]


class TrialConnection(Protocol):
    """The node's end of a host's socket: `FrameConnection`."""

    #: Takes each event, undecoded.
    on_event: Callable[[bytes], object]
    #: Takes the kind of each frame that is sent.
    on_sent: Callable[[int], object]

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame; never waits."""
        ...

    def hold(self, is_held: bool) -> None:
        """Stop reading, or go on."""
        ...

    def drain(self) -> None:
        """Take in all that a dead host has sent."""
        ...

    def close(self) -> None:
        """Close the socket; again is allowed."""
        ...


class TrialProcessListener(Protocol):
    """Hears what becomes of hosts: `tunemq_workers.trials.trial_supervisor.TrialSupervisor`.

    Of each host: `forked`, then `said` and `closed` any number of times, then `exited`; or
    `not_started` instead of all these. `lost` may come instead of `exited`, and before `forked`. At
    the end, in any case, `gone`.
    """

    def said(self, name: str, kind: int, payload: bytes) -> None:
        """A frame came from a host that is no plain event."""
        ...

    def closed(self, name: str) -> None:
        """A host closed its socket."""
        ...

    def forked(self, name: str, pid: int) -> None:
        """A host exists."""
        ...

    def not_started(self, name: str, reason: str) -> None:
        """A host could not be forked."""
        ...

    def exited(self, name: str, signal: int | None, exit_code: int | None) -> None:
        """A host ended, by a signal or with an exit code."""
        ...

    def lost(self, name: str, reason: str) -> None:
        """A host's forkserver is dead, and so is the host, if it was forked."""
        ...

    def gone(self, name: str) -> None:
        """Nothing is left of a host."""
        ...


class TrialProcessLauncher(Protocol):
    """Starts and ends hosts: `tunemq_workers.forkservers.forkserver_pool.ForkserverPool`."""

    #: Takes (events stream, text): what a forkserver warns those of whose trials it hosts.
    on_warning: Callable[[str, str], object]

    def start(
        self, process: str, order: TrialOrder, listener: TrialProcessListener
    ) -> TrialConnection:
        """Begin to fork a host for ``order``, whose ``start`` is given.

        ``listener`` hears of it, but never before this has returned.

        Raises:
            OSError: the environment has no forkserver and none can be started.
        """
        ...

    def term(self, process: str) -> None:
        """Send SIGTERM to the host's process group; one that is gone is ignored."""
        ...

    def kill(self, process: str) -> None:
        """Kill the host's family; one that is gone is ignored."""
        ...

    def dump(self, process: str) -> None:
        """Have the host write the stacks of its threads to its log; one that is gone is ignored."""
        ...

    def held_at_kill(self, process: str) -> int:
        """The most bytes a family held, if the kernel killed one of it for its limit; else 0."""
        ...

    def close(self) -> None:
        """End all forkservers, and with them all hosts."""
        ...


@dataclass(slots=True, eq=False)
class TrialProcess:
    """One host, and what it was told."""

    name: str
    order: TrialOrder
    start: TrialSpec
    connection: TrialConnection
    pid: int = 0
    #: It said that its trial has ended.
    has_ended: bool = False
    #: It was stopped or killed on order: its end is no news.
    is_given_up: bool = False
    is_killed: bool = False
    #: Its trial failed by what it did, and it is being ended: nothing that it says counts.
    is_condemned: bool = False
    #: It was told to pause at least once, or to stop: it may say that its trial is paused.
    was_to_pause: bool = False
    is_parked: bool = False
    #: Parked, and told that no trial comes any more.
    is_dismissed: bool = False
    #: The kind of the answer that it asked its node for and does not have; 0 if none.
    awaits: int = 0
    timer: Timer | None = None

    @property
    def key(self) -> AttemptId:
        """What it hosts, or hosted last."""
        return self.order.trial, self.order.attempt

    def asks(self, answer: int) -> None:
        """It asked a question whose answer is of this kind.

        Raises:
            WireError: it has asked another that is not answered.
        """
        if self.awaits:
            raise TransportError("it asked again before it was answered")
        self.awaits = answer

    def answer(self, payload: bytes) -> None:
        """Send it the answer that it awaits."""
        kind, self.awaits = self.awaits, 0
        self.connection.send(kind, payload)

    def could_run(self, start: TrialSpec) -> bool:
        """Whether it is, when it is parked, as good as a new one."""
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
    """What of an order a host that runs has to be told of."""
    return order.run_until, order.pause, order.at_checkpoint
