"""`Roster`: which node incarnations there are, from what they say and from what their leases say.

No I/O: it is told what was read, and collects facts for the runner, commands for Redis and news
for the person at the terminal, which the executor takes from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tunemq_scheduler.executors.hellos import joined, read_hello
from tunemq_scheduler.executors.lease_watch import LeaseWatch
from tunemq_scheduler.executors.mailbox import Mailbox
from tunemq_scheduler.executors.redis_line import Command
from tunemq_shared import messages as m
from tunemq_shared import wire
from tunemq_shared.errors import WireError
from tunemq_shared.introductions import decode_header

#: A lost incarnation that is not heard for so long will not be heard again.
_AWAY_AT_MOST_S: Final = float(wire.REPLY_TTL_S)

#: A node that leaves out the same events so often does not have them.
_GAPS_AT_MOST: Final = 5


class Node(msgspec.Struct):
    """A node incarnation that introduced itself.

    Attributes:
        entry_id: of its introduction in the nodes' stream; empty where that was not read yet.
        is_joined: whether the runner was told; not before there is a sign of life.
        journalled: the number of its last event in our stream that stands in the journal.
        told: up to which number it was told so, by this scheduler.
        read: the number of its last event that was read; 0 before the first.
        gap_behind: what was read when events behind it were missing, and how often that was so.
        is_heard: whether it is there, as far as we know: orders make sense.
        away_since: when it was lost, by our monotonic clock; None while it is not.
        waits: whether it gets no orders, because the runner has not said yet what they are.
    """

    about: m.NodeJoined
    entry_id: bytes
    mailbox: Mailbox
    is_joined: bool = False
    journalled: int = 0
    told: int = 0
    read: int = 0
    gap_behind: tuple[int, int] = (0, 0)
    is_heard: bool = False
    away_since: float | None = None
    waits: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether a sign of life of it makes it usable at once."""
        return not self.is_heard and self.away_since is None

    @property
    def takes_orders(self) -> bool:
        """Whether to send it assignments."""
        return self.is_joined and self.is_heard and not self.waits


class Roster:
    """The node incarnations that live or may live, and the memory of dead ones.

    One whose lease runs out is *away*, not dead: it may be cut off. It is listened for, and with
    its first sign of life it is back; what it is to host then is the runner's to say. It is dead
    when its node was started again, or took its leave, or sends what cannot be read. Then it is
    buried: fenced, should it ever come back.

    Args:
        term: the scheduler's, for assignments.
    """

    def __init__(self, term: int) -> None:
        self.nodes: dict[str, Node] = {}
        self.facts: list[m.Event] = []
        self.commands: list[Command] = []
        self.news: list[str] = []
        #: The key of our stream; set when the experiment is known.
        self.events_key = ""
        #: Whether events are missing in the stream: it must begin anew, and all is sent again.
        self.has_gap = False
        self._term = term
        #: Dead incarnations, and what they are told should they be heard again.
        self._buried: dict[str, str] = {}
        #: The monotonic clock at the last look.
        self._now = 0.0
        self._leases = LeaseWatch()

    def read_hello(self, entry_id: bytes, data: bytes) -> list[str]:
        """Take note of an introduction; returns the incarnations whose place the node takes."""
        try:
            hello = read_hello(data)
        except WireError as error:
            self.news.append(str(error))
            self.commands.append(("XDEL", wire.NODES, entry_id))
            return []
        incarnation = hello.incarnation
        if incarnation in self._buried:
            self._fence(incarnation, self._buried[incarnation])
            self.commands.append(("XDEL", wire.NODES, entry_id))
            return []
        known = self.nodes.get(incarnation)
        if known is not None:
            if known.entry_id and known.entry_id != entry_id:
                self.commands.append(("XDEL", wire.NODES, known.entry_id))
            known.entry_id = entry_id
        else:
            self.nodes[incarnation] = Node(
                joined(hello), entry_id, Mailbox(incarnation, self._term)
            )
            self._leases.watch(incarnation, None)
        return [
            name
            for name, node in self.nodes.items()
            if node.about.node == hello.node and place_of(node.entry_id) < place_of(entry_id)
        ]

    def read_goodbye(self, entry_id: bytes, data: bytes) -> str:
        """Take note of a goodbye; returns whose it is."""
        self.commands.append(("XDEL", wire.NODES, entry_id))
        return data.decode(errors="replace")

    def expect(
        self, about: m.NodeJoined, journalled: int, *, away_since: float | None = None
    ) -> None:
        """The runner knows this node, from a scheduler that went before us.

        Args:
            journalled: how far its events are; it may not have been told.
            away_since: it was lost then; from when on its absence counts, by the clock of looks.
        """
        node = Node(about, b"", Mailbox(about.incarnation, self._term), is_joined=True)
        node.journalled = node.read = journalled
        self.nodes[about.incarnation] = node
        self._leases.watch(about.incarnation, None)
        if away_since is not None:
            node.away_since = away_since
            self._leases.put_away(about.incarnation)

    def read_batch(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, int]:
        """State the events of a batch; returns whose they are and the last one's number.

        What is unreadable or from a dead incarnation yields nothing: ``("", 0)``.
        """
        try:
            header = decode_header(fields.get(wire.HEADER, b""))
        except msgspec.DecodeError as error:
            self.news.append(f"A batch of events cannot be read ({error}); it is ignored.")
            return "", 0
        incarnation = header.incarnation
        node = self.nodes.get(incarnation)
        if node is None:
            if incarnation in self._buried:
                self._fence(incarnation, self._buried[incarnation])
            return "", 0
        try:
            events = m.decode_node_events(fields.get(wire.EVENTS, b""))
        except msgspec.DecodeError as error:
            self.lose(incarnation, f"its events cannot be read ({error})", is_dead=True)
            return "", 0
        last = header.first + len(events) - 1
        if not node.is_heard and last <= node.journalled:
            return incarnation, last  # old: no sign of life
        if self._is_gap(node, header.first):
            return "", 0
        node.read = max(node.read, last)
        self._hear(node, header.taken)
        self.facts.append(m.BatchRead(incarnation, header.first, last, entry_id.decode()))
        self.facts += events
        return incarnation, last

    def _is_gap(self, node: Node, first: int) -> bool:
        """Whether to ignore a batch, because others before it got lost in Redis.

        Where they are missing however often all is sent again, it is the loop's to say so.
        """
        if not node.read or first <= node.read + 1:
            return False
        if not self.has_gap:
            behind, times = node.gap_behind
            times = times + 1 if behind == node.read else 1
            node.gap_behind = node.read, times
            self.has_gap = times <= _GAPS_AT_MOST
        return self.has_gap

    def lease_keys(self) -> list[str]:
        """The keys whose values `read_leases` wants, in order."""
        return [wire.lease(incarnation) for incarnation in self.nodes]

    def read_leases(self, now: float, values: Sequence[bytes | None]) -> None:
        """Compare leases with those of the last look, at ``now`` of a monotonic clock."""
        self._now = now
        leases = dict(zip(self.nodes, values, strict=True))
        renewed, lost = self._leases.look(now, leases)
        for incarnation in renewed:
            node = self.nodes[incarnation]
            self._hear(node, _taken(leases[incarnation]))
            node.mailbox.renewals_unconfirmed += not node.mailbox.is_confirmed
        for incarnation in lost:
            self.lose(incarnation, f"its lease was not renewed for {wire.LEASE_TTL_S:g} s")
        for incarnation in self._never_to_return():
            self.lose(incarnation, "it was not heard for too long", is_dead=True)

    def settle(self) -> None:
        """The runner has handled all facts that it was given, and its orders are in."""
        told = {fact.incarnation for fact in self.facts if isinstance(fact, m.NodeReturned)}
        for incarnation, node in self.nodes.items():
            if node.waits and incarnation not in told:
                node.waits, node.mailbox.is_changed = False, True

    def journalled(self, accepted: Mapping[str, int]) -> None:
        """Tell nodes how far their events, by incarnation, are journalled."""
        for incarnation, last in accepted.items():
            node = self.nodes.get(incarnation)
            if node is not None and last > node.told:
                node.journalled = node.told = last
                self.commands.append(self._reply(incarnation, last))

    def over(self, incarnation: str) -> None:
        """Tell a node that nobody wants what it still has to say of our experiment."""
        self.commands += (self._reply(incarnation, wire.EVERYTHING), self.expiry(incarnation))

    def forget_silence(self) -> None:
        """Redis takes no leases now: silence proves nothing."""
        self._leases.start_anew()

    def begin_anew(self) -> None:
        """The wire has a new generation, and may know nothing of what we told."""
        self.has_gap = False
        # Where a clock was set back, numbers of old entries may be those of new ones.
        self.commands = [one for one in self.commands if one[0] not in {"XTRIM", "XDEL"}]
        self.start_anew()
        for node in self.nodes.values():
            node.mailbox.lose_confirmation()

    def start_anew(self) -> None:
        """Redis was away: silence meanwhile proves nothing, and what we told may be forgotten."""
        self._leases.start_anew()
        for incarnation, node in self.nodes.items():
            self.commands.append(self._reply(incarnation, node.told))
            if node.mailbox.version:  # else it would wait for mail that nobody has sent
                stamp = node.mailbox.stamp
                self.commands.append(("HSET", wire.reply(incarnation), "v", stamp))
            self.commands.append(self.expiry(incarnation))

    def lose(self, incarnation: str, reason: str, *, is_dead: bool = False) -> None:
        """An incarnation is not heard any more; say so, once.

        Args:
            is_dead: it will not be heard again; see to it that it stays so.
        """
        node = self.nodes.get(incarnation)
        if node is None or (node.away_since is not None and not is_dead):
            return
        if node.is_joined:
            self.facts.append(m.NodeLost(incarnation, reason, is_dead))
            if node.away_since is None:
                where = f"Node {node.about.node} ({node.about.hostname})"
                self.news.append(f"{where} is lost: {reason}.")
        if is_dead:
            self.bury(incarnation, reason)
            return
        node.is_heard, node.away_since, node.waits = False, self._now, False
        self._leases.put_away(incarnation)
        # What waits there is of yesterday; should it be back, it is told everything anew.
        self.commands.append(("DEL", wire.queue(incarnation)))

    def bury(self, incarnation: str, reason: str) -> None:
        """Forget a lost incarnation and what is its own in Redis; fence it should it come back."""
        node = self.nodes.pop(incarnation, None)
        if node is None:
            return
        self._buried[incarnation] = reason
        self._leases.forget(incarnation)
        self._fence(incarnation, self._buried[incarnation])
        self.commands.append(("DEL", wire.queue(incarnation)))
        if node.entry_id:
            self.commands.append(("XDEL", wire.NODES, node.entry_id))

    def _hear(self, node: Node, taken: tuple[int, int]) -> None:
        """A sign of life, which says what assignment the node has taken."""
        if not node.is_joined:
            self._join(node, taken)
        elif node.away_since is not None:
            self._take_back(node)
        elif not node.is_heard:  # expected; we have orders for it, of a term of our own
            node.mailbox.is_changed = True
        node.is_heard = True
        node.mailbox.confirm(*taken)
        if 0 < taken[0] < self._term:  # whoever we replaced may have slept, and given orders since
            node.mailbox.is_changed = True

    def _join(self, node: Node, taken: tuple[int, int]) -> None:
        term, version = taken
        if node.away_since is not None:
            node.away_since = None
            self._leases.watch(node.about.incarnation, None)
        node.mailbox = Mailbox(node.about.incarnation, self._term, version)
        # It obeyed somebody before: it must learn that nothing of that counts any longer.
        node.mailbox.is_changed = term > 0
        node.is_joined = True
        self.facts.append(node.about)

    def _take_back(self, node: Node) -> None:
        incarnation = node.about.incarnation
        away_s = self._now - (node.away_since or 0.0)
        node.away_since, node.waits = None, True
        self._leases.watch(incarnation, None)
        node.mailbox.start_over()
        self.facts.append(m.NodeReturned(incarnation))
        where = f"Node {node.about.node} ({node.about.hostname})"
        self.news.append(f"{where} is back after {away_s:.0f} s.")

    def _never_to_return(self) -> list[str]:
        return [
            incarnation
            for incarnation, node in self.nodes.items()
            if node.away_since is not None and self._now > node.away_since + _AWAY_AT_MOST_S
        ]

    def _reply(self, incarnation: str, journalled: int) -> tuple[str, ...]:
        field = wire.journalled(self.events_key)
        return "HSET", wire.reply(incarnation), field, str(journalled)

    @staticmethod
    def expiry(incarnation: str) -> tuple[str, ...]:
        """A reply outlives its node for a while only; the node itself puts that off."""
        return "EXPIRE", wire.reply(incarnation), str(wire.REPLY_TTL_S)

    def _fence(self, incarnation: str, reason: str) -> None:
        fenced = "HSET", wire.reply(incarnation), "f", reason
        self.commands += (fenced, self.expiry(incarnation))


def place_of(entry_id: bytes) -> tuple[int, int]:
    """An entry's place in its stream; one that was not read yet is in front of none."""
    if not entry_id:
        return sys.maxsize, 0
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _taken(lease: bytes | None) -> tuple[int, int]:
    """The (term, version) that a lease says its node has taken."""
    try:
        _, term, version = (lease or b"").split(b":")
        return int(term), int(version)
    except ValueError:
        return 0, 0
