"""Which node instances there are, from what they say and from what their leases say.

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
    read_registration,
    report_withheld,
)
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.base.errors import TransportError
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeMetrics, decode_node_metrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import is_possible
from tunemq_shared.protocol.registration import decode_header
from tunemq_shared.protocol.rejections import RejectionCounter

#: A lost attempt that is not heard for so long will not be heard again.
_AWAY_AT_MOST_S: Final = float(redis_keys.REPLY_TTL_S)
#: So many dead attempts are remembered, the newest.
_BURIED_AT_MOST: Final = 10_000
#: Of a batch that yields nothing: whose it is, and the number of its last event.
NOBODYS: Final = ("", 0)


class RegisteredNode(msgspec.Struct):
    """A node instance that introduced itself.

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
    desired_state: DesiredState
    is_joined: bool = False
    is_heard: bool = False
    away_since: float | None = None
    retired: str = ""
    node_metrics: NodeMetrics = NodeMetrics()
    began: float = 0.0
    number: int = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a sign of life of it makes it usable at once."""
        return not self.is_heard and self.away_since is None

    @property
    def takes_orders(self) -> bool:
        """Whether to send it assignments."""
        return self.is_joined and self.is_heard and not self.desired_state.says_nothing


class NodeRegistry:
    """The node instances that live or may live, and the memory of dead ones.

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
        rejections: RejectionCounter | None = None,
        store: str = "",
    ) -> None:
        self.nodes: dict[str, RegisteredNode] = {}
        #: By the keys of their events.
        self.channels: dict[str, ExperimentChannel] = {}
        self.absent = set(absent)
        self.commands: list[RedisCommand] = []
        self.notices: list[str] = []
        self._term, self._store = term, store
        self.rejections = RejectionCounter() if rejections is None else rejections
        #: Dead attempts, and what they are told should they be heard again.
        self._buried: dict[str, str] = {}
        #: The monotonic clock at the last look.
        self._now = 0.0
        self._leases = LeaseWatch()

    # --- nodes and what they say ------------------------------------------------------------------

    def read_registration(self, entry_id: bytes, data: bytes) -> list[str]:
        """Take note of an introduction; returns the instances whose place the node takes."""
        try:
            registration = read_registration(data)
        except TransportError as error:
            self.rejections.add("registration", "version", str(error))
            self.commands.append(("XDEL", redis_keys.NODES, entry_id))
            return []
        instance_id = registration.instance_id
        if instance_id in self._buried:
            self.rejections.add("registration", "dead_node")
            self._fence(instance_id, self._buried[instance_id])
            self.commands.append(("XDEL", redis_keys.NODES, entry_id))
            return []
        known = self.nodes.get(instance_id)
        if known is not None and registration.number < known.number:
            self.rejections.add("registration", "repeated")
            self.commands.append(("XDEL", redis_keys.NODES, entry_id))
            return []
        if known is not None:
            if known.entry_id and known.entry_id != entry_id:
                self.commands.append(("XDEL", redis_keys.NODES, known.entry_id))
            known.entry_id = entry_id
            before, withheld = known.about.withheld, joined(registration).withheld
            known.about = msgspec.structs.replace(known.about, withheld=withheld)
            for channel in self.channels.values():
                channel.sees(known.about)
        else:
            before = {}
            known = RegisteredNode(joined(registration), entry_id, self._desired_state(instance_id))
            self.nodes[instance_id] = known
            self._leases.watch(instance_id, None)
        known.began, known.number = registration.began, registration.number
        self.notices += report_withheld(known.about, before)
        return [
            name
            for name, node in self.nodes.items()
            if node.about.node == registration.node
            and place_of(node.entry_id) < place_of(entry_id)
            and node.began <= registration.began
        ]

    def read_deregistration(self, entry_id: bytes, data: bytes) -> str:
        """Take note of a deregistration; returns whose it is."""
        self.commands.append(("XDEL", redis_keys.NODES, entry_id))
        return data.decode(errors="replace")

    def read_batch(
        self, channel: ExperimentChannel, entry_id: bytes, fields: Mapping[bytes, bytes]
    ) -> tuple[str, int]:
        """State the events of a batch; returns whose they are and the last one's number.

        What is unreadable or from a dead attempt yields nothing: ``("", 0)``.
        """
        try:
            header = decode_header(fields.get(redis_keys.HEADER, b""))
        except UNDECODABLE as error:
            text = f"A batch of events cannot be read ({error}); it is ignored."
            self.rejections.add("events", "unreadable", text)
            return NOBODYS
        instance_id = header.instance_id
        node = self.nodes.get(instance_id)
        if node is None:
            if instance_id in self._buried:
                self._fence(instance_id, self._buried[instance_id])
            self.rejections.add(
                "events", "dead_node" if instance_id in self._buried else "unknown_node"
            )
            return NOBODYS
        # Undecoded: what cannot be read costs the experiment that it is for, not the node.
        payload = fields.get(redis_keys.EVENTS, b"")
        last = header.first + count_of(payload) - 1
        cursor = channel.cursors.get(instance_id)
        if cursor is None and (header.first > 1 or not node.is_joined):
            # A copy of what a dead node said; or a living one's, of which what was before is lost,
            # or that shows no lease yet. If it is alive it sends all again once it has joined.
            self.rejections.add("events", "repeated")
            channel.beheaded.add(instance_id)
            return NOBODYS
        if cursor is not None:
            if last <= cursor.read:
                self.rejections.add("events", "repeated")
            if not node.is_heard and last <= cursor.acknowledged_up_to:
                return instance_id, last  # old: no sign of life
            if channel.is_gap(cursor, header.first):
                if not channel.has_gap:
                    self.lose(instance_id, "it does not have all of its events", is_dead=True)
                return NOBODYS
        self._hear(node, header.confirmed)
        cursor = channel.cursors[instance_id]
        cursor.read = max(cursor.read, last)
        read = m.BatchRead(instance_id, header.first, last, entry_id.decode())
        channel.read_events.append(EventBatch(read, payload))
        return instance_id, last

    def lease_keys(self) -> list[str]:
        """The keys whose values `read_leases` wants, in order."""
        return [redis_keys.lease(instance_id) for instance_id in self.nodes]

    def read_leases(self, now: float, values: Sequence[bytes | None]) -> None:
        """Compare leases with those of the last look, at ``now`` of a monotonic clock."""
        self._now = now
        leases = dict(zip(self.nodes, values, strict=True))
        renewed, lost = self._leases.look(now, leases)
        for instance_id in renewed:
            node = self.nodes[instance_id]
            self._hear(node, _taken(leases[instance_id]))
            node.desired_state.renewals_unconfirmed += not node.desired_state.is_confirmed
        for instance_id in lost:
            self.lose(instance_id, f"its lease was not renewed for {redis_keys.LEASE_TTL_S:g} s")
        for instance_id in self._never_to_return():
            self.lose(instance_id, "it was not heard for too long", is_dead=True)

    def node_metrics_keys(self) -> list[str]:
        """The keys whose values `read_node_metrics` wants, in order."""
        return [redis_keys.node_metrics(instance_id) for instance_id in self.nodes]

    def read_node_metrics(self, instance_id: str, value: bytes | None) -> None:
        """Take note of what a node says of its machine; what cannot be read matters to nobody."""
        if value is None:
            return
        node = self.nodes[instance_id]
        try:
            node_metrics = decode_node_metrics(value)
        except UNDECODABLE:
            self.rejections.add("node_metrics", "unreadable")
            return
        if node_metrics.number >= node.node_metrics.number:
            node.node_metrics = node_metrics

    def silence_s(self, instance_id: str) -> float:
        """How long a node was not heard; as far as we looked."""
        node = self.nodes.get(instance_id)
        if node is None or node.away_since is None:
            return self._leases.silence_s(instance_id)
        return redis_keys.LEASE_TTL_S + self._now - node.away_since

    def forget_silence(self) -> None:
        """Redis takes no leases now: silence proves nothing."""
        self._leases.start_anew()

    def begin_anew(self) -> None:
        """The wire has a new generation, and may know nothing of what we told."""
        # Where a clock was set back, numbers of old entries may be those of new ones.
        self.commands = [one for one in self.commands if one[0] not in {"XTRIM", "XDEL"}]
        self.start_anew()
        for channel in self.channels.values():
            channel.reread()
        for node in self.nodes.values():
            node.desired_state.lose_confirmation()

    def start_anew(self) -> None:
        """Redis was away: silence meanwhile proves nothing, and what we told may be forgotten."""
        self._leases.start_anew()
        self.say_again()

    def say_again(self) -> None:
        """Tell nodes once more all that they were told in replies."""
        for instance_id, node in self.nodes.items():
            for channel in self.channels.values():
                if (cursor := channel.cursors.get(instance_id)) is not None:
                    self.commands.append(_reply(channel, instance_id, cursor.ack_sent))
            if node.desired_state.version:  # else it would wait for mail that nobody has sent
                stamp = node.desired_state.stamp
                self.commands.append(("HSET", redis_keys.reply(instance_id), "v", stamp))
            if node.retired:
                self.retire(instance_id, node.retired)
            self.commands.append(_expiry(instance_id))

    def retire(self, instance_id: str, reason: str) -> None:
        """Have a node save what it hosts, and end."""
        node = self.nodes.get(instance_id)
        if node is not None:
            node.retired = reason
            self.commands.append(("HSET", redis_keys.reply(instance_id), "r", reason))

    def lose(self, instance_id: str, reason: str, *, is_dead: bool = False) -> None:
        """An attempt is not heard any more; say so to everybody, once.

        Args:
            is_dead: it will not be heard again; see to it that it stays so.
        """
        node = self.nodes.get(instance_id)
        if node is None or (node.away_since is not None and not is_dead):
            return
        if node.is_joined:
            for channel in self.channels.values():
                is_shared = node.desired_state.is_shared(channel.events_key)
                channel.lost(instance_id, reason, is_dead=is_dead, is_shared=is_shared)
            if node.away_since is None:
                where = f"Node {node.about.node} ({node.about.hostname})"
                self.notices.append(f"{where} is lost: {reason}.")
        if is_dead:
            self.bury(instance_id, reason)
            return
        node.is_heard, node.away_since = False, self._now
        self._leases.put_away(instance_id)
        # What waits there is of yesterday; should it be back, it is told everything anew.
        self.commands.append(("DEL", redis_keys.queue(instance_id)))

    def bury(self, instance_id: str, reason: str) -> None:
        """Forget a lost attempt and what is its own in Redis; fence it should it come back."""
        node = self.nodes.pop(instance_id, None)
        if node is None:
            return
        for channel in self.channels.values():
            channel.cursors.pop(instance_id, None)
            channel.beheaded.discard(instance_id)
        self._buried[instance_id] = reason
        if len(self._buried) > _BURIED_AT_MOST:
            del self._buried[next(iter(self._buried))]
        self._leases.forget(instance_id)
        self._fence(instance_id, reason)
        self.commands.append(("DEL", redis_keys.queue(instance_id)))
        if node.entry_id:
            self.commands.append(("XDEL", redis_keys.NODES, node.entry_id))

    # --- tenants ----------------------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        """Whether a tenant has some to take, and does."""
        return any(
            channel.read_events and not channel.is_full for channel in self.channels.values()
        )

    @property
    def gaps(self) -> list[str]:
        """The streams in which events are missing."""
        return [key for key, channel in self.channels.items() if channel.has_gap]

    @property
    def streams(self) -> list[str]:
        """Those of all experiments for which nodes may work."""
        return sorted({*self.channels, *self.absent})

    def announce(self, channel: ExperimentChannel) -> None:
        """Tell a new tenant of all nodes that are there, but for those that it knows."""
        for node in self.nodes.values():
            if node.is_heard:
                self._tell_of(channel, node)

    def expect(
        self,
        channel: ExperimentChannel,
        about: m.NodeJoined,
        acknowledged_up_to: int,
        *,
        away_since: float | None = None,
    ) -> None:
        """A tenant knows this node, from a scheduler that went before us, or before it left.

        Args:
            journalled: how far its events are; it may not have been told.
            away_since: it was lost then; from when on its absence counts, by the clock of looks.
        """
        instance_id = about.instance_id
        if instance_id in self._buried:
            reason = self._buried[instance_id]
            # Nobody knows any more what else ran there.
            channel.read_events.append(
                m.NodeLost(instance_id, reason, is_dead=True, is_shared=True)
            )
            return
        node = self.nodes.get(instance_id)
        if node is None:
            node = self.nodes[instance_id] = RegisteredNode(
                about, b"", self._desired_state(instance_id)
            )
            self._leases.watch(instance_id, None)
            if away_since is not None:
                node.away_since = away_since
                self._leases.put_away(instance_id)
        node.is_joined = True
        orders = node.desired_state.orders(channel.events_key)
        channel.knows(about, orders, acknowledged_up_to, is_away=away_since is not None)
        if node.away_since is not None:
            channel.lost(instance_id, "it is not heard", is_dead=False, is_shared=True)
        elif node.is_heard:
            self._tell_of(channel, node)

    def acknowledged_up_to(
        self, channel: ExperimentChannel, acknowledged: Mapping[str, int]
    ) -> None:
        """Tell nodes how far their events, by instance, are journalled."""
        for instance_id, last in acknowledged.items():
            cursor = channel.cursors.get(instance_id)
            if cursor is not None and last > cursor.ack_sent:
                cursor.acknowledged_up_to = cursor.ack_sent = last
                self.commands.append(_reply(channel, instance_id, last))

    def over(self, channel: ExperimentChannel) -> list[str]:
        """An experiment has ended; returns the nodes that have to hear what that means for them.

        They are told at once that nobody wants what they still have to say of it.
        """
        del self.channels[channel.events_key]
        self.absent.discard(channel.events_key)
        changed: list[str] = []
        for instance_id, node in self.nodes.items():
            cursor = channel.cursors.get(instance_id)
            was_used = node.desired_state.drop(channel.events_key)
            if was_used or (cursor is not None and cursor.acknowledged_up_to):
                # Also one that hosts nothing now: it may keep copies of checkpoints.
                self.commands.append(_reply(channel, instance_id, redis_keys.EVERYTHING))
            if node.desired_state.is_changed:
                changed.append(instance_id)
            self.commands.append(_expiry(instance_id))
        return changed

    def leave(self, channel: ExperimentChannel) -> None:
        """An experiment is not here for a while: nodes go on with what they host of it."""
        del self.channels[channel.events_key]
        self.absent.add(channel.events_key)
        for node in self.nodes.values():
            node.desired_state.orders(channel.events_key).start_over()

    # --- parts ------------------------------------------------------------------------------------

    def _desired_state(self, instance_id: str, version: int = 0) -> DesiredState:
        return DesiredState(instance_id, self._term, version, self.absent, self._store)

    def _hear(self, node: RegisteredNode, confirmed: tuple[int, int]) -> None:
        """A sign of life, which says what assignment the node has taken."""
        if not node.is_heard:
            self._is_there(node, confirmed)
        node.desired_state.confirm(*confirmed)
        if (
            0 < confirmed[0] < self._term
        ):  # whoever we replaced may have slept, and given orders since
            node.desired_state.is_changed = True

    def _is_there(self, node: RegisteredNode, confirmed: tuple[int, int]) -> None:
        """The first sign of life, or the first since the node was lost."""
        if not node.is_joined:
            self._join(node, confirmed)
        elif node.away_since is not None:
            self._take_back(node, node.away_since)
        else:  # expected; we have orders for it, of a term of our own
            node.desired_state.is_changed = True
        node.is_heard = True
        for channel in self.channels.values():
            self._tell_of(channel, node)

    def _tell_of(self, channel: ExperimentChannel, node: RegisteredNode) -> None:
        """A node is there; of what another tenant knew of it nothing is told before it says so."""
        channel.hears(node.about, node.desired_state.orders(channel.events_key))
        if node.entry_id:
            channel.sees(node.about)

    def _join(self, node: RegisteredNode, confirmed: tuple[int, int]) -> None:
        term, version = confirmed
        instance_id = node.about.instance_id
        if node.away_since is not None:
            node.away_since = None
            self._leases.watch(instance_id, None)
        node.desired_state = self._desired_state(instance_id, version)
        # It obeyed somebody before: it must learn that nothing of that counts any longer. A new one
        # learns which store to try before its first trial needs it.
        node.desired_state.is_changed = term > 0 or bool(self._store)
        node.is_joined = True

    def _take_back(self, node: RegisteredNode, away_since: float) -> None:
        instance_id = node.about.instance_id
        node.away_since = None
        self._leases.watch(instance_id, None)
        node.desired_state.lose_confirmation()
        where = f"Node {node.about.node} ({node.about.hostname})"
        self.notices.append(f"{where} is back after {self._now - away_since:.0f} s.")

    def _never_to_return(self) -> list[str]:
        return [
            instance_id
            for instance_id, node in self.nodes.items()
            if node.away_since is not None and self._now > node.away_since + _AWAY_AT_MOST_S
        ]

    def _fence(self, instance_id: str, reason: str) -> None:
        fenced = "HSET", redis_keys.reply(instance_id), "f", reason
        self.commands += (fenced, _expiry(instance_id))


def _reply(
    channel: ExperimentChannel, instance_id: str, acknowledged_up_to: int
) -> tuple[str, ...]:
    field = redis_keys.acknowledged_up_to(channel.events_key)
    return "HSET", redis_keys.reply(instance_id), field, str(acknowledged_up_to)


def _expiry(instance_id: str) -> tuple[str, ...]:
    """A reply outlives its node for a while only; the node itself puts that off."""
    return "EXPIRE", redis_keys.reply(instance_id), str(redis_keys.REPLY_TTL_S)


def _taken(lease: bytes | None) -> tuple[int, int]:
    """The (term, version) that a lease says its node has taken."""
    try:
        _, term, version = map(int, (lease or b"").split(b":"))
    except ValueError:
        return 0, 0
    return (term, version) if is_possible(term) and is_possible(version) else (0, 0)
