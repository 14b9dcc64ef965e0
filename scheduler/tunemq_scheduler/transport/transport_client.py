"""`TransportClient`: what one experiment does on a `NodeTransport`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from tunemq_scheduler.transport.desired_state import DesiredTrials
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.node_batches import ReadEvent
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.protocol.messages import NodeJoined


class TransportClient:
    """An experiment's end of the wire, until it is closed or left.

    **Facts** are those of its own stream, and what becomes of nodes. **Orders** are sent by the
    wire, at the end of a turn. Between a node's joining or return and `settle`, what it hosts of
    this experiment stays as it is.
    """

    def __init__(
        self,
        channel: ExperimentChannel,
        registry: NodeRegistry,
        *,
        hold: Callable[[ExperimentChannel], None],
        end_experiment: Callable[[ExperimentChannel], None],
        forget: Callable[[ExperimentChannel], None],
    ) -> None:
        self._channel, self._registry = channel, registry
        self._hold, self._end_experiment, self._forget = hold, end_experiment, forget

    @property
    def events_key(self) -> str:
        """The key of its stream."""
        return self._channel.events_key

    @property
    def has_events(self) -> bool:
        """Whether there are some to take."""
        return bool(self._channel.read_events)

    @property
    def is_full(self) -> bool:
        """Whether it takes no facts for now: its stream is not read meanwhile."""
        return self._channel.is_full

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        if is_full is not self._channel.is_full:
            self._channel.is_full = is_full
            self._hold(self._channel)

    @property
    def taken(self) -> int:
        """How many facts were taken, all in all."""
        return self._channel.given

    def take(self) -> list[ReadEvent]:
        """The facts since the last call."""
        return self._channel.take()

    def orders(self, instance_id: str) -> DesiredTrials | None:
        """Its orders for a node; None when that is dead, which its facts say or have said."""
        cursor = self._channel.cursors.get(instance_id)
        return cursor.orders if cursor is not None else None

    def reattach(
        self,
        nodes: Iterable[NodeJoined],
        away: Iterable[NodeJoined],
        acknowledged: Mapping[str, int],
    ) -> None:
        """Go on with nodes that are known; at once after it was added, before it has facts.

        What they are to host follows, as orders; then `settle`.

        Args:
            nodes: those that it takes for alive.
            away: those that it takes for lost.
            accepted: how far their events are journalled, by attempt.
        """
        for node in nodes:
            self._registry.expect(self._channel, node, acknowledged.get(node.instance_id, 0))
        for node in away:
            acknowledged_up_to, since = acknowledged.get(node.instance_id, 0), time.monotonic()
            self._registry.expect(self._channel, node, acknowledged_up_to, away_since=since)

    def settle(self, events_handled: int | None = None) -> None:
        """All that follows from the first facts is in its orders; sent by the wire's next `send`.

        Args:
            handled: how many facts; by default all that were taken.
        """
        self._channel.settle(self._channel.given if events_handled is None else events_handled)

    def acknowledge(self, acknowledged: Mapping[str, int]) -> None:
        """Tell nodes how far their events, by instance, are journalled, and trim the stream."""
        self._registry.acknowledged_up_to(self._channel, acknowledged)
        trimming = self._channel.trim()
        if trimming is not None:
            self._registry.commands.append(trimming)

    def close(self) -> None:
        """The experiment is over: what still runs of it ends, nodes forget it, its stream expires.

        Where Redis is away that happens when it is back.
        """
        self._end_experiment(self._channel)

    def leave(self) -> None:
        """Tell nobody: nodes go on with what they host, until the experiment is added again."""
        self._forget(self._channel)
