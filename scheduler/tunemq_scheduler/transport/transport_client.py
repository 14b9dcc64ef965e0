"""`TransportClient`: one experiment's access to a `NodeTransport`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from tunemq_scheduler.transport.desired_state import DesiredTrials
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.node_batches import ReadEvent
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.protocol.messages import NodeJoined


class TransportClient:
    """One experiment's access to the nodes, until it closes or leaves.

    `take` returns **events** of the experiment's own stream and changes of nodes. The transport
    sends the **orders** at the end of a turn. After a node joins or returns, its trial processes of
    this experiment stay unchanged until `settle`.
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
        """The key of the experiment's stream."""
        return self._channel.events_key

    @property
    def has_events(self) -> bool:
        """Whether `take` would return events."""
        return bool(self._channel.read_events)

    @property
    def is_full(self) -> bool:
        """Whether the experiment takes no events for now; its stream is then not read."""
        return self._channel.is_full

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        if is_full is not self._channel.is_full:
            self._channel.is_full = is_full
            self._hold(self._channel)

    @property
    def taken(self) -> int:
        """How many events were taken in total."""
        return self._channel.given

    def take(self) -> list[ReadEvent]:
        """Return the events since the last call."""
        return self._channel.take()

    def orders(self, instance_id: str) -> DesiredTrials | None:
        """Return the orders for a node; None if it is dead, which the events report."""
        cursor = self._channel.cursors.get(instance_id)
        return cursor.orders if cursor is not None else None

    def reattach(
        self,
        nodes: Iterable[NodeJoined],
        away: Iterable[NodeJoined],
        acknowledged: Mapping[str, int],
    ) -> None:
        """Continue with known nodes; call it right after `add`, before the first events.

        Put the orders for these nodes afterwards, then call `settle`.

        Args:
            nodes: the nodes that the experiment considers alive.
            away: the nodes that it considers lost.
            acknowledged: the last journalled event number, by node instance.
        """
        for node in nodes:
            self._registry.expect(self._channel, node, acknowledged.get(node.instance_id, 0))
        for node in away:
            acknowledged_up_to, since = acknowledged.get(node.instance_id, 0), time.monotonic()
            self._registry.expect(self._channel, node, acknowledged_up_to, away_since=since)

    def settle(self, events_handled: int | None = None) -> None:
        """Mark the orders that follow from the first events as complete; `send` sends them.

        Args:
            events_handled: how many events; by default, all that were taken.
        """
        self._channel.settle(self._channel.given if events_handled is None else events_handled)

    def acknowledge(self, acknowledged: Mapping[str, int]) -> None:
        """Acknowledge journalled events to the nodes, by instance, and trim the stream."""
        self._registry.acknowledged_up_to(self._channel, acknowledged)
        trimming = self._channel.trim()
        if trimming is not None:
            self._registry.commands.append(trimming)

    def close(self) -> None:
        """End the experiment: nodes end its trials and forget it, and its stream expires.

        While Redis is away, this waits until it is back.
        """
        self._end_experiment(self._channel)

    def leave(self) -> None:
        """Detach silently: nodes keep running its trials until it is added again."""
        self._forget(self._channel)
