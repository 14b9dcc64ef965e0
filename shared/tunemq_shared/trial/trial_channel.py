"""The line between a running trial and whoever hosts it: facts go out, orders come in.

The session knows only this contract, so the same trial code runs on a host's socket, in a test's
memory, and in the user's own process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from tunemq_shared.protocol.messages import NodeEvent, TrialOrder


class TrialChannel(ABC):
    """Carries one trial's events to its node and the node's orders back, each in order.

    A channel whose other end is gone raises: a trial that nobody hears has no reason to go on.
    """

    @abstractmethod
    def send(self, event: NodeEvent) -> None:
        """Hand over ``event``; may wait while the node holds as much as it is allowed to."""

    @abstractmethod
    def poll(self) -> TrialOrder | None:
        """The newest order that came since the last look, or None; never waits."""

    @abstractmethod
    def wait(self) -> TrialOrder:
        """The newest order, once there is one that was not seen yet."""
