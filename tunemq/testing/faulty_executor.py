"""`FaultyTrialExecutor`: a scheduler's connection to a simulated farm with faults.

It works like the executor of real farms, with the same desired state: it sends assignments to
nodes, resends those that a node did not confirm, treats a silent node as lost, and takes it back
when it reports again. A scheduler that dies leaves the farm unchanged; its successor has another
executor on the same farm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tunemq.testing.simulated_farm import SimulatedFarm
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import DropNode, ExecutorCommand
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.desired_state_executor import DesiredStateExecutor
from tunemq_shared.protocol import messages as m

#: Seconds between two checks of the leases.
_POLL_INTERVAL_S: Final = 1.0


class _WatchedNode(msgspec.Struct):
    """A registered node instance.

    Attributes:
        silent_s: seconds since its lease was last renewed.
        is_away: whether it is lost, and may come back.
        journalled: the number of its last journalled event.
        is_overdue: whether it had not confirmed its newest orders at the last check.
        withheld: the devices that the runner considers withheld.
        is_new: whether the runner has not handled its registration yet. The runner may know of
            trials on the node; orders without them would kill them.
    """

    desired_state: DesiredState
    silent_s: float = 0.0
    is_away: bool = False
    acknowledged_up_to: int = 0
    is_overdue: bool = False
    is_new: bool = True
    withheld: Mapping[str, str] = {}

    @property
    def takes_orders(self) -> bool:
        """Whether to send it assignments."""
        return not (self.is_new or self.is_away)


class FaultyTrialExecutor(DesiredStateExecutor):
    """Run trials on a farm that exists independently of this executor.

    Args:
        term: the scheduler's term; its orders override those of lower terms.
    """

    def __init__(self, farm: SimulatedFarm, term: int = 1) -> None:
        super().__init__()
        self._farm, self._term = farm, term
        self._time = farm.time
        self._nodes: dict[str, _WatchedNode] = {}
        self._dead: set[str] = set()
        self._read_events: list[m.Event] = []
        self._read_until = 0
        self._unacknowledged: deque[tuple[int, str, int]] = deque()
        #: The instances whose events were returned since the last journalled turn.
        self._given: set[str] = set()
        #: The nodes that registered or returned since then.
        self._newcomers: list[_WatchedNode] = []
        self._is_closed = False

    def open(self, plan: ExperimentPlan) -> None:
        """Find the farm's nodes."""
        self._plan = plan
        self._time.after(0.0, self._look)

    def close(self, *, now: bool = False) -> None:  # noqa: ARG002  there is nothing to wait for
        """Stop watching; the farm continues."""
        self._is_closed = True

    def reattach(
        self,
        nodes: Iterable[m.NodeJoined],
        away: Iterable[m.NodeJoined],
        acknowledged: Mapping[str, int],
    ) -> None:
        """Expect these nodes, which an earlier scheduler knew."""
        for joined in nodes:
            self._nodes[joined.instance_id] = self._watched(joined)
        for joined in away:
            self._nodes[joined.instance_id] = self._watched(joined)
            self._nodes[joined.instance_id].is_away = True
        for instance_id, last in acknowledged.items():
            if instance_id in self._nodes:
                self._nodes[instance_id].acknowledged_up_to = last

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self._time.now

    # --- orders -----------------------------------------------------------------------------------

    def perform(self, commands: Sequence[ExecutorCommand]) -> None:
        """Add the orders to the nodes' desired states, and send the changed ones."""
        self._events_are_handled()
        super().perform(commands)

    def drop_node(self, order: DropNode) -> None:
        """Forget a dead node."""
        super().drop_node(order)
        self._nodes.pop(order.instance_id, None)
        self._dead.add(order.instance_id)

    def on_step_end(self) -> None:
        """Send a new assignment to each node whose orders changed."""
        for watched in self._nodes.values():
            if watched.desired_state.is_changed and watched.takes_orders:
                self._farm.send_assignment(watched.desired_state.next_assignment())

    def _events_are_handled(self) -> None:
        """Note that a turn is journalled, with all events that were returned."""
        for watched in self._newcomers:
            watched.is_new = False
            watched.desired_state.orders(self._opened_plan.events_key).settle()
        self._newcomers.clear()

    def _put(self, instance_id: str, order: m.TrialOrder) -> None:
        if (watched := self._nodes.get(instance_id)) is not None:
            watched.desired_state.orders(self._opened_plan.events_key).put(order)

    def _release(self, instance_id: str, trial: str, attempt: int) -> None:
        if (watched := self._nodes.get(instance_id)) is not None:
            watched.desired_state.orders(self._opened_plan.events_key).release(trial, attempt)

    # --- events -----------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """Return the next events, all of one moment; none after ``timeout`` virtual seconds."""
        time = self._time
        limit = time.now + timeout
        self._read()
        while not self._read_events:
            if not time.has_due(limit):
                time.pass_to(limit)
                break
            time.happen()
            self._read()
        read_events, self._read_events = self._read_events, []
        return read_events

    def acknowledge(self, acknowledged: dict[str, int]) -> None:
        """Note how far nodes' events are journalled; nodes learn it with their leases."""
        self._events_are_handled()
        for instance_id in self._given:
            watched = self._nodes.get(instance_id)
            if watched is not None:
                watched.acknowledged_up_to = acknowledged.get(instance_id, 0)
        self._given.clear()
        trimmed = 0
        while self._unacknowledged:
            number, instance_id, last = self._unacknowledged[0]
            if instance_id in self._nodes and self._nodes[instance_id].acknowledged_up_to < last:
                break
            trimmed = number
            self._unacknowledged.popleft()
        if trimmed:
            self._farm.trim(trimmed)

    def _read(self) -> None:
        for number, (batch, events) in self._farm.read(self._read_until):
            self._read_until = number
            instance_id = batch.instance_id
            watched = self._nodes.get(instance_id) or self._registered(instance_id)
            self._unacknowledged.append((number, instance_id, batch.last))
            if watched is not None:
                self._is_heard(instance_id, watched)
                self._given.add(instance_id)
                cursor = f"{number}-0"
                self._read_events.append(m.BatchRead(instance_id, batch.first, batch.last, cursor))
                self._read_events += events

    # --- nodes ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Once a second, check which nodes are alive, and which did not confirm their orders."""
        if self._is_closed:
            return
        if not self._farm.is_open:
            self._farm.open_anew()
            self._unacknowledged.clear()
            for watched in self._nodes.values():
                watched.desired_state.lose_confirmation()
        for instance_id in self._farm.current.values():
            if instance_id not in self._nodes and self._farm.nodes[instance_id].is_reachable:
                self._registered(instance_id)
        for instance_id, watched in list(self._nodes.items()):
            self._look_at(instance_id, watched)
        self._time.after(_POLL_INTERVAL_S, self._look)

    def _look_at(self, instance_id: str, watched: _WatchedNode) -> None:
        node = self._farm.nodes[instance_id]
        if not node.is_reachable:
            watched.silent_s += _POLL_INTERVAL_S
            if watched.silent_s > self._farm.faults.settings.lease_s and not watched.is_away:
                watched.is_away = True
                self._read_events.append(m.NodeLost(instance_id, "its lease ran out"))
            return
        self._is_heard(instance_id, watched)
        node.forget(watched.acknowledged_up_to)
        desired_state = watched.desired_state
        desired_state.confirm(*node.confirmed)
        if not watched.takes_orders:
            return
        if desired_state.is_changed or desired_state.is_outdated:
            self._farm.send_assignment(desired_state.next_assignment())
        elif watched.is_overdue and not desired_state.is_confirmed:
            self._farm.send_assignment(desired_state.same_assignment())
        watched.is_overdue = not desired_state.is_confirmed

    def _is_heard(self, instance_id: str, watched: _WatchedNode) -> None:
        watched.silent_s = 0.0
        if watched.is_away:
            watched.is_away = False
            watched.desired_state.start_over()
            watched.is_new = True
            self._newcomers.append(watched)
            self._read_events.append(m.NodeReturned(instance_id))
        withheld = self._farm.nodes[instance_id].withheld
        if withheld != watched.withheld:
            watched.withheld = withheld
            self._read_events.append(m.DevicesWithheld(instance_id, dict(withheld)))

    def _registered(self, instance_id: str) -> _WatchedNode | None:
        """Register a new node instance, unless it is dead; the earlier instance is dead now."""
        node = self._farm.nodes[instance_id]
        if instance_id in self._dead or self._farm.current[node.node] != instance_id:
            return None
        for other in list(self._nodes):
            if self._farm.nodes[other].node == node.node:
                del self._nodes[other]
                self._dead.add(other)
                dead = m.NodeLost(other, "its node was started again", is_dead=True)
                self._read_events.append(dead)
        joined = self._farm.settings.joined(instance_id, node.node, node.withheld)
        watched = self._nodes[instance_id] = self._watched(joined)
        self._read_events.append(joined)
        return watched

    def _watched(self, joined: m.NodeJoined) -> _WatchedNode:
        instance_id = joined.instance_id
        desired_state = DesiredState(
            instance_id, self._term, self._farm.nodes[instance_id].confirmed[1]
        )
        desired_state.is_changed = self._farm.nodes[instance_id].confirmed[0] > 0
        watched = _WatchedNode(desired_state, withheld=joined.withheld)
        self._newcomers.append(watched)
        return watched
