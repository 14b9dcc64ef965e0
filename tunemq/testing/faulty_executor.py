"""`FaultyTrialExecutor`: a scheduler's end of a simulated farm in which things go wrong.

It does what the executor of real farms does, with the same mailboxes: nodes are sent assignments,
what one has not taken is sent again, a node that is silent for too long is lost, and returns when
it is heard. A scheduler that dies leaves the farm as it is; its successor has an executor of its
own on the same farm.
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
from tunemq_scheduler.transport.desired_state_orders import DesiredStateExecutor
from tunemq_shared.protocol import messages as m

#: Leases are looked at this often.
_LOOK_EVERY_S: Final = 1.0


class _WatchedNode(msgspec.Struct):
    """A node incarnation that introduced itself.

    Attributes:
        silent_s: for how long its lease has not been renewed.
        is_away: whether it is lost, and may come back.
        journalled: the number of its last event that stands in the journal.
        is_overdue: whether it had not taken its newest orders when it was looked at last.
        withheld: the devices that the runner takes for withheld.
        is_new: whether the runner has not handled yet that it is there: it may know of trials that
            the node hosts, which orders without them would kill.
    """

    mailbox: DesiredState
    silent_s: float = 0.0
    is_away: bool = False
    journalled: int = 0
    is_overdue: bool = False
    is_new: bool = True
    withheld: Mapping[str, str] = {}

    @property
    def takes_orders(self) -> bool:
        """Whether to send it assignments."""
        return not (self.is_new or self.is_away)


class FaultyTrialExecutor(DesiredStateExecutor):
    """Runs trials on a farm that is there before it and after it.

    Args:
        term: which scheduler this is; its orders have precedence over those of all before it.
    """

    def __init__(self, farm: SimulatedFarm, term: int = 1) -> None:
        super().__init__()
        self._farm, self._term = farm, term
        self._time = farm.time
        self._nodes: dict[str, _WatchedNode] = {}
        self._dead: set[str] = set()
        self._facts: list[m.Event] = []
        self._read_until = 0
        self._unreleased: deque[tuple[int, str, int]] = deque()
        #: Whose events were handed out since the journal was last heard of.
        self._given: set[str] = set()
        #: Who joined, or returned, since then.
        self._newcomers: list[_WatchedNode] = []
        self._is_closed = False

    def open(self, plan: ExperimentPlan) -> None:
        """Look who is there."""
        self._plan = plan
        self._time.after(0.0, self._look)

    def close(self, *, now: bool = False) -> None:  # noqa: ARG002  there is nothing to wait for
        """Look no more; the farm goes on."""
        self._is_closed = True

    def reattach(
        self,
        nodes: Iterable[m.NodeJoined],
        away: Iterable[m.NodeJoined],
        accepted: Mapping[str, int],
    ) -> None:
        """Expect these nodes, which a scheduler before this one knew."""
        for joined in nodes:
            self._nodes[joined.incarnation] = self._watched(joined)
        for joined in away:
            self._nodes[joined.incarnation] = self._watched(joined)
            self._nodes[joined.incarnation].is_away = True
        for incarnation, last in accepted.items():
            if incarnation in self._nodes:
                self._nodes[incarnation].journalled = last

    def clock(self) -> float:
        """The virtual time in seconds."""
        return self._time.now

    # --- orders -----------------------------------------------------------------------------------

    def perform(self, commands: Sequence[ExecutorCommand]) -> None:
        """Put the orders into the nodes' mailboxes, and send those that changed."""
        self._facts_are_handled()
        super().perform(commands)

    def drop_node(self, order: DropNode) -> None:
        """Forget a dead node."""
        super().drop_node(order)
        self._nodes.pop(order.incarnation, None)
        self._dead.add(order.incarnation)

    def on_step_end(self) -> None:
        """Send each node whose orders changed its new assignment."""
        for watched in self._nodes.values():
            if watched.mailbox.is_changed and watched.takes_orders:
                self._farm.mail(watched.mailbox.next_assignment())

    def _facts_are_handled(self) -> None:
        """A turn is journalled, and with it all facts that were handed out."""
        for watched in self._newcomers:
            watched.is_new = False
            watched.mailbox.orders(self._opened_plan.events_key).settle()
        self._newcomers.clear()

    def _put(self, incarnation: str, order: m.TrialOrder) -> None:
        if (watched := self._nodes.get(incarnation)) is not None:
            watched.mailbox.orders(self._opened_plan.events_key).put(order)

    def _release(self, incarnation: str, trial: str, epoch: int) -> None:
        if (watched := self._nodes.get(incarnation)) is not None:
            watched.mailbox.orders(self._opened_plan.events_key).release(trial, epoch)

    # --- facts ------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """What comes next, at one moment; nothing after ``timeout`` virtual seconds of quiet."""
        time = self._time
        limit = time.now + timeout
        self._read()
        while not self._facts:
            if not time.has_due(limit):
                time.pass_to(limit)
                break
            time.happen()
            self._read()
        facts, self._facts = self._facts, []
        return facts

    def release(self, accepted: dict[str, int]) -> None:
        """Note how far nodes' events are journalled; they hear of it with their leases."""
        self._facts_are_handled()
        for incarnation in self._given:
            watched = self._nodes.get(incarnation)
            if watched is not None:
                watched.journalled = accepted.get(incarnation, 0)
        self._given.clear()
        trimmed = 0
        while self._unreleased:
            number, incarnation, last = self._unreleased[0]
            if incarnation in self._nodes and self._nodes[incarnation].journalled < last:
                break
            trimmed = number
            self._unreleased.popleft()
        if trimmed:
            self._farm.trim(trimmed)

    def _read(self) -> None:
        for number, (batch, events) in self._farm.read(self._read_until):
            self._read_until = number
            incarnation = batch.incarnation
            watched = self._nodes.get(incarnation) or self._introduced(incarnation)
            self._unreleased.append((number, incarnation, batch.last))
            if watched is not None:
                self._is_heard(incarnation, watched)
                self._given.add(incarnation)
                cursor = f"{number}-0"
                self._facts.append(m.BatchRead(incarnation, batch.first, batch.last, cursor))
                self._facts += events

    # --- nodes ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Once a second: who is there, and who has not taken its newest orders."""
        if self._is_closed:
            return
        if not self._farm.is_open:
            self._farm.open_anew()
            self._unreleased.clear()
            for watched in self._nodes.values():
                watched.mailbox.lose_confirmation()
        for incarnation in self._farm.current.values():
            if incarnation not in self._nodes and self._farm.nodes[incarnation].is_reachable:
                self._introduced(incarnation)
        for incarnation, watched in list(self._nodes.items()):
            self._look_at(incarnation, watched)
        self._time.after(_LOOK_EVERY_S, self._look)

    def _look_at(self, incarnation: str, watched: _WatchedNode) -> None:
        node = self._farm.nodes[incarnation]
        if not node.is_reachable:
            watched.silent_s += _LOOK_EVERY_S
            if watched.silent_s > self._farm.faults.settings.lease_s and not watched.is_away:
                watched.is_away = True
                self._facts.append(m.NodeLost(incarnation, "its lease ran out"))
            return
        self._is_heard(incarnation, watched)
        node.forget(watched.journalled)
        mailbox = watched.mailbox
        mailbox.confirm(*node.taken)
        if not watched.takes_orders:
            return
        if mailbox.is_changed or mailbox.is_outdated:
            self._farm.mail(mailbox.next_assignment())
        elif watched.is_overdue and not mailbox.is_confirmed:
            self._farm.mail(mailbox.same_assignment())
        watched.is_overdue = not mailbox.is_confirmed

    def _is_heard(self, incarnation: str, watched: _WatchedNode) -> None:
        watched.silent_s = 0.0
        if watched.is_away:
            watched.is_away = False
            watched.mailbox.start_over()
            watched.is_new = True
            self._newcomers.append(watched)
            self._facts.append(m.NodeReturned(incarnation))
        withheld = self._farm.nodes[incarnation].withheld
        if withheld != watched.withheld:
            watched.withheld = withheld
            self._facts.append(m.DevicesWithheld(incarnation, dict(withheld)))

    def _introduced(self, incarnation: str) -> _WatchedNode | None:
        """A node is new here, unless it is dead; its incarnation before is dead now."""
        node = self._farm.nodes[incarnation]
        if incarnation in self._dead or self._farm.current[node.node] != incarnation:
            return None
        for other in list(self._nodes):
            if self._farm.nodes[other].node == node.node:
                del self._nodes[other]
                self._dead.add(other)
                dead = m.NodeLost(other, "its node was started again", is_dead=True)
                self._facts.append(dead)
        joined = self._farm.settings.joined(incarnation, node.node, node.withheld)
        watched = self._nodes[incarnation] = self._watched(joined)
        self._facts.append(joined)
        return watched

    def _watched(self, joined: m.NodeJoined) -> _WatchedNode:
        incarnation = joined.incarnation
        mailbox = DesiredState(incarnation, self._term, self._farm.nodes[incarnation].taken[1])
        mailbox.is_changed = self._farm.nodes[incarnation].taken[0] > 0
        watched = _WatchedNode(mailbox, withheld=joined.withheld)
        self._newcomers.append(watched)
        return watched
