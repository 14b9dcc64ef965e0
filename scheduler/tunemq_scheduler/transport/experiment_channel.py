"""One experiment on the transport: what it hears of nodes, and how far it has read each.

Pure, as `NodeRegistry`, which tells all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from tunemq_scheduler.transport.departures import place_of
from tunemq_scheduler.transport.desired_state import DesiredTrials
from tunemq_scheduler.transport.node_batches import ReadEvent
from tunemq_shared.protocol import messages as m

#: A node that leaves out the same events so often does not have them.
_GAPS_AT_MOST: Final = 5
#: The second part of an entry's id.
_GREATEST: Final = 2**64 - 1


class NodeCursor(msgspec.Struct):
    """What an experiment has to do with a node instance that it was told of.

    Attributes:
        orders: its own for that node.
        journalled: the number of the node's last event in its stream that stands in its journal.
        told: up to which number the node was told so, by this scheduler.
        read: the number of the last event that was read; 0 before the first.
        gap_behind: what was read when events behind it were missing, and how often that was so.
        is_away: whether it was told that the node is lost.
        withheld: the devices that it takes for withheld, and why.
    """

    orders: DesiredTrials
    acknowledged_up_to: int = 0
    ack_sent: int = 0
    read: int = 0
    gap_behind: tuple[int, int] = (0, 0)
    is_away: bool = False
    withheld: Mapping[str, str] = {}


class ExperimentChannel:
    """An experiment that nodes work for.

    Args:
        events_key: of its stream.
    """

    def __init__(self, events_key: str) -> None:
        self.events_key = events_key
        #: What it was not given yet; and how many it was given.
        self.read_events: list[ReadEvent] = []
        self.given = 0
        #: By the instances of the nodes that it was told of, and that are not dead.
        self.cursors: dict[str, NodeCursor] = {}
        #: Whether it takes no facts for now: nobody waits for it.
        self.is_full = False
        #: Whether events are missing in its stream: it must begin anew, and all is sent again.
        self.has_gap = False
        #: Nodes that it was not told of, and of which a batch was ignored that is not the first.
        self.beheaded: set[str] = set()
        #: Nodes that wait for its orders: until it has handled so many facts.
        self._unsettled: dict[str, int] = {}
        #: Entries that were read and are not journalled yet: id, attempt, number of the last
        #: event.
        self._unacknowledged: deque[tuple[bytes, str, int]] = deque()

    @property
    def num_events(self) -> int:
        """How many facts there were, all in all."""
        return self.given + len(self.read_events)

    def take(self) -> list[ReadEvent]:
        """The facts that it was not given yet."""
        read_events, self.read_events = self.read_events, []
        self.given += len(read_events)
        return read_events

    # --- nodes ------------------------------------------------------------------------------------

    def knows(
        self, about: m.NodeJoined, orders: DesiredTrials, acknowledged_up_to: int, *, is_away: bool
    ) -> None:
        """It knows a node, and is about to say what that is to host.

        Args:
            about: the node, as it takes it to be.
            journalled: how far the node's events are; it may not have been told.
            is_away: it takes the node for lost.
        """
        instance_id = about.instance_id
        orders.start_over()
        self.cursors[instance_id] = NodeCursor(
            orders,
            acknowledged_up_to,
            read=acknowledged_up_to,
            is_away=is_away,
            withheld=about.withheld,
        )
        self._unsettled[instance_id] = self.num_events

    def hears(self, about: m.NodeJoined, orders: DesiredTrials) -> None:
        """A node is there; it may be new, back, or one that was expected."""
        instance_id = about.instance_id
        cursor = self.cursors.get(instance_id)
        if cursor is None:
            self.cursors[instance_id] = NodeCursor(orders, withheld=about.withheld)
            self.read_events.append(about)
            if instance_id in self.beheaded:
                self.beheaded.discard(instance_id)
                self.has_gap = True
        elif cursor.is_away:
            cursor.is_away = False
            orders.start_over()
            self.read_events.append(m.NodeReturned(instance_id))
        else:
            return
        if orders.waits:
            self._unsettled[instance_id] = self.num_events

    def sees(self, about: m.NodeJoined) -> None:
        """Which devices of a node are withheld, if that is news; of a lost one once it is back."""
        cursor = self.cursors.get(about.instance_id)
        if cursor is not None and not cursor.is_away and cursor.withheld != about.withheld:
            cursor.withheld = about.withheld
            self.read_events.append(m.DevicesWithheld(about.instance_id, dict(about.withheld)))

    def lost(self, instance_id: str, reason: str, *, is_dead: bool, is_shared: bool) -> None:
        """A node is lost, if it was ever told of it; once, and once more if it is dead.

        Args:
            is_shared: trials of other experiments were on it, or may have been.
        """
        cursor = self.cursors.get(instance_id)
        if cursor is not None and (is_dead or not cursor.is_away):
            cursor.is_away = True
            self.read_events.append(m.NodeLost(instance_id, reason, is_dead, is_shared))

    def settle(self, events_handled: int) -> None:
        """It has handled so many facts, and all that follows from them is in its orders."""
        for instance_id, number in list(self._unsettled.items()):
            if number <= events_handled:
                del self._unsettled[instance_id]
                if (cursor := self.cursors.get(instance_id)) is not None:
                    cursor.orders.settle()

    # --- its stream -------------------------------------------------------------------------------

    def is_gap(self, cursor: NodeCursor, first: int) -> bool:
        """Whether to ignore a batch, because others before it got lost in Redis.

        Then the stream has a gap; but not where they are missing however often all is sent again:
        the node does not have them.
        """
        if first <= cursor.read + 1:
            return False
        if not self.has_gap:
            behind, times = cursor.gap_behind
            times = times + 1 if behind == cursor.read else 1
            cursor.gap_behind = cursor.read, times
            self.has_gap = times <= _GAPS_AT_MOST
        return True

    def was_read(self, entry_id: bytes, instance_id: str, last: int) -> None:
        """An entry with events up to that number waits to be journalled."""
        self._unacknowledged.append((entry_id, instance_id, last))

    def reread(self) -> None:
        """Its stream is read from the beginning again."""
        self.has_gap = False
        self.beheaded.clear()
        self._unacknowledged.clear()

    def trim(self) -> tuple[str, ...] | None:
        """What removes entries whose events are journalled; None where there are none."""
        behind = b""
        while self._unacknowledged:
            entry_id, instance_id, last = self._unacknowledged[0]
            cursor = self.cursors.get(instance_id)
            if cursor is not None and cursor.acknowledged_up_to < last:
                break
            behind = entry_id
            self._unacknowledged.popleft()
        if not behind:
            return None
        milliseconds, number = place_of(behind)
        after = (milliseconds, number + 1) if number < _GREATEST else (milliseconds + 1, 0)
        return "XTRIM", self.events_key, "MINID", "{}-{}".format(*after)
