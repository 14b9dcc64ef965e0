"""`NodeTransport`: connects any number of experiments to their nodes, through Redis.

A node's orders are kept as its *desired state* and sent complete, as one Celery task for each node
whose orders changed in a turn. One rule handles lost, repeated and reordered messages: the
transport sends the newest version again to a node that has not confirmed it. Events come back
through one stream per experiment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from typing import Final

from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.experiment_transport import TransportClient
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_scheduler.transport.nodes.stream_decoder import StreamDecoder
from tunemq_scheduler.transport.redis.key_types import KeyType, clear_wrong_types
from tunemq_scheduler.transport.redis.redis_connection import (
    PROBE,
    RedisCommand,
    RedisFull,
    ReplyTooLong,
)
from tunemq_scheduler.transport.redis.redis_generation import QUESTIONS, RedisGeneration
from tunemq_scheduler.transport.redis.redis_link import (
    RETRY_EVERY_S,
    EmbeddedServices,
    LeaseGuard,
    RedisLink,
)
from tunemq_scheduler.transport.redis.stream_reader import StreamEntry
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.base.errors import BugError, RedisUnavailable, TransportError
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.rejection_counter import RejectionCounter
from tunemq_shared.signing.live_keys import LiveKeys

#: The interval at which leases and the generation are polled.
_POLL_INTERVAL_S: Final = redis_keys.LEASE_PERIOD_S / 2
#: Messages for a dead instance, and events of a node after its experiment ended, expire after this.
_EXPIRES_S: Final = 60
#: How long `close` waits for nodes to fetch their deregistrations.
_DEREGISTER_S: Final = 1.5


class NodeTransport:
    """The nodes of one Redis, and the experiments that they work for.

    Args:
        url: the Redis address: ``unix://``, ``redis://`` or ``rediss://``.
        term: greater than the term of every scheduler that these nodes obeyed before.
        guard: allows writes to Redis only while it holds the farm's lease.
        backing: the embedded services; polled for failures and notices.
        connect_within: for how many seconds `open` tries to reach Redis.
        absent: event keys of experiments that may have trials on nodes and will be added later;
            until then, nodes keep running these.
        keys: the farm's keys; None if messages are not signed.
        store: the farm's remote store, which each node should try once.
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
        keys: LiveKeys | None = None,
        store: str = "",
    ) -> None:
        self._node_metrics_due = 0.0
        #: Messages of nodes that were rejected.
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
        #: Experiments whose streams do not exist yet.
        self._new: list[ExperimentChannel] = []
        self._decoder = StreamDecoder(self._registry, self._signing)
        #: Command queues of nodes that were sent a deregistration.
        self._told: list[str] = []
        self._poll_due = 0.0
        #: Whether this scheduler owns the farm's streams.
        self._has_farm = False

    # --- beginning and end ------------------------------------------------------------------------

    def open(self) -> None:
        """Connect to Redis, and create the streams of the experiments added so far.

        If a farm's Redis is full, this returns, too; Redis then counts as away until it has memory.

        Raises:
            RedisUnavailable: Redis cannot be reached within ``connect_within`` seconds.
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
                time.sleep(RETRY_EVERY_S)  # the loop has nothing else to do yet
            else:
                return

    def close(self, *, now: bool = False) -> None:
        """Close the connections.

        Args:
            now: do not wait until nodes have read the deregistrations of experiments.
        """
        if self._wake_writer < 0:
            return
        try:
            if not now and not self.is_away:
                self._wait_for_deregistrations()
        except TransportError:
            pass  # such a node gives up an experiment whose scheduler has ended
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
            time.sleep(0.002)  # Redis cannot report that a list was emptied

    # --- experiments ------------------------------------------------------------------------------

    def add(self, events_key: str) -> TransportClient:
        """Add an experiment; its client receives all live nodes as events."""
        if events_key in self._registry.channels:
            raise BugError(f"{events_key} is registered already")
        client = self._registry.channels[events_key] = TransportClient(
            events_key,
            self._registry,
            hold=self._hold,
            end_experiment=self._end,
            forget=self._forget,
        )
        self._new.append(client)
        return client

    def _let_in(self) -> None:
        """Create the streams of new experiments, and announce the live nodes to them."""
        while self._new:
            channel = self._new[0]
            self._generation.add(channel.events_key)
            self._reader.watch(channel.events_key)
            self._registry.announce(channel)
            self._note_streams()
            del self._new[0]

    def _hold(self, channel: ExperimentChannel) -> None:
        """Stop or continue reading an experiment's stream."""
        self._reader.hold(channel.events_key, is_held=channel.is_full)

    def _end(self, channel: ExperimentChannel) -> None:
        """Deregister an experiment; while Redis is away, this waits until it is back."""
        self._told = [redis_keys.queue(instance_id) for instance_id in self._registry.over(channel)]
        self._drop(channel)
        self._note_streams()
        # Flush before the orders: until its last trial process has ended, a node checks whether its
        # remaining events are wanted.
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
        """Publish the keys of the farm's streams; keep the last ones until there are others."""
        keys = self._registry.streams
        if self._has_farm and keys:
            self._registry.commands.append(("SET", redis_keys.STREAMS, redis_keys.listed(keys)))

    def _note_signer(self) -> None:
        """Publish in Redis which key signs, so that a worker can report an unknown key."""
        if self._has_farm:
            signer = self._signing.signer
            noted = ("SET", redis_keys.SIGNS, signer) if signer else ("DEL", redis_keys.SIGNS)
            self._registry.commands.append(noted)

    # --- nodes ------------------------------------------------------------------------------------

    def retire(self, instance_id: str, reason: str) -> None:
        """Order a node to save its trials and end; every experiment sees it as lost afterwards."""
        self._registry.retire(instance_id, reason)

    # --- orders -----------------------------------------------------------------------------------

    def send(self) -> None:
        """Send a new assignment to each node whose orders changed, now or when Redis is back."""
        if self.is_away:
            return
        try:
            self._send_changed()
        except TransportError as error:
            self._redis.lost(error)

    def _send_changed(self) -> None:
        for node in self._registry.nodes.values():
            if node.desired_state.is_due and node.takes_orders:
                self._send_orders(node.desired_state)

    def flush(self) -> None:
        """Send waiting commands to Redis now; `poll` would do so later."""
        if not self.is_away:
            try:
                self._post_commands()
            except TransportError as error:
                self._redis.lost(error)

    def announce(self, command: RedisCommand) -> None:
        """Run a command of the supervisor, if this scheduler still holds the lease.

        Raises:
            RedisUnavailable: Redis is away; the command will not be run.
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

    # --- events -----------------------------------------------------------------------------------

    def poll(self, timeout: float, also: Collection[int] = ()) -> set[int]:
        """Wait until an experiment has events, for up to ``timeout`` seconds, or until `wake`.

        Does not wait while an experiment that is not full has events to take.

        Args:
            timeout: the longest wait, in seconds.
            also: further descriptors; a readable one ends the wait, too.

        Returns:
            The readable descriptors of ``also``.

        Raises:
            RedisUnavailable: the embedded farm has failed for good.
            SchedulerSuperseded: another scheduler took over the farm.
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
        except OSError:  # full: it wakes anyway; or closed: `poll` has ended
            return

    def _attend(self) -> None:
        """Do all due work: connect, send waiting commands, check leases, request entries."""
        if self._guard is not None:
            self._guard.check_known()  # an experiment without new events would not check
        now = time.monotonic()
        if self.is_away and now < self._redis.retry_due:
            return
        if now >= self._poll_due:
            self._redis.ask_backing()
        try:
            if self.is_away:
                self._link()
                self._post_commands()  # they may contain a deregistration; see `_end`
                self._send_changed()
                self._connection.ask([])  # confirms that Redis ran the posted commands
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
        """Wait for entries, for other descriptors, or for the next due time."""
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
                gaps = self._registry.gaps
                if gone or gaps:
                    self._generation.renew(gone + gaps)
                    also = ", or the copy of a journal lacks turns" if gaps else ""
                    self._begin_generation(f"Redis lost data{also}")
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
        """Return the newest read entry of each stream that is held or not read yet."""
        is_one_unread = (
            bool(self._new) or not self._registry.absent <= self._registry.channels.keys()
        )
        return self._reader.unread + [b"0-0"] * is_one_unread

    def _excuse(self, instance_id: str) -> None:
        node = self._registry.nodes.get(instance_id)
        if self._backing is not None and node is not None and not node.desired_state.is_empty:
            self._backing.excuse_node()

    def _admit(self) -> None:
        """Poll leases early if a node waits to be announced, so that it gets work at once."""
        if any(node.is_awaited for node in self._registry.nodes.values()):
            self._check_leases()

    # --- for people -------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether Redis cannot be reached."""
        return self._redis.is_away

    @property
    def full_s(self) -> float:
        """For how many seconds Redis has been full; 0 if it is not."""
        return 0.0 if self.is_away else self._redis.full_s

    def trial_count(self, instance_id: str) -> int:
        """How many trials of all experiments a node should run."""
        node = self._registry.nodes.get(instance_id)
        return node.desired_state.trial_count if node is not None else 0

    def obeys_later(self, instance_id: str) -> bool:
        """Whether a node rejects all orders, because it obeyed a scheduler of a later term."""
        node = self._registry.nodes.get(instance_id)
        return node is not None and node.obeys_later

    def node_metrics(self, instance_id: str) -> NodeMetrics:
        """Return a node's last metrics."""
        node = self._registry.nodes.get(instance_id)
        return node.node_metrics if node is not None else NodeMetrics()

    def silence_s(self, instance_id: str) -> float:
        """Return for how many seconds a node has been silent, counting only polled time."""
        return self._registry.silence_s(instance_id)

    def notes(self) -> list[str]:
        """Return whether Redis is away or full, as text."""
        return self._redis.notes()

    def notices(self) -> list[str]:
        """Return what happened to nodes and to an embedded farm since the last call."""
        notices = self._registry.notices + self.rejections.notices() + self._redis.notices
        self._registry.notices, self._redis.notices = [], []
        return notices + self._backing.notices() if self._backing is not None else notices

    # --- the link to Redis ------------------------------------------------------------------------

    def _link(self) -> None:
        """Connect or reconnect, and repeat messages that may have been lost."""
        self._connection.connect()
        try:
            self._link_anew()
        except RedisFull:
            if not self._generation.begun:  # nothing was read yet; nodes send it again
                self._connection.ask([("DEL", redis_keys.GENERATION, redis_keys.NODES)])
            raise

    def _link_anew(self) -> None:
        clear_wrong_types(self._connection, self._types(), self.rejections.add)
        self._let_in()
        if not self._generation.begun:
            # A new generation makes nodes register at once, so the challenge must be there before.
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
        """Return the keys that schedulers or nodes read, with their types."""
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

    def _begin_generation(self, why: str = "Redis has restarted or lost data") -> None:
        """Restart with an empty transport: read from the beginning and resend everything."""
        if self._generation.begun > 1:
            self._registry.notices.append(f"{why}; what was not recorded yet is sent again.")
        self._registry.begin_anew()
        self._note_streams()
        self._note_signer()
        self._reader.rewind()

    def _look(self) -> None:
        """Check the keys, the leases and unconfirmed orders; runs twice a second."""
        self._check_keys()
        self._check_leases()
        self._pose_challenge()
        for node in self._registry.nodes.values():
            desired_state = node.desired_state
            if not node.takes_orders:
                continue
            desired_state.is_changed |= desired_state.is_outdated
            if desired_state.is_due:
                self._send_orders(desired_state)
            elif desired_state.is_lost:
                self._send_orders(desired_state, again=True)

    def _pose_challenge(self) -> None:
        """Publish the challenge each time, so that it returns soon after Redis lost it."""
        self._registry.commands += self._signing.challenge(time.monotonic())

    def _check_keys(self) -> None:
        """After a change of keys, resend all messages, and let rejected nodes resend theirs."""
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
        if self._redis.has_room():
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
        """Delete leases that are too long to read; nodes write theirs again within a second."""
        self._connection.connect()
        self._connection.ask([("DEL", *keys)] if keys else [])
        text = "Leases of nodes were longer than there is memory for: they are deleted."
        self.rejections.add("lease", "oversized", text)

    def _node_metrics_keys(self) -> list[str]:
        """Return the metrics keys to read now: once per lease period."""
        now = time.monotonic()
        if now < self._node_metrics_due:
            return []
        self._node_metrics_due = now + redis_keys.LEASE_PERIOD_S
        return self._registry.node_metrics_keys()

    def _post_commands(self) -> None:
        if self._registry.commands:
            commands = self._signing.replies(self._registry.commands)
            try:
                self._redis.post(commands)
            except RedisFull as error:  # those before it are sent again once Redis has memory
                self._is_full(error)
                self._redis.post(commands)
            self._registry.commands = []

    def _is_full(self, error: TransportError) -> None:
        """Record that Redis is full: it rejects leases too, so silence proves nothing."""
        self._redis.is_used_up(error)
        self._registry.forget_silence()
