"""`NodeRegistry`: tracks node instances by their registrations, events and leases.

It does no I/O. Its caller passes in what it read; the registry collects events for the experiments,
commands for Redis, and notices for the person at the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tunemq_scheduler.transport.deregistered_nodes import place_of
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.event_batches import EventBatch, count_of
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.lease_watch import LeaseWatch
from tunemq_scheduler.transport.nodes.registration_checks import (
    joined,
    read_registration,
    report_withheld,
)
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import TransportError
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeMetrics, decode_node_metrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import MOST_NODES, NODES_BYTES, is_possible
from tunemq_shared.protocol.registration import decode_header
from tunemq_shared.protocol.rejection_counter import RejectionCounter

#: A lost instance that stays silent for this long is considered dead.
_AWAY_AT_MOST_S: Final = float(redis_keys.REPLY_TTL_S)
#: The most dead instances to remember; the newest are kept.
_BURIED_AT_MOST: Final = 10_000
#: By how much the number of a node's metrics may grow; it grows by one in two seconds.
_METRICS_AT_ONCE: Final = 100
_METRICS_A_SECOND: Final = 10
#: The result for a batch that yields nothing: no instance, last event number 0.
NOBODYS: Final = ("", 0)


class RegisteredNode(msgspec.Struct):
    """A node instance that has registered.

    Attributes:
        about: the node, as experiments see it.
        entry_id: of its registration in the nodes' stream; empty if that was not read yet.
        desired_state: the trials that it should run.
        is_joined: whether experiments know it; not before its first sign of life.
        is_heard: whether it is alive as far as known, so that orders make sense.
        away_since: when it was lost, by this machine's monotonic clock; None if it is not lost.
        retired: why it should end; empty if it should not.
        node_metrics: its last metrics, and ``metrics_at``, when they came.
        obeys_later: whether it obeys a scheduler of a later term than this one's.
        began: when it started, by its own clock; 0 if its registration was not read yet.
        number: of that registration.
    """

    about: m.NodeJoined
    entry_id: bytes
    desired_state: DesiredState
    is_joined: bool = False
    is_heard: bool = False
    away_since: float | None = None
    retired: str = ""
    node_metrics: NodeMetrics = NodeMetrics()
    metrics_at: float = 0.0
    obeys_later: bool = False
    began: float = 0.0
    number: int = 0

    @property
    def is_awaited(self) -> bool:
        """Whether its next sign of life makes it usable at once."""
        return not self.is_heard and self.away_since is None

    @property
    def takes_orders(self) -> bool:
        """Whether to send it assignments."""
        return self.is_joined and self.is_heard and not self.desired_state.says_nothing


class NodeRegistry:
    """The live and lost node instances, and the memory of dead ones.

    An instance whose lease expires is *away*, not dead, because it may be cut off from the network.
    Its first sign of life brings it back, and each experiment then says which trials it should run.
    An instance is dead when its node was restarted or has deregistered. It is then fenced, in case
    it ever comes back.

    Args:
        term: the scheduler's term, for assignments.
        absent: event keys of experiments that may have trials on nodes but have not sent their
            orders yet.
        rejections: counts messages that are signed by a node but invalid.
        store: the farm's store, which each node should try once.
    """

    def __init__(
        self,
        term: int,
        absent: Iterable[str] = (),
        rejections: RejectionCounter | None = None,
        store: str = "",
    ) -> None:
        self.nodes: dict[str, RegisteredNode] = {}
        #: By their event keys.
        self.channels: dict[str, ExperimentChannel] = {}
        self.absent = set(absent)
        self.commands: list[RedisCommand] = []
        self.notices: list[str] = []
        self._term, self._store = term, store
        self.rejections = RejectionCounter() if rejections is None else rejections
        #: The bytes of each registration, and of all.
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        #: Dead instances, with the reason that each gets if it comes back.
        self._buried: dict[str, str] = {}
        #: The monotonic clock at the last poll.
        self._now = 0.0
        self._leases = LeaseWatch()

    # --- nodes and what they say ------------------------------------------------------------------

    def read_registration(self, entry_id: bytes, data: bytes) -> list[str]:
        """Process a registration; return the instances that this node replaces."""
        try:
            registration = read_registration(data)
        except TransportError as error:
            return self._reject_registration(entry_id, "version", str(error))
        instance_id = registration.instance_id
        if instance_id in self._buried:
            self._fence(instance_id, self._buried[instance_id])
            return self._reject_registration(entry_id, "dead_node")
        known = self.nodes.get(instance_id)
        if known is not None and registration.number < known.number:
            return self._reject_registration(entry_id, "repeated")
        if not self._has_room(instance_id, len(data)):
            text = (
                f"Node {registration.node} is refused: a farm may have {MOST_NODES:,} nodes, and"
                f" registrations of {NODES_BYTES:,} bytes; `tunemq nodes` lists them."
            )
            return self._reject_registration(entry_id, "too_many", text)
        if known is not None:
            if known.entry_id and known.entry_id != entry_id:
                self.commands.append(("XDEL", redis_keys.NODES, known.entry_id))
            before, now = known.about.withheld, joined(registration)
            if not known.entry_id:  # so far it is known from a search, which may lie about it
                known.about = now
            known.entry_id = entry_id
            known.about = msgspec.structs.replace(
                known.about, withheld=now.withheld, is_ending=now.is_ending
            )
            for channel in self.channels.values():
                if known.is_heard:
                    self._tell_of(channel, known)
                else:
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

    def _has_room(self, instance_id: str, size: int) -> bool:
        """Count a registration if all together can still be sent to a search in one frame."""
        total = self._bytes + size - self._sizes.get(instance_id, 0)
        is_one_more = instance_id not in self._sizes and len(self._sizes) >= MOST_NODES
        if is_one_more or total > NODES_BYTES:
            return False
        self._sizes[instance_id], self._bytes = size, total
        return True

    def _reject_registration(self, entry_id: bytes, reason: str, text: str = "") -> list[str]:
        self.rejections.add("registration", reason, text)
        self.commands.append(("XDEL", redis_keys.NODES, entry_id))
        return []

    def read_deregistration(self, entry_id: bytes, data: bytes) -> str:
        """Process a deregistration; return its instance."""
        self.commands.append(("XDEL", redis_keys.NODES, entry_id))
        return data.decode(errors="replace")

    def read_batch(
        self, channel: ExperimentChannel, entry_id: bytes, fields: Mapping[bytes, bytes]
    ) -> tuple[str, int]:
        """Add the events of a batch; return its instance and the number of its last event.

        An unreadable batch, or one of a dead instance, yields nothing: ``("", 0)``.
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
        # The payload stays encoded: an invalid event must fail its experiment, not the node.
        payload = fields.get(redis_keys.EVENTS, b"")
        last = header.first + count_of(payload) - 1
        cursor = channel.cursors.get(instance_id)
        if cursor is None and (header.first > 1 or not node.is_joined):
            # This repeats events of a dead node, or belongs to a live one whose earlier events are
            # lost or that has no lease yet. A live one sends all again once it has joined.
            self.rejections.add("events", "repeated")
            channel.beheaded.add(instance_id)
            return NOBODYS
        if cursor is not None:
            if last <= cursor.read:
                self.rejections.add("events", "repeated")
            if not node.is_heard and last <= cursor.acknowledged_up_to:
                return instance_id, last  # old, so no sign of life
            if channel.is_gap(cursor, header.first):
                if not channel.has_gap:  # else all events are sent again
                    self._lacks_events(channel, node.about)
                return NOBODYS
        self._hear(node, header.confirmed)
        cursor = channel.cursors[instance_id]
        cursor.read = max(cursor.read, last)
        read = m.BatchRead(instance_id, header.first, last, entry_id.decode())
        channel.read_events.append(EventBatch(read, payload))
        return instance_id, last

    def _lacks_events(self, channel: ExperimentChannel, about: m.NodeJoined) -> None:
        """Handle a node that has deleted events which this channel lacks."""
        if channel.can_restart:
            channel.incomplete_node = about.node
        else:
            self.lose(about.instance_id, "it does not have all of its events", is_dead=True)

    def lease_keys(self) -> list[str]:
        """Return the keys whose values `read_leases` takes, in order."""
        return [redis_keys.lease(instance_id) for instance_id in self.nodes]

    def read_leases(self, now: float, values: Sequence[bytes | None]) -> None:
        """Compare leases with those of the last poll, at ``now`` of a monotonic clock."""
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
        """Return the keys whose values `read_node_metrics` takes, in order."""
        return [redis_keys.node_metrics(instance_id) for instance_id in self.nodes]

    def read_node_metrics(self, instance_id: str, value: bytes | None) -> None:
        """Process a node's metrics; unreadable ones are only counted."""
        if value is None:
            return
        node = self.nodes[instance_id]
        try:
            node_metrics = decode_node_metrics(value)
        except UNDECODABLE:
            self.rejections.add("node_metrics", "unreadable")
            return
        before = node.node_metrics.number
        most = before + _METRICS_AT_ONCE + _METRICS_A_SECOND * (self._now - node.metrics_at)
        if before and node_metrics.number > most:  # forged: it would silence the node for ever
            self.rejections.add("node_metrics", "unreadable")
        elif node_metrics.number >= before:
            node.node_metrics, node.metrics_at = node_metrics, self._now

    def silence_s(self, instance_id: str) -> float:
        """Return for how many seconds a node has been silent, counting only polled time."""
        node = self.nodes.get(instance_id)
        if node is None or node.away_since is None:
            return self._leases.silence_s(instance_id)
        return redis_keys.LEASE_TTL_S + self._now - node.away_since

    def forget_silence(self) -> None:
        """Reset silence, because Redis accepts no leases now."""
        self._leases.start_anew()

    def begin_anew(self) -> None:
        """Reset for a new generation, in which earlier messages may be lost."""
        # If a clock was set back, ids of old entries may match those of new ones.
        self.commands = [one for one in self.commands if one[0] not in {"XTRIM", "XDEL"}]
        self.start_anew()
        for channel in self.channels.values():
            channel.reread()
        for node in self.nodes.values():
            node.desired_state.lose_confirmation()

    def start_anew(self) -> None:
        """Reset silence and repeat all replies, after Redis was away."""
        self._leases.start_anew()
        self.say_again()

    def say_again(self) -> None:
        """Send nodes all their replies once more."""
        for instance_id, node in self.nodes.items():
            for channel in self.channels.values():
                if (cursor := channel.cursors.get(instance_id)) is not None:
                    self.commands.append(_reply(channel, instance_id, cursor.ack_sent))
            if node.desired_state.version:  # else it would wait in vain for one
                stamp = node.desired_state.stamp
                self.commands.append(("HSET", redis_keys.reply(instance_id), "v", stamp))
            if node.retired:
                self.retire(instance_id, node.retired)
            self.commands.append(_expiry(instance_id))

    def retire(self, instance_id: str, reason: str) -> None:
        """Order a node to save its trials and end."""
        node = self.nodes.get(instance_id)
        if node is not None:
            node.retired = reason
            self.commands.append(("HSET", redis_keys.reply(instance_id), "r", reason))

    def lose(self, instance_id: str, reason: str, *, is_dead: bool = False) -> None:
        """Mark an instance as lost; inform each experiment once.

        Args:
            instance_id: the node instance.
            reason: why it is lost, for people.
            is_dead: it will not come back, and is fenced.
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
        # The queue is outdated; if the instance comes back, it gets all orders again.
        self.commands.append(("DEL", redis_keys.queue(instance_id)))

    def bury(self, instance_id: str, reason: str) -> None:
        """Forget a dead instance and its keys in Redis, and fence it in case it comes back."""
        node = self.nodes.pop(instance_id, None)
        if node is None:
            return
        for channel in self.channels.values():
            channel.cursors.pop(instance_id, None)
            channel.beheaded.discard(instance_id)
        self._bytes -= self._sizes.pop(instance_id, 0)
        self._buried[instance_id] = reason
        if len(self._buried) > _BURIED_AT_MOST:
            del self._buried[next(iter(self._buried))]
        self._leases.forget(instance_id)
        self._fence(instance_id, reason)
        self.commands.append(("DEL", redis_keys.queue(instance_id)))
        if node.entry_id:
            self.commands.append(("XDEL", redis_keys.NODES, node.entry_id))

    # --- experiments ------------------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        """Whether an experiment that is not full has events to take."""
        return any(
            channel.read_events and not channel.is_full for channel in self.channels.values()
        )

    @property
    def gaps(self) -> list[str]:
        """The streams in which events are missing."""
        return [key for key, channel in self.channels.items() if channel.has_gap]

    @property
    def streams(self) -> list[str]:
        """The streams of all experiments for which nodes may work."""
        return sorted({*self.channels, *self.absent})

    def announce(self, channel: ExperimentChannel) -> None:
        """Report all live nodes to a new experiment, except those that it knows."""
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
        """Add a node that an experiment knows from an earlier scheduler, or from before it left.

        Args:
            channel: the experiment's channel.
            about: the node as the experiment knows it.
            acknowledged_up_to: the node's last journalled event; the node may not know this yet.
            away_since: since when it counts as lost, by the monotonic clock; None if it is not
                lost.
        """
        instance_id = about.instance_id
        if instance_id in self._buried:
            reason = self._buried[instance_id]
            # It is unknown which other experiments had trials there.
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
        """Acknowledge journalled events to the nodes, by instance."""
        for instance_id, last in acknowledged.items():
            cursor = channel.cursors.get(instance_id)
            if cursor is not None and last > cursor.ack_sent:
                cursor.acknowledged_up_to = cursor.ack_sent = last
                self.commands.append(_reply(channel, instance_id, last))

    def over(self, channel: ExperimentChannel) -> list[str]:
        """Remove an ended experiment; return the nodes whose orders change by that.

        Nodes learn at once that all their events of this experiment count as acknowledged.
        """
        del self.channels[channel.events_key]
        self.absent.discard(channel.events_key)
        self._forget_unregistered(channel)
        changed: list[str] = []
        for instance_id, node in self.nodes.items():
            cursor = channel.cursors.get(instance_id)
            was_used = node.desired_state.drop(channel.events_key)
            if was_used or (cursor is not None and cursor.acknowledged_up_to):
                # Also a node without its trials: it may keep copies of checkpoints.
                self.commands.append(_reply(channel, instance_id, redis_keys.EVERYTHING))
            if node.desired_state.is_changed:
                changed.append(instance_id)
            self.commands.append(_expiry(instance_id))
        return changed

    def leave(self, channel: ExperimentChannel) -> None:
        """Detach an experiment for a while; nodes keep running its trials."""
        del self.channels[channel.events_key]
        self.absent.add(channel.events_key)
        self._forget_unregistered(channel)
        for node in self.nodes.values():
            node.desired_state.orders(channel.events_key).start_over()

    def _forget_unregistered(self, channel: ExperimentChannel) -> None:
        """Forget the nodes that only this experiment named: it may have invented them."""
        for instance_id in channel.cursors:
            node = self.nodes.get(instance_id)
            if node is None or node.entry_id or node.is_heard:
                continue
            if not any(instance_id in other.cursors for other in self.channels.values()):
                del self.nodes[instance_id]
                self._leases.forget(instance_id)

    # --- parts ------------------------------------------------------------------------------------

    def _desired_state(self, instance_id: str, version: int = 0) -> DesiredState:
        return DesiredState(instance_id, self._term, version, self.absent, self._store)

    def _hear(self, node: RegisteredNode, confirmed: tuple[int, int]) -> None:
        """Process a sign of life, with the assignment that the node has taken."""
        if not node.is_heard:
            self._is_there(node, confirmed)
        node.desired_state.confirm(*confirmed)
        if 0 < confirmed[0] < self._term:
            # A replaced scheduler may have been suspended, and sent orders since.
            node.desired_state.is_changed = True
        elif confirmed[0] > self._term and not node.obeys_later:
            node.obeys_later = True
            self.notices.append(
                f"Node {node.about.node} obeys a scheduler of a later term ({confirmed[0]}) and"
                " rejects all orders of this one. If no other scheduler runs, a clock was ahead"
                " when an earlier one began: restart this worker."
            )

    def _is_there(self, node: RegisteredNode, confirmed: tuple[int, int]) -> None:
        """Process the first sign of life, or the first since the node was lost."""
        if not node.is_joined:
            self._join(node, confirmed)
        elif node.away_since is not None:
            self._take_back(node, node.away_since)
        else:  # expected; its orders have this scheduler's term
            node.desired_state.is_changed = True
        node.is_heard = True
        for channel in self.channels.values():
            self._tell_of(channel, node)

    def _tell_of(self, channel: ExperimentChannel, node: RegisteredNode) -> None:
        """Report a live node; to experiments that do not know it, once it has registered."""
        if node.entry_id or node.about.instance_id in channel.cursors:
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
        # A node that obeyed an earlier scheduler must learn that its orders are void. A new one
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
    """Return the command that lets a reply expire; the node itself postpones this."""
    return "EXPIRE", redis_keys.reply(instance_id), str(redis_keys.REPLY_TTL_S)


def _taken(lease: bytes | None) -> tuple[int, int]:
    """Return the (term, version) that the node has taken, according to its lease."""
    try:
        _, term, version = map(int, (lease or b"").split(b":"))
    except ValueError:
        return 0, 0
    return (term, version) if is_possible(term) and is_possible(version) else (0, 0)
