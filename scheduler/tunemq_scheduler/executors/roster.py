"""`Roster`: which node incarnations there are, from what they say and from what their leases say.

No I/O: it is told what was read, and collects facts for the runner, commands for Redis and news
for the person at the terminal, which the executor takes from it.
"""

from __future__ import annotations

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

#: A fenced node that comes back within this time learns that it is fenced.
_FENCE_EXPIRES_S: Final = 86_400


class Node(msgspec.Struct):
    """A node incarnation that introduced itself.

    Attributes:
        entry_id: of its introduction in the nodes' stream.
        is_joined: whether the runner was told; not before there is a sign of life.
        journalled: the number of its last event in our stream that stands in the journal.
    """

    hello: m.NodeHello
    entry_id: bytes
    mailbox: Mailbox
    is_joined: bool = False
    journalled: int = 0


class Roster:
    """The living node incarnations, and the memory of dead ones.

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
        self._term = term
        self._buried: set[str] = set()
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
            self._fence(incarnation, "its trials run elsewhere")
            self.commands.append(("XDEL", wire.NODES, entry_id))
            return []
        known = self.nodes.get(incarnation)
        if known is not None:
            if known.entry_id != entry_id:
                self.commands.append(("XDEL", wire.NODES, known.entry_id))
                known.entry_id = entry_id
            return []
        older = [name for name, node in self.nodes.items() if node.hello.node == hello.node]
        self.nodes[incarnation] = Node(hello, entry_id, Mailbox(incarnation, self._term))
        self._leases.watch(incarnation, None)
        return older

    def read_batch(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, int]:
        """State the events of a batch; returns whose they are and the last one's number.

        What is unreadable or from a dead incarnation yields nothing: ``("", 0)``.
        """
        try:
            header = m.decode_header(fields.get(wire.HEADER, b""))
        except msgspec.DecodeError as error:
            self.news.append(f"A batch of events cannot be read ({error}); it is ignored.")
            return "", 0
        incarnation = header.incarnation
        node = self.nodes.get(incarnation)
        if node is None:
            if incarnation in self._buried:
                self._fence(incarnation, "its trials run elsewhere")
            return "", 0
        try:
            events = m.decode_node_events(fields.get(wire.EVENTS, b""))
        except msgspec.DecodeError as error:
            self.lose(incarnation, f"its events cannot be read ({error})")
            return "", 0
        if not node.is_joined:
            self._join(node, header.taken)
        node.mailbox.confirm(*header.taken)
        last = header.first + len(events) - 1
        self.facts.append(m.BatchRead(incarnation, header.first, last, entry_id.decode()))
        self.facts += events
        return incarnation, last

    def lease_keys(self) -> list[str]:
        """The keys whose values `read_leases` wants, in order."""
        return [wire.lease(incarnation) for incarnation in self.nodes]

    def read_leases(self, now: float, values: Sequence[bytes | None]) -> None:
        """Compare leases with those of the last look, at ``now`` of a monotonic clock."""
        leases = dict(zip(self.nodes, values, strict=True))
        renewed, lost = self._leases.look(now, leases)
        for incarnation in renewed:
            node, taken = self.nodes[incarnation], _taken(leases[incarnation])
            if not node.is_joined:
                self._join(node, taken)
            node.mailbox.confirm(*taken)
            node.mailbox.renewals_unconfirmed += not node.mailbox.is_confirmed
        for incarnation in lost:
            self.lose(incarnation, f"its lease was not renewed for {wire.LEASE_TTL_S:g} s")

    def journalled(self, accepted: Mapping[str, int]) -> None:
        """Tell nodes how far their events, by incarnation, are journalled."""
        for incarnation, last in accepted.items():
            node = self.nodes.get(incarnation)
            if node is not None and last > node.journalled:
                node.journalled = last
                self.commands.append(self._reply(incarnation, last))

    def over(self, incarnation: str) -> None:
        """Tell a node that nobody wants what it still has to say of our experiment."""
        self.commands.append(self._reply(incarnation, wire.EVERYTHING))

    def start_anew(self) -> None:
        """Redis was away: silence meanwhile proves nothing, and what we told may be forgotten."""
        self._leases.start_anew()
        for incarnation, node in self.nodes.items():
            journalled = self._reply(incarnation, node.journalled)
            self.commands.append((*journalled, "v", node.mailbox.stamp))

    def lose(self, incarnation: str, reason: str) -> None:
        """An incarnation is gone: say so, and see to it that it stays so."""
        node = self.nodes.get(incarnation)
        if node is not None:
            if node.is_joined:
                self.facts.append(m.NodeLost(incarnation, reason))
            self.bury(incarnation, reason)

    def bury(self, incarnation: str, reason: str) -> None:
        """Forget a lost incarnation and what is its own in Redis; fence it should it come back."""
        node = self.nodes.pop(incarnation, None)
        if node is None:
            return
        self._buried.add(incarnation)
        self._leases.forget(incarnation)
        self._fence(incarnation, reason)
        self.commands += (
            ("DEL", wire.queue(incarnation)),
            ("XDEL", wire.NODES, node.entry_id),
        )

    def _join(self, node: Node, taken: tuple[int, int]) -> None:
        term, version = taken
        node.mailbox = Mailbox(node.hello.incarnation, self._term, version)
        # It obeyed somebody before: it must learn that nothing of that counts any longer.
        node.mailbox.is_changed = term > 0
        node.is_joined = True
        self.facts.append(joined(node.hello))

    def _reply(self, incarnation: str, journalled: int) -> tuple[str, ...]:
        field = wire.journalled(self.events_key)
        return "HSET", wire.reply(incarnation), field, str(journalled)

    def _fence(self, incarnation: str, reason: str) -> None:
        reply = wire.reply(incarnation)
        self.commands += (
            ("HSET", reply, "f", reason),
            ("EXPIRE", reply, str(_FENCE_EXPIRES_S)),
        )


def _taken(lease: bytes | None) -> tuple[int, int]:
    """The (term, version) that a lease says its node has taken."""
    try:
        _, term, version = (lease or b"").split(b":")
        return int(term), int(version)
    except ValueError:
        return 0, 0
