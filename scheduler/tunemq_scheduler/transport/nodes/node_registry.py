"""Which node incarnations there are, from what they say and from what their leases say.

No I/O: it is told what was read, and collects facts for the experiments (its tenants), commands for
Redis and news for the person at the terminal, which the wire takes from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tunemq_scheduler.transport.departures import place_of
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.node_batches import EventBatch, count_of
from tunemq_scheduler.transport.nodes.lease_watch import LeaseWatch
from tunemq_scheduler.transport.nodes.registration_checks import (
    joined,
    read_hello,
    told_of_withheld,
)
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.base.errors import TransportError
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeMetrics, decode_vitals
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import is_possible
from tunemq_shared.protocol.registration import decode_header
from tunemq_shared.protocol.rejections import RejectionCounter

#: A lost incarnation that is not heard for so long will not be heard again.
_AWAY_AT_MOST_S: Final = float(redis_keys.REPLY_TTL_S)
#: So many dead incarnations are remembered, the newest.
_BURIED_AT_MOST: Final = 10_000
#: Of a batch that yields nothing: whose it is, and the number of its last event.
NOBODYS: Final = ("", 0)


class RegisteredNode(msgspec.Struct):
    """A node incarnation that introduced itself.

    Attributes:
        entry_id: of its introduction in the nodes' stream; empty where that was not read yet.
        is_joined: whether anybody was told of it; not before there is a sign of life.
        is_heard: whether it is there, as far as we know: orders make sense.
        away_since: when it was lost, by our monotonic clock; None while it is not.
        retired: why it is to end, if somebody wants that.
        vitals: what it said last of its machine.
        began: when it did, by its own clock; 0 where its introduction was not read yet.
        number: of that introduction.
    """

    about: m.NodeJoined
    entry_id: bytes
    mailbox: DesiredState
    is_joined: bool = False
    is_heard: bool = False
    away_since: float | None = None
    retired: str = ""
    vitals: NodeMetrics = NodeMetrics()
    began: float = 0.0
    number: int = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a sign of life of it makes it usable at once."""
        return not self.is_heard and self.away_since is None

    @property
    def takes_orders(self) -> bool:
        """Whether to send it assignments."""
        return self.is_joined and self.is_heard and not self.mailbox.says_nothing


class NodeRegistry:
    """The node incarnations that live or may live, and the memory of dead ones.

    One whose lease runs out is *away*, not dead: it may be cut off. It is listened for, and with
    its first sign of life it is back; what it is to host then is each tenant's to say. It is dead
    when its node was started again, or took its leave. Then it is buried: fenced, should it ever
    come back.

    Args:
        term: the scheduler's, for assignments.
        absent: the experiments, by the keys of their events, of which nodes may host something
            that we have not said.
        refusals: counts what was sealed by a node, and is of no use all the same.
        store: the farm's, which each node is to try once.
    """

    def __init__(
        self,
        term: int,
        absent: Iterable[str] = (),
        refusals: RejectionCounter | None = None,
        store: str = "",
    ) -> None:
        self.nodes: dict[str, RegisteredNode] = {}
        #: By the keys of their events.
        self.tenants: dict[str, ExperimentChannel] = {}
        self.absent = set(absent)
        self.commands: list[RedisCommand] = []
        self.news: list[str] = []
        self._term, self._store = term, store
        self.refusals = RejectionCounter() if refusals is None else refusals
        #: Dead incarnations, and what they are told should they be heard again.
        self._buried: dict[str, str] = {}
        #: The monotonic clock at the last look.
        self._now = 0.0
        self._leases = LeaseWatch()

    # --- nodes and what they say ------------------------------------------------------------------

    def read_hello(self, entry_id: bytes, data: bytes) -> list[str]:
        """Take note of an introduction; returns the incarnations whose place the node takes."""
        try:
            hello = read_hello(data)
        except TransportError as error:
            self.refusals.add("hello", "version", str(error))
            self.commands.append(("XDEL", redis_keys.NODES, entry_id))
            return []
        incarnation = hello.incarnation
        if incarnation in self._buried:
            self.refusals.add("hello", "dead_node")
            self._fence(incarnation, self._buried[incarnation])
            self.commands.append(("XDEL", redis_keys.NODES, entry_id))
            return []
        known = self.nodes.get(incarnation)
        if known is not None and hello.number < known.number:
            self.refusals.add("hello", "repeated")
            self.commands.append(("XDEL", redis_keys.NODES, entry_id))
            return []
        if known is not None:
            if known.entry_id and known.entry_id != entry_id:
                self.commands.append(("XDEL", redis_keys.NODES, known.entry_id))
            known.entry_id = entry_id
            before, withheld = known.about.withheld, joined(hello).withheld
            known.about = msgspec.structs.replace(known.about, withheld=withheld)
            for tenant in self.tenants.values():
                tenant.sees(known.about)
        else:
            before = {}
            known = RegisteredNode(joined(hello), entry_id, self._mailbox(incarnation))
            self.nodes[incarnation] = known
            self._leases.watch(incarnation, None)
        known.began, known.number = hello.began, hello.number
        self.news += told_of_withheld(known.about, before)
        return [
            name
            for name, node in self.nodes.items()
            if node.about.node == hello.node
            and place_of(node.entry_id) < place_of(entry_id)
            and node.began <= hello.began
        ]

    def read_goodbye(self, entry_id: bytes, data: bytes) -> str:
        """Take note of a goodbye; returns whose it is."""
        self.commands.append(("XDEL", redis_keys.NODES, entry_id))
        return data.decode(errors="replace")

    def read_batch(
        self, tenant: ExperimentChannel, entry_id: bytes, fields: Mapping[bytes, bytes]
    ) -> tuple[str, int]:
        """State the events of a batch; returns whose they are and the last one's number.

        What is unreadable or from a dead incarnation yields nothing: ``("", 0)``.
        """
        try:
            header = decode_header(fields.get(redis_keys.HEADER, b""))
        except UNDECODABLE as error:
            text = f"A batch of events cannot be read ({error}); it is ignored."
            self.refusals.add("events", "unreadable", text)
            return NOBODYS
        incarnation = header.incarnation
        node = self.nodes.get(incarnation)
        if node is None:
            if incarnation in self._buried:
                self._fence(incarnation, self._buried[incarnation])
            self.refusals.add(
                "events", "dead_node" if incarnation in self._buried else "unknown_node"
            )
            return NOBODYS
        # Undecoded: what cannot be read costs the experiment that it is for, not the node.
        payload = fields.get(redis_keys.EVENTS, b"")
        last = header.first + count_of(payload) - 1
        stake = tenant.stakes.get(incarnation)
        if stake is None and (header.first > 1 or not node.is_joined):
            # A copy of what a dead node said; or a living one's, of which what was before is lost,
            # or that shows no lease yet. If it is alive it sends all again once it has joined.
            self.refusals.add("events", "repeated")
            tenant.beheaded.add(incarnation)
            return NOBODYS
        if stake is not None:
            if last <= stake.read:
                self.refusals.add("events", "repeated")
            if not node.is_heard and last <= stake.journalled:
                return incarnation, last  # old: no sign of life
            if tenant.is_gap(stake, header.first):
                if not tenant.has_gap:
                    self.lose(incarnation, "it does not have all of its events", is_dead=True)
                return NOBODYS
        self._hear(node, header.taken)
        stake = tenant.stakes[incarnation]
        stake.read = max(stake.read, last)
        read = m.BatchRead(incarnation, header.first, last, entry_id.decode())
        tenant.facts.append(EventBatch(read, payload))
        return incarnation, last

    def lease_keys(self) -> list[str]:
        """The keys whose values `read_leases` wants, in order."""
        return [redis_keys.lease(incarnation) for incarnation in self.nodes]

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
            self.lose(incarnation, f"its lease was not renewed for {redis_keys.LEASE_TTL_S:g} s")
        for incarnation in self._never_to_return():
            self.lose(incarnation, "it was not heard for too long", is_dead=True)

    def vitals_keys(self) -> list[str]:
        """The keys whose values `read_vitals` wants, in order."""
        return [redis_keys.vitals(incarnation) for incarnation in self.nodes]

    def read_vitals(self, incarnation: str, value: bytes | None) -> None:
        """Take note of what a node says of its machine; what cannot be read matters to nobody."""
        if value is None:
            return
        node = self.nodes[incarnation]
        try:
            vitals = decode_vitals(value)
        except UNDECODABLE:
            self.refusals.add("vitals", "unreadable")
            return
        if vitals.number >= node.vitals.number:
            node.vitals = vitals

    def silence_s(self, incarnation: str) -> float:
        """How long a node was not heard; as far as we looked."""
        node = self.nodes.get(incarnation)
        if node is None or node.away_since is None:
            return self._leases.silence_s(incarnation)
        return redis_keys.LEASE_TTL_S + self._now - node.away_since

    def forget_silence(self) -> None:
        """Redis takes no leases now: silence proves nothing."""
        self._leases.start_anew()

    def begin_anew(self) -> None:
        """The wire has a new generation, and may know nothing of what we told."""
        # Where a clock was set back, numbers of old entries may be those of new ones.
        self.commands = [one for one in self.commands if one[0] not in {"XTRIM", "XDEL"}]
        self.start_anew()
        for tenant in self.tenants.values():
            tenant.reread()
        for node in self.nodes.values():
            node.mailbox.lose_confirmation()

    def start_anew(self) -> None:
        """Redis was away: silence meanwhile proves nothing, and what we told may be forgotten."""
        self._leases.start_anew()
        self.say_again()

    def say_again(self) -> None:
        """Tell nodes once more all that they were told in replies."""
        for incarnation, node in self.nodes.items():
            for tenant in self.tenants.values():
                if (stake := tenant.stakes.get(incarnation)) is not None:
                    self.commands.append(_reply(tenant, incarnation, stake.told))
            if node.mailbox.version:  # else it would wait for mail that nobody has sent
                stamp = node.mailbox.stamp
                self.commands.append(("HSET", redis_keys.reply(incarnation), "v", stamp))
            if node.retired:
                self.retire(incarnation, node.retired)
            self.commands.append(_expiry(incarnation))

    def retire(self, incarnation: str, reason: str) -> None:
        """Have a node save what it hosts, and end."""
        node = self.nodes.get(incarnation)
        if node is not None:
            node.retired = reason
            self.commands.append(("HSET", redis_keys.reply(incarnation), "r", reason))

    def lose(self, incarnation: str, reason: str, *, is_dead: bool = False) -> None:
        """An incarnation is not heard any more; say so to everybody, once.

        Args:
            is_dead: it will not be heard again; see to it that it stays so.
        """
        node = self.nodes.get(incarnation)
        if node is None or (node.away_since is not None and not is_dead):
            return
        if node.is_joined:
            for tenant in self.tenants.values():
                is_shared = node.mailbox.is_shared(tenant.events_key)
                tenant.lost(incarnation, reason, is_dead=is_dead, is_shared=is_shared)
            if node.away_since is None:
                where = f"Node {node.about.node} ({node.about.hostname})"
                self.news.append(f"{where} is lost: {reason}.")
        if is_dead:
            self.bury(incarnation, reason)
            return
        node.is_heard, node.away_since = False, self._now
        self._leases.put_away(incarnation)
        # What waits there is of yesterday; should it be back, it is told everything anew.
        self.commands.append(("DEL", redis_keys.queue(incarnation)))

    def bury(self, incarnation: str, reason: str) -> None:
        """Forget a lost incarnation and what is its own in Redis; fence it should it come back."""
        node = self.nodes.pop(incarnation, None)
        if node is None:
            return
        for tenant in self.tenants.values():
            tenant.stakes.pop(incarnation, None)
            tenant.beheaded.discard(incarnation)
        self._buried[incarnation] = reason
        if len(self._buried) > _BURIED_AT_MOST:
            del self._buried[next(iter(self._buried))]
        self._leases.forget(incarnation)
        self._fence(incarnation, reason)
        self.commands.append(("DEL", redis_keys.queue(incarnation)))
        if node.entry_id:
            self.commands.append(("XDEL", redis_keys.NODES, node.entry_id))

    # --- tenants ----------------------------------------------------------------------------------

    @property
    def has_facts(self) -> bool:
        """Whether a tenant has some to take, and does."""
        return any(tenant.facts and not tenant.is_full for tenant in self.tenants.values())

    @property
    def gaps(self) -> list[str]:
        """The streams in which events are missing."""
        return [key for key, tenant in self.tenants.items() if tenant.has_gap]

    @property
    def streams(self) -> list[str]:
        """Those of all experiments for which nodes may work."""
        return sorted({*self.tenants, *self.absent})

    def announce(self, tenant: ExperimentChannel) -> None:
        """Tell a new tenant of all nodes that are there, but for those that it knows."""
        for node in self.nodes.values():
            if node.is_heard:
                self._tell_of(tenant, node)

    def expect(
        self,
        tenant: ExperimentChannel,
        about: m.NodeJoined,
        journalled: int,
        *,
        away_since: float | None = None,
    ) -> None:
        """A tenant knows this node, from a scheduler that went before us, or before it left.

        Args:
            journalled: how far its events are; it may not have been told.
            away_since: it was lost then; from when on its absence counts, by the clock of looks.
        """
        incarnation = about.incarnation
        if incarnation in self._buried:
            reason = self._buried[incarnation]
            # Nobody knows any more what else ran there.
            tenant.facts.append(m.NodeLost(incarnation, reason, is_dead=True, is_shared=True))
            return
        node = self.nodes.get(incarnation)
        if node is None:
            node = self.nodes[incarnation] = RegisteredNode(about, b"", self._mailbox(incarnation))
            self._leases.watch(incarnation, None)
            if away_since is not None:
                node.away_since = away_since
                self._leases.put_away(incarnation)
        node.is_joined = True
        orders = node.mailbox.orders(tenant.events_key)
        tenant.knows(about, orders, journalled, is_away=away_since is not None)
        if node.away_since is not None:
            tenant.lost(incarnation, "it is not heard", is_dead=False, is_shared=True)
        elif node.is_heard:
            self._tell_of(tenant, node)

    def journalled(self, tenant: ExperimentChannel, accepted: Mapping[str, int]) -> None:
        """Tell nodes how far their events, by incarnation, are journalled."""
        for incarnation, last in accepted.items():
            stake = tenant.stakes.get(incarnation)
            if stake is not None and last > stake.told:
                stake.journalled = stake.told = last
                self.commands.append(_reply(tenant, incarnation, last))

    def over(self, tenant: ExperimentChannel) -> list[str]:
        """An experiment has ended; returns the nodes that have to hear what that means for them.

        They are told at once that nobody wants what they still have to say of it.
        """
        del self.tenants[tenant.events_key]
        self.absent.discard(tenant.events_key)
        changed: list[str] = []
        for incarnation, node in self.nodes.items():
            stake = tenant.stakes.get(incarnation)
            was_used = node.mailbox.drop(tenant.events_key)
            if was_used or (stake is not None and stake.journalled):
                # Also one that hosts nothing now: it may keep copies of checkpoints.
                self.commands.append(_reply(tenant, incarnation, redis_keys.EVERYTHING))
            if node.mailbox.is_changed:
                changed.append(incarnation)
            self.commands.append(_expiry(incarnation))
        return changed

    def leave(self, tenant: ExperimentChannel) -> None:
        """An experiment is not here for a while: nodes go on with what they host of it."""
        del self.tenants[tenant.events_key]
        self.absent.add(tenant.events_key)
        for node in self.nodes.values():
            node.mailbox.orders(tenant.events_key).start_over()

    # --- parts ------------------------------------------------------------------------------------

    def _mailbox(self, incarnation: str, version: int = 0) -> DesiredState:
        return DesiredState(incarnation, self._term, version, self.absent, self._store)

    def _hear(self, node: RegisteredNode, taken: tuple[int, int]) -> None:
        """A sign of life, which says what assignment the node has taken."""
        if not node.is_heard:
            self._is_there(node, taken)
        node.mailbox.confirm(*taken)
        if 0 < taken[0] < self._term:  # whoever we replaced may have slept, and given orders since
            node.mailbox.is_changed = True

    def _is_there(self, node: RegisteredNode, taken: tuple[int, int]) -> None:
        """The first sign of life, or the first since the node was lost."""
        if not node.is_joined:
            self._join(node, taken)
        elif node.away_since is not None:
            self._take_back(node, node.away_since)
        else:  # expected; we have orders for it, of a term of our own
            node.mailbox.is_changed = True
        node.is_heard = True
        for tenant in self.tenants.values():
            self._tell_of(tenant, node)

    def _tell_of(self, tenant: ExperimentChannel, node: RegisteredNode) -> None:
        """A node is there; of what another tenant knew of it nothing is told before it says so."""
        tenant.hears(node.about, node.mailbox.orders(tenant.events_key))
        if node.entry_id:
            tenant.sees(node.about)

    def _join(self, node: RegisteredNode, taken: tuple[int, int]) -> None:
        term, version = taken
        incarnation = node.about.incarnation
        if node.away_since is not None:
            node.away_since = None
            self._leases.watch(incarnation, None)
        node.mailbox = self._mailbox(incarnation, version)
        # It obeyed somebody before: it must learn that nothing of that counts any longer. A new one
        # learns which store to try before its first trial needs it.
        node.mailbox.is_changed = term > 0 or bool(self._store)
        node.is_joined = True

    def _take_back(self, node: RegisteredNode, away_since: float) -> None:
        incarnation = node.about.incarnation
        node.away_since = None
        self._leases.watch(incarnation, None)
        node.mailbox.lose_confirmation()
        where = f"Node {node.about.node} ({node.about.hostname})"
        self.news.append(f"{where} is back after {self._now - away_since:.0f} s.")

    def _never_to_return(self) -> list[str]:
        return [
            incarnation
            for incarnation, node in self.nodes.items()
            if node.away_since is not None and self._now > node.away_since + _AWAY_AT_MOST_S
        ]

    def _fence(self, incarnation: str, reason: str) -> None:
        fenced = "HSET", redis_keys.reply(incarnation), "f", reason
        self.commands += (fenced, _expiry(incarnation))


def _reply(tenant: ExperimentChannel, incarnation: str, journalled: int) -> tuple[str, ...]:
    field = redis_keys.journalled(tenant.events_key)
    return "HSET", redis_keys.reply(incarnation), field, str(journalled)


def _expiry(incarnation: str) -> tuple[str, ...]:
    """A reply outlives its node for a while only; the node itself puts that off."""
    return "EXPIRE", redis_keys.reply(incarnation), str(redis_keys.REPLY_TTL_S)


def _taken(lease: bytes | None) -> tuple[int, int]:
    """The (term, version) that a lease says its node has taken."""
    try:
        _, term, version = map(int, (lease or b"").split(b":"))
    except ValueError:
        return 0, 0
    return (term, version) if is_possible(term) and is_possible(version) else (0, 0)
