"""`NodeTransport`: reaches nodes through Redis, for any number of experiments at once.

Orders are kept as what each node is *to host* and go out whole, as one Celery task for each node
whose orders changed in a turn. Whatever gets lost, doubled or reordered on the way is mended by one
rule: a node that has not confirmed the newest version is sent it again. Facts come back through
streams, one for each experiment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from typing import Final

from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_scheduler.transport.nodes.stream_decoder import StreamDecoder
from tunemq_scheduler.transport.redis.key_types import KeyType, clear_wrong_types
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand, RedisFull, ReplyTooLong
from tunemq_scheduler.transport.redis.redis_generation import QUESTIONS, RedisGeneration
from tunemq_scheduler.transport.redis.redis_link import (
    RETRY_EVERY_S,
    EmbeddedServices,
    LeaseGuard,
    RedisLink,
)
from tunemq_scheduler.transport.redis.redis_memory import PROBE, RedisMemory
from tunemq_scheduler.transport.redis.stream_reader import StreamEntry
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_scheduler.transport.transport_client import TransportClient
from tunemq_shared.base.errors import BugError, RedisUnavailable, TransportError
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.rejections import RejectionCounter
from tunemq_shared.signing.live_keys import LiveKeys

#: Leases and the generation are looked at this often.
_POLL_INTERVAL_S: Final = redis_keys.LEASE_PERIOD_S / 2
#: An order that was not confirmed by the first renewal after it was sent is sent again: it may have
#: died with the consumer that had read it. One that was only on its way does no harm twice.
_RENEWALS_UNTIL_RESENT: Final = 1
#: What a dead instance would have fetched, or a finished experiment's node appended, goes after
#: so long.
_EXPIRES_S: Final = 60
#: How long `close` waits for nodes to fetch the news that nothing is wanted any more.
_DEREGISTER_S: Final = 1.5


class NodeTransport:
    """The nodes that are reached through one Redis, and the experiments that they work for.

    Args:
        url: where Redis is: ``unix://``, ``redis://`` or ``rediss://``.
        term: greater than that of every scheduler these nodes obeyed before.
        guard: what is written to Redis is written only as long as it lets us.
        backing: asked once a second whether there is hope, and for notes.
        connect_within: how many seconds `open` tries to reach Redis.
        absent: experiments, by the keys of their events, of which nodes may host something, and
            that will be added: until then, nodes go on with that.
        wants_vitals: whether anybody asks for `node_metrics`.
        keys: of the farm; none where nothing is signed.
        store: the farm's, on a server, which each node is to try once.
    """

    def __init__(
        self,
        url: str,
        *,
        term: int,
        guard: LeaseGuard | None = None,
        backing: EmbeddedServices | None = None,
        connect_within: float = 10.0,
        absent: Iterable[str] = (),
        wants_node_metrics: bool = False,
        keys: LiveKeys | None = None,
        store: str = "",
    ) -> None:
        self._wants_node_metrics, self._node_metrics_due = wants_node_metrics, 0.0
        #: What nodes said and was not believed.
        self.rejections = RejectionCounter()
        self._signing = SchedulerSigning(keys, self.rejections)
        self._registry = NodeRegistry(term, absent, self.rejections, store)
        self._guard, self._backing = guard, backing
        self._connect_within = connect_within
        self._redis = RedisLink(url, guard, backing)
        self._connection, self._reader = self._redis.line, self._redis.reader
        self._reader.watch(redis_keys.NODES)
        self._generation = RedisGeneration(self._connection)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        #: Clients whose streams are not there yet.
        self._new: list[ExperimentChannel] = []
        self._decoder = StreamDecoder(self._registry, self._signing)
        #: Nodes that were sent a deregistration.
        self._told: list[str] = []
        self._poll_due = 0.0
        self._redis_memory = RedisMemory()
        #: Whether the farm's streams are ours.
        self._has_farm = False

    # --- beginning and end ------------------------------------------------------------------------

    def open(self) -> None:
        """Reach Redis, and make the streams of the clients that there are.

        Of a farm's Redis that is full this returns, too; it counts as away until there is room.

        Raises:
            WireUnavailable: Redis cannot be reached for ``connect_within`` seconds.
        """
        started = time.monotonic()
        while True:
            try:
                self._link()
            except (RedisUnavailable, RedisFull) as error:
                if self._guard is not None and isinstance(error, RedisFull):
                    self._is_full(error)
                    self._redis.lost(error)
                    return
                tried = time.monotonic() - started
                if tried >= self._connect_within:
                    raise RedisUnavailable(f"{error} Tried for {tried:.1f} s.") from error
                time.sleep(RETRY_EVERY_S)  # there is nothing else to do yet
            else:
                return

    def close(self, *, now: bool = False) -> None:
        """Close the connections.

        Args:
            now: do not wait until nodes have read what the deregistrations of clients are to them.
        """
        if self._wake_writer < 0:
            return
        try:
            if not now and not self.is_away:
                self._wait_for_deregistrations()
        except TransportError:
            pass  # a node that does not read it gives up an experiment whose scheduler has ended
        finally:
            self._redis.close()
            descriptors = self._wake_reader, self._wake_writer
            self._wake_reader = self._wake_writer = -1
            for descriptor in descriptors:
                os.close(descriptor)

    def _wait_for_deregistrations(self) -> None:
        deadline = time.monotonic() + _DEREGISTER_S
        while self._told and any(self._connection.ask([("LLEN", queue) for queue in self._told])):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)  # a queue has no way to tell that it was emptied

    # --- clients ----------------------------------------------------------------------------------

    def add(self, events_key: str) -> TransportClient:
        """Serve an experiment; it is told of all nodes that are there."""
        if events_key in self._registry.channels:
            raise BugError(f"{events_key} is on the wire already")
        channel = self._registry.channels[events_key] = ExperimentChannel(events_key)
        self._new.append(channel)
        return TransportClient(
            channel,
            self._registry,
            hold=self._hold,
            end_experiment=self._end,
            forget=self._forget,
        )

    def _let_in(self) -> None:
        """Make the streams of new clients, and tell those who is there."""
        while self._new:
            channel = self._new[0]
            self._generation.add(channel.events_key)
            self._reader.watch(channel.events_key)
            self._registry.announce(channel)
            self._note_streams()
            del self._new[0]

    def _hold(self, channel: ExperimentChannel) -> None:
        """Read a client's stream no further, or on."""
        self._reader.hold(channel.events_key, is_held=channel.is_full)

    def _end(self, channel: ExperimentChannel) -> None:
        """Say deregistration for a client; what cannot be said now is said when Redis is back."""
        self._told = [redis_keys.queue(instance_id) for instance_id in self._registry.over(channel)]
        self._drop(channel)
        self._note_streams()
        # Before the orders: a node looks whether its rest is wanted until its last host is gone.
        self.flush()
        self.send()
        self._registry.commands.append(("EXPIRE", channel.events_key, str(_EXPIRES_S)))
        self.flush()

    def _forget(self, channel: ExperimentChannel) -> None:
        self._registry.leave(channel)
        self._drop(channel)

    def _drop(self, channel: ExperimentChannel) -> None:
        self._generation.remove(channel.events_key)
        self._reader.forget(channel.events_key)
        if channel in self._new:
            self._new.remove(channel)

    def _note_streams(self) -> None:
        """Say in Redis which streams are the farm's; the last ones stay until there are others."""
        keys = self._registry.streams
        if self._has_farm and keys:
            self._registry.commands.append(("SET", redis_keys.STREAMS, redis_keys.listed(keys)))

    def _note_signer(self) -> None:
        """Say in Redis which key signs: a worker that does not know it can say so."""
        if self._has_farm:
            signer = self._signing.signer
            noted = ("SET", redis_keys.SIGNS, signer) if signer else ("DEL", redis_keys.SIGNS)
            self._registry.commands.append(noted)

    # --- nodes ------------------------------------------------------------------------------------

    def retire(self, instance_id: str, reason: str) -> None:
        """Have a node save what it hosts, and end; every experiment is told when it has."""
        self._registry.retire(instance_id, reason)

    # --- orders -----------------------------------------------------------------------------------

    def send(self) -> None:
        """Send each node whose orders changed its new assignment, now or when Redis is back."""
        if self.is_away:
            return
        try:
            self._send_changed()
        except TransportError as error:
            self._redis.lost(error)

    def _send_changed(self) -> None:
        for node in self._registry.nodes.values():
            if node.desired_state.is_changed and node.takes_orders:
                self._send_orders(node.desired_state)

    def flush(self) -> None:
        """Tell Redis now what else there is to tell; `poll` would."""
        if not self.is_away:
            try:
                self._post_commands()
            except TransportError as error:
                self._redis.lost(error)

    def announce(self, command: RedisCommand) -> None:
        """Have a command of our owner's done, unless the nodes are another's.

        Raises:
            WireUnavailable: Redis is away; it will not be done.
        """
        if self.is_away:
            raise RedisUnavailable(*self._redis.notes())
        self._registry.commands.append(command)
        self.flush()

    def _send_orders(self, desired_state: DesiredState, *, again: bool = False) -> None:
        assignment = desired_state.same_assignment() if again else desired_state.next_assignment()
        instance_id = desired_state.instance_id
        payload = self._signing.command(instance_id, m.encode(assignment))
        failpoint("orders.before_send")
        try:
            self._redis.publisher.publish(
                instance_id, f"{instance_id}/{desired_state.stamp}", payload
            )
            failpoint("orders.after_send")
        except RedisUnavailable:
            desired_state.is_changed = True
            raise
        except RedisFull as error:
            desired_state.is_changed = True
            self._is_full(error)
            return
        self._registry.commands += (
            ("EXPIRE", redis_keys.queue(instance_id), str(_EXPIRES_S)),
            ("HSET", redis_keys.reply(instance_id), "v", desired_state.stamp),
        )

    # --- facts ------------------------------------------------------------------------------------

    def poll(self, timeout: float, also: Collection[int] = ()) -> set[int]:
        """Wait until a client has facts, for up to ``timeout`` seconds, or until `wake`.

        While there are some that were not taken, by one that is not full, this waits for nothing.

        Args:
            also: descriptors; one that is readable ends the wait, too.

        Returns:
            Those of ``also`` that are readable.

        Raises:
            WireUnavailable: the embedded farm cannot be brought back to life.
            SchedulerSuperseded: the farm is another's.
        """
        deadline = time.monotonic() + timeout
        watched = (self._wake_reader, *also)
        while True:
            self._attend()
            ready = self._wait(deadline, watched)
            if self._registry.has_events or ready or time.monotonic() >= deadline:
                return ready - {self._wake_reader}

    def wake(self) -> None:
        """Make a waiting `poll` return at once; for any thread or signal handler."""
        try:
            os.write(self._wake_writer, b"!")
        except OSError:  # full: it wakes already; or closed: nobody waits
            return

    def _attend(self) -> None:
        """Do what is due: link, send what waits, look at leases, ask for entries."""
        if self._guard is not None:
            self._guard.check_known()  # one that has nothing to journal would not look
        now = time.monotonic()
        if self.is_away and now < self._redis.retry_due:
            return
        if now >= self._poll_due:
            self._redis.ask_backing()
        try:
            if self.is_away:
                self._link()
                self._post_commands()  # a deregistration may be among them; see `_end`
                self._send_changed()
                self._connection.ask([])  # what was posted was done, too
                self._redis.is_back()
            self._let_in_if_memory_is_free()
            if now >= self._poll_due:
                self._poll_due = now + _POLL_INTERVAL_S
                self._look()
            self._post_commands()
            self._reader.ask()
        except TransportError as error:
            self._redis.lost(error)

    def _wait(self, deadline: float, watched: Collection[int]) -> set[int]:
        """Wait for entries, for others who are watched, or for what is due next."""
        due = self._redis.retry_due if self.is_away else self._poll_due
        pause = 0.0 if self._registry.has_events else min(deadline, due) - time.monotonic()
        has_entries, ready = self._reader.wait(pause, watched)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        if has_entries:
            try:
                taken = self._reader.take()
                self._decoder.removed(self._reader.removed)
                gone = self._generation.exhausted(taken)
                self._take(self._decoder.without(gone, taken))
                self._admit()  # before the gaps: events of a node that joins now were ignored
                gone += self._registry.gaps
                if gone:
                    self._generation.renew(gone)
                    self._begin_generation()
            except TransportError as error:
                self._redis.lost(error)
        return ready

    def _take(self, taken: dict[bytes, list[StreamEntry]]) -> None:
        self._decoder.registrations(taken.pop(redis_keys.NODES.encode(), ()))
        for key, entries in taken.items():
            self._decoder.batches(self._registry.channels[key.decode()], entries)
        for instance_id, why in self._decoder.departed(self._unread()).items():
            if why == redis_keys.STARTED_AGAIN:
                self._excuse(instance_id)
            self._registry.lose(instance_id, why, is_dead=True)

    def _unread(self) -> list[bytes]:
        """Of the streams that are not read, or not now, the newest entries that were."""
        is_one_unread = (
            bool(self._new) or not self._registry.absent <= self._registry.channels.keys()
        )
        return self._reader.unread + [b"0-0"] * is_one_unread

    def _excuse(self, instance_id: str) -> None:
        node = self._registry.nodes.get(instance_id)
        if self._backing is not None and node is not None and not node.desired_state.is_empty:
            self._backing.excuse_node()

    def _admit(self) -> None:
        """Look at leases out of turn if a node waits to be announced: it can have work at once."""
        if any(node.is_awaited for node in self._registry.nodes.values()):
            self._check_leases()

    # --- for people -------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether nobody can be told anything."""
        return self._redis.is_away

    @property
    def full_s(self) -> float:
        """For how many seconds Redis, which is there, has refused what needs memory."""
        return 0.0 if self.is_away else self._redis_memory.full_s

    def trial_count(self, instance_id: str) -> int:
        """How many trials a node is to host, of all experiments."""
        node = self._registry.nodes.get(instance_id)
        return node.desired_state.trial_count if node is not None else 0

    def node_metrics(self, instance_id: str) -> NodeMetrics:
        """What a node said last of its machine."""
        node = self._registry.nodes.get(instance_id)
        return node.node_metrics if node is not None else NodeMetrics()

    def silence_s(self, instance_id: str) -> float:
        """How long a node was not heard, as far as we looked."""
        return self._registry.silence_s(instance_id)

    def notes(self) -> list[str]:
        """While Redis is away or full, that it is."""
        return self._redis.notes() or self._redis_memory.notes()

    def notices(self) -> list[str]:
        """What happened to nodes, and to an embedded farm, since the last call."""
        notices, self._registry.notices = self._registry.notices + self._redis_memory.notices(), []
        notices += self.rejections.notices() + self._redis.notices
        self._redis.notices = []
        return notices + self._backing.notices() if self._backing is not None else notices

    # --- the link to Redis ------------------------------------------------------------------------

    def _link(self) -> None:
        """(Re)connect, and repeat what may have been lost."""
        self._connection.connect()
        try:
            self._link_anew()
        except RedisFull:
            if not self._generation.begun:  # nothing there is known to us, and nodes say it again
                self._connection.ask([("DEL", redis_keys.GENERATION, redis_keys.NODES)])
            raise

    def _link_anew(self) -> None:
        clear_wrong_types(self._connection, self._types(), self.rejections.add)
        self._let_in()
        if not self._generation.begun:
            # Nodes that see a new generation answer at once, so that they are heard as soon.
            self._pose_challenge()
            self._post_commands()
        if self._generation.begins_with_link(self._signing.signer):
            self._begin_generation()
        self._registry.start_anew()
        self._reader.ask()
        if self._guard is not None and not self._has_farm:
            self._connection.ask([self._guard.taking(self._registry.streams)])
            self._has_farm = True
        self._note_signer()

    def _types(self) -> dict[str, KeyType]:
        """The keys that we or our nodes read, and what each is."""
        streams = [redis_keys.NODES, *self._registry.channels]
        nodes = self._registry.nodes
        return {
            **dict.fromkeys((redis_keys.GENERATION, redis_keys.SIGNS), KeyType.STRING),
            **dict.fromkeys(streams, KeyType.STREAM),
            **{redis_keys.reply(instance_id): KeyType.HASH for instance_id in nodes},
            **{redis_keys.queue(instance_id): KeyType.LIST for instance_id in nodes},
        }

    def _let_in_if_memory_is_free(self) -> None:
        try:
            self._let_in()
        except RedisFull as error:
            self._is_full(error)

    def _begin_generation(self, why: str = "Redis lost data") -> None:
        """The wire is new to us: read from the beginning, tell everybody everything."""
        if self._generation.begun > 1:
            self._registry.notices.append(f"{why}; what was not recorded yet is sent again.")
        self._registry.begin_anew()
        self._note_streams()
        self._note_signer()
        self._reader.rewind()

    def _look(self) -> None:
        """Twice a second: the keys, the leases, and who has not taken their newest orders."""
        self._check_keys()
        self._check_leases()
        self._pose_challenge()
        for node in self._registry.nodes.values():
            desired_state = node.desired_state
            if not node.takes_orders:
                continue
            if desired_state.is_changed or desired_state.is_outdated:
                self._send_orders(desired_state)
            elif desired_state.renewals_unconfirmed >= _RENEWALS_UNTIL_RESENT:
                self._send_orders(desired_state, again=True)

    def _pose_challenge(self) -> None:
        """Each time, so that it stands there again soon wherever Redis lost it."""
        self._registry.commands += self._signing.challenge(time.monotonic())

    def _check_keys(self) -> None:
        """Where there are others, say again what we said; have nodes that were refused do so."""
        if line := self._signing.keys.look():
            self._registry.notices.append(line)
        are_changed, were_rejected = self._signing.are_changed()
        if not are_changed:
            return
        self._registry.say_again()
        self._note_signer()
        if were_rejected:
            self._generation.renew()
            self._begin_generation("Keys were changed, and nodes had been refused")
        self._signing.change_is_told()

    def _check_leases(self) -> None:
        leases, node_metrics = self._registry.lease_keys(), self._node_metrics_keys()
        commands = [PROBE, *self._generation.questions]
        commands += [("MGET", *leases, *node_metrics)] if leases else []
        try:
            _, *answers = self._connection.ask(commands)
        except RedisFull as error:
            self._is_full(error)
            return
        except ReplyTooLong:
            self._drop_leases([*leases, *node_metrics])
            raise
        if self._redis_memory.is_back():
            self._registry.start_anew()
        if self._generation.begins(answers[:QUESTIONS]):
            self._begin_generation()
        for values in answers[QUESTIONS:]:
            nodes = list(self._registry.nodes)
            said = zip(nodes, values[len(leases) :], strict=True) if node_metrics else ()
            for instance_id, value in said:
                self._registry.read_node_metrics(
                    instance_id, self._signing.node_metrics(instance_id, value)
                )
            renewed = dict(zip(nodes, values[: len(leases)], strict=True))
            self._registry.read_leases(time.monotonic(), self._signing.leases(renewed))

    def _drop_leases(self, keys: list[str]) -> None:
        """Delete what is too long to be looked at; nodes write theirs again within a second."""
        self._connection.connect()
        self._connection.ask([("DEL", *keys)] if keys else [])
        text = "Leases of nodes were longer than there is memory for: they are deleted."
        self.rejections.add("lease", "oversized", text)

    def _node_metrics_keys(self) -> list[str]:
        """Those to be looked at now: what they say is new once a second, and only for people."""
        now = time.monotonic()
        if not self._wants_node_metrics or now < self._node_metrics_due:
            return []
        self._node_metrics_due = now + redis_keys.LEASE_PERIOD_S
        return self._registry.node_metrics_keys()

    def _post_commands(self) -> None:
        if self._registry.commands:
            commands = self._signing.replies(self._registry.commands)
            try:
                self._redis.post(commands)
            except RedisFull as error:  # those before: what they said is said again when it may
                self._is_full(error)
                self._redis.post(commands)
            self._registry.commands = []

    def _is_full(self, error: TransportError) -> None:
        """Redis takes nothing; no lease either, so nobody's silence means anything."""
        self._redis_memory.is_used_up(error)
        self._registry.forget_silence()
