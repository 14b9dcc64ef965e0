"""`TransportClient`: one experiment's access to a `NodeTransport`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from tunemq_scheduler.transport.desired_state import DesiredTrials
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.protocol.messages import NodeJoined


class TransportClient(ExperimentChannel):
    """One experiment's access to the nodes, until it closes or leaves.

    `take` returns **events** of the experiment's own stream and changes of nodes. The transport
    sends the **orders** at the end of a turn. After a node joins or returns, its trial processes of
    this experiment stay unchanged until `settle`.
    """

    def __init__(
        self,
        events_key: str,
        registry: NodeRegistry,
        *,
        hold: Callable[[ExperimentChannel], None],
        end_experiment: Callable[[ExperimentChannel], None],
        forget: Callable[[ExperimentChannel], None],
    ) -> None:
        super().__init__(events_key)
        self._registry = registry
        self._hold, self._end_experiment, self._forget = hold, end_experiment, forget

    def hold(self, *, is_full: bool) -> None:
        """Stop or continue reading its stream, because the experiment takes none at present."""
        if is_full is not self.is_full:
            self.is_full = is_full
            self._hold(self)

    def orders(self, instance_id: str) -> DesiredTrials | None:
        """Return the orders for a node; None if it is dead, which the events report."""
        cursor = self.cursors.get(instance_id)
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
            self._registry.expect(self, node, acknowledged.get(node.instance_id, 0))
        for node in away:
            acknowledged_up_to, since = acknowledged.get(node.instance_id, 0), time.monotonic()
            self._registry.expect(self, node, acknowledged_up_to, away_since=since)

    def acknowledge(self, acknowledged: Mapping[str, int]) -> None:
        """Acknowledge journalled events to the nodes, by instance, and trim the stream."""
        self._registry.acknowledged_up_to(self, acknowledged)
        trimming = self.trim()
        if trimming is not None:
            self._registry.commands.append(trimming)

    def close(self) -> None:
        """End the experiment: nodes end its trials and forget it, and its stream expires.

        While Redis is away, this waits until it is back.
        """
        self._end_experiment(self)

    def leave(self) -> None:
        """Detach silently: nodes keep running its trials until it is added again."""
        self._forget(self)
