"""One experiment's channel: its events from the nodes, and how far it has read each node.

Pure, like `NodeRegistry`, which drives all channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from tunemq_scheduler.transport.deregistered_nodes import place_of
from tunemq_scheduler.transport.desired_state import DesiredTrials
from tunemq_scheduler.transport.event_batches import ReadEvent
from tunemq_shared.protocol import messages as m

#: A node that omits the same events this often does not have them.
_GAPS_AT_MOST: Final = 5
#: The greatest second part of an entry's id.
_GREATEST: Final = 2**64 - 1


class NodeCursor(msgspec.Struct):
    """An experiment's position in the events of a node instance that it knows.

    Attributes:
        orders: the experiment's orders for that node.
        acknowledged_up_to: the number of the node's last journalled event.
        ack_sent: the last event number that this scheduler acknowledged to the node.
        read: the number of the last event read; 0 before the first.
        gap_behind: the last event before a gap, and how often the gap was seen.
        is_away: whether the experiment was informed that the node is lost.
        withheld: the devices that the experiment considers withheld, with reasons.
        is_ending: whether the experiment was informed that the node was told to end.
    """

    orders: DesiredTrials
    acknowledged_up_to: int = 0
    ack_sent: int = 0
    read: int = 0
    gap_behind: tuple[int, int] = (0, 0)
    is_away: bool = False
    withheld: Mapping[str, str] = {}
    is_ending: bool = False


class ExperimentChannel:
    """The event channel of one experiment.

    Args:
        events_key: the key of its stream.
    """

    def __init__(self, events_key: str) -> None:
        self.events_key = events_key
        #: Events that the experiment has not taken yet, and the number of those it has.
        self.read_events: list[ReadEvent] = []
        self.given = 0
        #: Cursors by node instance, for the nodes that the experiment knows and that are not dead.
        self.cursors: dict[str, NodeCursor] = {}
        #: Whether the experiment takes no events at present; `poll` does not wait for it.
        self.is_full = False
        #: Whether events are missing in the stream: it must restart, and nodes send all again.
        self.has_gap = False
        #: Whether it can restart without its trial processes; else nodes that lack events are lost.
        self.can_restart = False
        #: The name of a node that has deleted events which this channel lacks; empty if none has.
        self.incomplete_node = ""
        #: Unknown nodes of which a batch other than the first was ignored.
        self.beheaded: set[str] = set()
        #: Nodes that wait for orders until the experiment has handled this many events.
        self._unsettled: dict[str, int] = {}
        #: Entries read but not journalled: id, node instance, number of the last event.
        self._unacknowledged: deque[tuple[bytes, str, int]] = deque()

    @property
    def num_events(self) -> int:
        """How many events there were in total."""
        return self.given + len(self.read_events)

    def take(self) -> list[ReadEvent]:
        """Return the events that the experiment has not taken yet."""
        read_events, self.read_events = self.read_events, []
        self.given += len(read_events)
        return read_events

    # --- nodes ------------------------------------------------------------------------------------

    def knows(
        self, about: m.NodeJoined, orders: DesiredTrials, acknowledged_up_to: int, *, is_away: bool
    ) -> None:
        """Add a node that the experiment already knows and will send orders for.

        Args:
            about: the node as the experiment knows it.
            orders: the experiment's orders for that node.
            acknowledged_up_to: the node's last journalled event; the node may not know this yet.
            is_away: whether the experiment considers the node lost.
        """
        instance_id = about.instance_id
        orders.start_over()
        self.cursors[instance_id] = NodeCursor(
            orders,
            acknowledged_up_to,
            read=acknowledged_up_to,
            is_away=is_away,
            withheld=about.withheld,
            is_ending=about.is_ending,
        )
        self._unsettled[instance_id] = self.num_events

    def hears(self, about: m.NodeJoined, orders: DesiredTrials) -> None:
        """Record that a node is alive: it is new, back, or was expected."""
        instance_id = about.instance_id
        cursor = self.cursors.get(instance_id)
        if cursor is None:
            self.cursors[instance_id] = NodeCursor(
                orders, withheld=about.withheld, is_ending=about.is_ending
            )
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
        """Report a change of what a node withholds; for a lost node, once it is back."""
        cursor = self.cursors.get(about.instance_id)
        if cursor is None or cursor.is_away:
            return
        now = about.withheld, about.is_ending
        if (cursor.withheld, cursor.is_ending) != now:
            cursor.withheld, cursor.is_ending = now
            self.read_events.append(
                m.DevicesWithheld(about.instance_id, dict(about.withheld), about.is_ending)
            )

    def lost(self, instance_id: str, reason: str, *, is_dead: bool, is_shared: bool) -> None:
        """Report a lost node that the experiment knows: once, and once more if it is dead.

        Args:
            instance_id: the node instance.
            reason: why it is lost.
            is_dead: whether it cannot come back.
            is_shared: whether trials of other experiments were, or may have been, on it.
        """
        cursor = self.cursors.get(instance_id)
        if cursor is not None and (is_dead or not cursor.is_away):
            cursor.is_away = True
            self.read_events.append(m.NodeLost(instance_id, reason, is_dead, is_shared))

    def settle(self, events_handled: int | None = None) -> None:
        """Mark the orders that follow from the first events as complete.

        Args:
            events_handled: how many events; by default, all that were taken.
        """
        if events_handled is None:
            events_handled = self.given
        for instance_id, number in list(self._unsettled.items()):
            if number <= events_handled:
                del self._unsettled[instance_id]
                if (cursor := self.cursors.get(instance_id)) is not None:
                    cursor.orders.settle()

    # --- its stream -------------------------------------------------------------------------------

    def is_gap(self, cursor: NodeCursor, first: int) -> bool:
        """Return whether to ignore a batch because earlier ones were lost in Redis.

        This marks the stream as having a gap, unless the same events stay missing after several
        resends: then the node does not have them.
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
        """Record an entry, with events up to ``last``, that is not journalled yet.

        Of rejected entries, which have no instance, only the newest counts: anyone may write them.
        """
        if not instance_id and self._unacknowledged and not self._unacknowledged[-1][1]:
            self._unacknowledged.pop()
        self._unacknowledged.append((entry_id, instance_id, last))

    def reread(self) -> None:
        """Prepare to read the stream from its beginning again."""
        self.has_gap = False
        self.beheaded.clear()
        self._unacknowledged.clear()

    def trim(self) -> tuple[str, ...] | None:
        """Return the command that removes journalled entries; None if there are none."""
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
