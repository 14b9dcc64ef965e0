"""`CeleryTrialExecutor`: runs one experiment's trials on nodes, through Redis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.transport.desired_state_executor import DesiredStateExecutor
from tunemq_scheduler.transport.event_batches import events_of
from tunemq_scheduler.transport.experiment_transport import TransportClient
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_scheduler.transport.redis.redis_link import EmbeddedServices
from tunemq_shared.base.errors import BugError, TransportError
from tunemq_shared.protocol.messages import Event, NodeJoined, TrialOrder
from tunemq_shared.signing.live_keys import LiveKeys


class CeleryTrialExecutor(DesiredStateExecutor):
    """The backend of experiments that are not on a farm, with a private `NodeTransport`.

    Args:
        url, term, backing, connect_within, keys: see `NodeTransport`.
    """

    def __init__(
        self,
        url: str,
        *,
        term: int,
        backing: EmbeddedServices | None = None,
        connect_within: float = 10.0,
        keys: LiveKeys | None = None,
    ) -> None:
        super().__init__()
        self._transport = NodeTransport(
            url, term=term, backing=backing, connect_within=connect_within, keys=keys
        )
        self._client: TransportClient | None = None

    def open(self, plan: ExperimentPlan) -> None:
        """Connect to Redis and create the experiment's stream; see `NodeTransport.open`."""
        self._plan = plan
        self._client = self._transport.add(plan.events_key)
        self._transport.open()

    def reattach(
        self,
        nodes: Iterable[NodeJoined],
        away: Iterable[NodeJoined],
        acknowledged: Mapping[str, int],
    ) -> None:
        """Watch the leases of nodes that the runner knows; see `TrialExecutor.reattach`."""
        self._opened.reattach(nodes, away, acknowledged)

    def on_step_end(self) -> None:
        """Send a new assignment to each node whose orders changed."""
        self._opened.settle()
        self._transport.send()

    def poll(self, timeout: float) -> list[Event]:
        """Return the events of nodes; raises as `NodeTransport.poll` does.

        Raises:
            TransportError: an event of a node cannot be decoded.
        """
        self._transport.poll(timeout)
        return events_of(self._opened.take())

    def acknowledge(self, acknowledged: dict[str, int]) -> None:
        """Acknowledge journalled events to the nodes, and trim the stream."""
        self._opened.acknowledge(acknowledged)
        self._transport.flush()

    def wake(self) -> None:
        """Make a waiting `poll` return at once; for any thread or signal handler."""
        self._transport.wake()

    def notes(self) -> list[str]:
        """Return whether Redis is away or full, as text."""
        return self._transport.notes()

    def notices(self) -> list[str]:
        """Return what happened to nodes and to an embedded farm since the last call."""
        return self._transport.notices()

    def close(self, *, now: bool = False) -> None:
        """End the experiment's running trials, and let all its keys expire."""
        client, self._client = self._client, None
        try:
            if client is not None and not self._transport.is_away:
                client.close()
        except TransportError:
            # Redis is gone. An embedded farm ends with the script; a farm's nodes give up an
            # experiment whose scheduler has ended.
            pass
        finally:
            self._transport.close(now=now)

    def _put(self, instance_id: str, order: TrialOrder) -> None:
        if (orders := self._opened.orders(instance_id)) is not None:
            orders.put(order)

    def _release(self, instance_id: str, trial: str, attempt: int) -> None:
        if (orders := self._opened.orders(instance_id)) is not None:
            orders.release(trial, attempt)

    @property
    def _opened(self) -> TransportClient:
        if self._client is None:
            raise BugError("the executor was used before it was opened, or after it was closed")
        return self._client
