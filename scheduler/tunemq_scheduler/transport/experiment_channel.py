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
    """What an experiment has to do with a node incarnation that it was told of.

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
    journalled: int = 0
    told: int = 0
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
        self.facts: list[ReadEvent] = []
        self.given = 0
        #: By the incarnations of the nodes that it was told of, and that are not dead.
        self.stakes: dict[str, NodeCursor] = {}
        #: Whether it takes no facts for now: nobody waits for it.
        self.is_full = False
        #: Whether events are missing in its stream: it must begin anew, and all is sent again.
        self.has_gap = False
        #: Nodes that it was not told of, and of which a batch was ignored that is not the first.
        self.beheaded: set[str] = set()
        #: Nodes that wait for its orders: until it has handled so many facts.
        self._unsettled: dict[str, int] = {}
        #: Entries that were read and are not journalled yet: id, incarnation, number of the last
        #: event.
        self._unreleased: deque[tuple[bytes, str, int]] = deque()

    @property
    def stated(self) -> int:
        """How many facts there were, all in all."""
        return self.given + len(self.facts)

    def take(self) -> list[ReadEvent]:
        """The facts that it was not given yet."""
        facts, self.facts = self.facts, []
        self.given += len(facts)
        return facts

    # --- nodes ------------------------------------------------------------------------------------

    def knows(
        self, about: m.NodeJoined, orders: DesiredTrials, journalled: int, *, is_away: bool
    ) -> None:
        """It knows a node, and is about to say what that is to host.

        Args:
            about: the node, as it takes it to be.
            journalled: how far the node's events are; it may not have been told.
            is_away: it takes the node for lost.
        """
        incarnation = about.incarnation
        orders.start_over()
        self.stakes[incarnation] = NodeCursor(
            orders, journalled, read=journalled, is_away=is_away, withheld=about.withheld
        )
        self._unsettled[incarnation] = self.stated

    def hears(self, about: m.NodeJoined, orders: DesiredTrials) -> None:
        """A node is there; it may be new, back, or one that was expected."""
        incarnation = about.incarnation
        stake = self.stakes.get(incarnation)
        if stake is None:
            self.stakes[incarnation] = NodeCursor(orders, withheld=about.withheld)
            self.facts.append(about)
            if incarnation in self.beheaded:
                self.beheaded.discard(incarnation)
                self.has_gap = True
        elif stake.is_away:
            stake.is_away = False
            orders.start_over()
            self.facts.append(m.NodeReturned(incarnation))
        else:
            return
        if orders.waits:
            self._unsettled[incarnation] = self.stated

    def sees(self, about: m.NodeJoined) -> None:
        """Which devices of a node are withheld, if that is news; of a lost one once it is back."""
        stake = self.stakes.get(about.incarnation)
        if stake is not None and not stake.is_away and stake.withheld != about.withheld:
            stake.withheld = about.withheld
            self.facts.append(m.DevicesWithheld(about.incarnation, dict(about.withheld)))

    def lost(self, incarnation: str, reason: str, *, is_dead: bool, is_shared: bool) -> None:
        """A node is lost, if it was ever told of it; once, and once more if it is dead.

        Args:
            is_shared: trials of other experiments were on it, or may have been.
        """
        stake = self.stakes.get(incarnation)
        if stake is not None and (is_dead or not stake.is_away):
            stake.is_away = True
            self.facts.append(m.NodeLost(incarnation, reason, is_dead, is_shared))

    def settle(self, handled: int) -> None:
        """It has handled so many facts, and all that follows from them is in its orders."""
        for incarnation, number in list(self._unsettled.items()):
            if number <= handled:
                del self._unsettled[incarnation]
                if (stake := self.stakes.get(incarnation)) is not None:
                    stake.orders.settle()

    # --- its stream -------------------------------------------------------------------------------

    def is_gap(self, stake: NodeCursor, first: int) -> bool:
        """Whether to ignore a batch, because others before it got lost in Redis.

        Then the stream has a gap; but not where they are missing however often all is sent again:
        the node does not have them.
        """
        if first <= stake.read + 1:
            return False
        if not self.has_gap:
            behind, times = stake.gap_behind
            times = times + 1 if behind == stake.read else 1
            stake.gap_behind = stake.read, times
            self.has_gap = times <= _GAPS_AT_MOST
        return True

    def was_read(self, entry_id: bytes, incarnation: str, last: int) -> None:
        """An entry with events up to that number waits to be journalled."""
        self._unreleased.append((entry_id, incarnation, last))

    def reread(self) -> None:
        """Its stream is read from the beginning again."""
        self.has_gap = False
        self.beheaded.clear()
        self._unreleased.clear()

    def trim(self) -> tuple[str, ...] | None:
        """What removes entries whose events are journalled; None where there are none."""
        behind = b""
        while self._unreleased:
            entry_id, incarnation, last = self._unreleased[0]
            stake = self.stakes.get(incarnation)
            if stake is not None and stake.journalled < last:
                break
            behind = entry_id
            self._unreleased.popleft()
        if not behind:
            return None
        milliseconds, number = place_of(behind)
        after = (milliseconds, number + 1) if number < _GREATEST else (milliseconds + 1, 0)
        return "XTRIM", self.events_key, "MINID", "{}-{}".format(*after)
