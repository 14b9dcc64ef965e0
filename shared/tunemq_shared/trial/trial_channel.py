"""`TrialChannel`: the connection of a running trial: events go out, orders come in.

The session knows only this interface, so the same trial code runs with a node's socket, in a test's
memory, and in the user's own process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from tunemq_shared.protocol.messages import NodeEvent, TrialOrder


class TrialChannel(ABC):
    """Carries one trial's events to its node and the node's orders back, each in order.

    A channel whose other end is closed raises: a trial without a reader must not continue.
    """

    @abstractmethod
    def send(self, event: NodeEvent) -> None:
        """Send ``event``; may wait while the node's buffers are full."""

    @abstractmethod
    def saves(self, *, is_saving: bool) -> None:
        """Say that the trial begins, or has ended, to save a checkpoint; a stop waits for it."""

    @abstractmethod
    def poll(self) -> TrialOrder | None:
        """The newest order since the last call, or None; never waits."""

    @abstractmethod
    def wait(self) -> TrialOrder:
        """Wait for a new order and return the newest."""
