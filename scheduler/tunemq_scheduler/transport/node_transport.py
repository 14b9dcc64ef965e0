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
_LOOK_EVERY_S: Final = redis_keys.LEASE_PERIOD_S / 2
#: An order that was not confirmed by the first renewal after it was sent is sent again: it may have
#: died with the ear that had read it. One that was only on its way does no harm twice.
_RENEWALS_UNTIL_RESENT: Final = 1
#: What a dead incarnation would have fetched, or a finished experiment's node appended, goes after
#: so long.
_EXPIRES_S: Final = 60
#: How long `close` waits for nodes to fetch the news that nothing is wanted any more.
_GOODBYE_S: Final = 1.5


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
        wants_vitals: whether anybody asks for `vitals`.
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
        wants_vitals: bool = False,
        keys: LiveKeys | None = None,
        store: str = "",
    ) -> None:
        self._wants_vitals, self._vitals_due = wants_vitals, 0.0
        #: What nodes said and was not believed.
        self.refusals = RejectionCounter()
        self._seals = SchedulerSigning(keys, self.refusals)
        self._roster = NodeRegistry(term, absent, self.refusals, store)
        self._guard, self._backing = guard, backing
        self._connect_within = connect_within
        self._redis = RedisLink(url, guard, backing)
        self._line, self._reader = self._redis.line, self._redis.reader
        self._reader.watch(redis_keys.NODES)
        self._generation = RedisGeneration(self._line)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        #: Clients whose streams are not there yet.
        self._new: list[ExperimentChannel] = []
        self._intake = StreamDecoder(self._roster, self._seals)
        #: Nodes that were sent a goodbye.
        self._told: list[str] = []
        self._look_due = 0.0
        self._room = RedisMemory()
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
            now: do not wait until nodes have read what the goodbyes of clients are to them.
        """
        if self._wake_writer < 0:
            return
        try:
            if not now and not self.is_away:
                self._wait_for_goodbyes()
        except TransportError:
            pass  # a node that does not read it gives up an experiment whose scheduler has ended
        finally:
            self._redis.close()
            descriptors = self._wake_reader, self._wake_writer
            self._wake_reader = self._wake_writer = -1
            for descriptor in descriptors:
                os.close(descriptor)

    def _wait_for_goodbyes(self) -> None:
        deadline = time.monotonic() + _GOODBYE_S
        while self._told and any(self._line.ask([("LLEN", queue) for queue in self._told])):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)  # a queue has no way to tell that it was emptied

    # --- clients ----------------------------------------------------------------------------------

    def add(self, events_key: str) -> TransportClient:
        """Serve an experiment; it is told of all nodes that are there."""
        if events_key in self._roster.tenants:
            raise BugError(f"{events_key} is on the wire already")
        tenant = self._roster.tenants[events_key] = ExperimentChannel(events_key)
        self._new.append(tenant)
        return TransportClient(
            tenant,
            self._roster,
            hold=self._hold,
            say_goodbye=self._end,
            forget=self._forget,
        )

    def _let_in(self) -> None:
        """Make the streams of new clients, and tell those who is there."""
        while self._new:
            tenant = self._new[0]
            self._generation.add(tenant.events_key)
            self._reader.watch(tenant.events_key)
            self._roster.announce(tenant)
            self._note_streams()
            del self._new[0]

    def _hold(self, tenant: ExperimentChannel) -> None:
        """Read a client's stream no further, or on."""
        self._reader.hold(tenant.events_key, is_held=tenant.is_full)

    def _end(self, tenant: ExperimentChannel) -> None:
        """Say goodbye for a client; what cannot be said now is said when Redis is back."""
        self._told = [redis_keys.queue(incarnation) for incarnation in self._roster.over(tenant)]
        self._drop(tenant)
        self._note_streams()
        # Before the orders: a node looks whether its rest is wanted until its last host is gone.
        self.flush()
        self.send()
        self._roster.commands.append(("EXPIRE", tenant.events_key, str(_EXPIRES_S)))
        self.flush()

    def _forget(self, tenant: ExperimentChannel) -> None:
        self._roster.leave(tenant)
        self._drop(tenant)

    def _drop(self, tenant: ExperimentChannel) -> None:
        self._generation.remove(tenant.events_key)
        self._reader.forget(tenant.events_key)
        if tenant in self._new:
            self._new.remove(tenant)

    def _note_streams(self) -> None:
        """Say in Redis which streams are the farm's; the last ones stay until there are others."""
        keys = self._roster.streams
        if self._has_farm and keys:
            self._roster.commands.append(("SET", redis_keys.STREAMS, redis_keys.listed(keys)))

    def _note_signer(self) -> None:
        """Say in Redis which key signs: a worker that does not know it can say so."""
        if self._has_farm:
            signer = self._seals.signer
            noted = ("SET", redis_keys.SIGNS, signer) if signer else ("DEL", redis_keys.SIGNS)
            self._roster.commands.append(noted)

    # --- nodes ------------------------------------------------------------------------------------

    def retire(self, incarnation: str, reason: str) -> None:
        """Have a node save what it hosts, and end; every experiment is told when it has."""
        self._roster.retire(incarnation, reason)

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
        for node in self._roster.nodes.values():
            if node.mailbox.is_changed and node.takes_orders:
                self._send_orders(node.mailbox)

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
        self._roster.commands.append(command)
        self.flush()

    def _send_orders(self, mailbox: DesiredState, *, again: bool = False) -> None:
        assignment = mailbox.same_assignment() if again else mailbox.next_assignment()
        incarnation = mailbox.incarnation
        payload = self._seals.mail(incarnation, m.encode(assignment))
        failpoint("orders.before_send")
        try:
            self._redis.publisher.publish(incarnation, f"{incarnation}/{mailbox.stamp}", payload)
            failpoint("orders.after_send")
        except RedisUnavailable:
            mailbox.is_changed = True
            raise
        except RedisFull as error:
            mailbox.is_changed = True
            self._is_full(error)
            return
        self._roster.commands += (
            ("EXPIRE", redis_keys.queue(incarnation), str(_EXPIRES_S)),
            ("HSET", redis_keys.reply(incarnation), "v", mailbox.stamp),
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
            if self._roster.has_facts or ready or time.monotonic() >= deadline:
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
        if now >= self._look_due:
            self._redis.ask_backing()
        try:
            if self.is_away:
                self._link()
                self._post_commands()  # a goodbye may be among them; see `_end`
                self._send_changed()
                self._line.ask([])  # what was posted was done, too
                self._redis.is_back()
            self._let_in_if_there_is_room()
            if now >= self._look_due:
                self._look_due = now + _LOOK_EVERY_S
                self._look()
            self._post_commands()
            self._reader.ask()
        except TransportError as error:
            self._redis.lost(error)

    def _wait(self, deadline: float, watched: Collection[int]) -> set[int]:
        """Wait for entries, for others who are watched, or for what is due next."""
        due = self._redis.retry_due if self.is_away else self._look_due
        pause = 0.0 if self._roster.has_facts else min(deadline, due) - time.monotonic()
        has_entries, ready = self._reader.wait(pause, watched)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        if has_entries:
            try:
                taken = self._reader.take()
                self._intake.removed(self._reader.removed)
                gone = self._generation.exhausted(taken)
                self._take(self._intake.without(gone, taken))
                self._admit()  # before the gaps: events of a node that joins now were ignored
                gone += self._roster.gaps
                if gone:
                    self._generation.renew(gone)
                    self._begin_generation()
            except TransportError as error:
                self._redis.lost(error)
        return ready

    def _take(self, taken: dict[bytes, list[StreamEntry]]) -> None:
        self._intake.introductions(taken.pop(redis_keys.NODES.encode(), ()))
        for key, entries in taken.items():
            self._intake.batches(self._roster.tenants[key.decode()], entries)
        for incarnation, why in self._intake.departed(self._unread()).items():
            if why == redis_keys.STARTED_AGAIN:
                self._excuse(incarnation)
            self._roster.lose(incarnation, why, is_dead=True)

    def _unread(self) -> list[bytes]:
        """Of the streams that are not read, or not now, the newest entries that were."""
        is_one_unread = bool(self._new) or not self._roster.absent <= self._roster.tenants.keys()
        return self._reader.unread + [b"0-0"] * is_one_unread

    def _excuse(self, incarnation: str) -> None:
        node = self._roster.nodes.get(incarnation)
        if self._backing is not None and node is not None and not node.mailbox.is_empty:
            self._backing.excuse_node()

    def _admit(self) -> None:
        """Look at leases out of turn if a node waits to be announced: it can have work at once."""
        if any(node.is_awaited for node in self._roster.nodes.values()):
            self._look_at_leases()

    # --- for people -------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether nobody can be told anything."""
        return self._redis.is_away

    @property
    def full_s(self) -> float:
        """For how many seconds Redis, which is there, has refused what needs memory."""
        return 0.0 if self.is_away else self._room.full_s

    def hosted(self, incarnation: str) -> int:
        """How many trials a node is to host, of all experiments."""
        node = self._roster.nodes.get(incarnation)
        return node.mailbox.hosted if node is not None else 0

    def vitals(self, incarnation: str) -> NodeMetrics:
        """What a node said last of its machine."""
        node = self._roster.nodes.get(incarnation)
        return node.vitals if node is not None else NodeMetrics()

    def silence_s(self, incarnation: str) -> float:
        """How long a node was not heard, as far as we looked."""
        return self._roster.silence_s(incarnation)

    def notes(self) -> list[str]:
        """While Redis is away or full, that it is."""
        return self._redis.notes() or self._room.notes()

    def news(self) -> list[str]:
        """What happened to nodes, and to an embedded farm, since the last call."""
        news, self._roster.news = self._roster.news + self._room.news(), []
        news += self.refusals.news() + self._redis.news
        self._redis.news = []
        return news + self._backing.news() if self._backing is not None else news

    # --- the link to Redis ------------------------------------------------------------------------

    def _link(self) -> None:
        """(Re)connect, and repeat what may have been lost."""
        self._line.connect()
        try:
            self._link_anew()
        except RedisFull:
            if not self._generation.begun:  # nothing there is known to us, and nodes say it again
                self._line.ask([("DEL", redis_keys.GENERATION, redis_keys.NODES)])
            raise

    def _link_anew(self) -> None:
        clear_wrong_types(self._line, self._types(), self.refusals.add)
        self._let_in()
        if not self._generation.begun:
            # Nodes that see a new generation answer at once, so that they are heard as soon.
            self._pose_challenge()
            self._post_commands()
        if self._generation.begins_with_link(self._seals.signer):
            self._begin_generation()
        self._roster.start_anew()
        self._reader.ask()
        if self._guard is not None and not self._has_farm:
            self._line.ask([self._guard.taking(self._roster.streams)])
            self._has_farm = True
        self._note_signer()

    def _types(self) -> dict[str, KeyType]:
        """The keys that we or our nodes read, and what each is."""
        streams = [redis_keys.NODES, *self._roster.tenants]
        nodes = self._roster.nodes
        return {
            **dict.fromkeys((redis_keys.GENERATION, redis_keys.SIGNS), KeyType.STRING),
            **dict.fromkeys(streams, KeyType.STREAM),
            **{redis_keys.reply(incarnation): KeyType.HASH for incarnation in nodes},
            **{redis_keys.queue(incarnation): KeyType.LIST for incarnation in nodes},
        }

    def _let_in_if_there_is_room(self) -> None:
        try:
            self._let_in()
        except RedisFull as error:
            self._is_full(error)

    def _begin_generation(self, why: str = "Redis lost data") -> None:
        """The wire is new to us: read from the beginning, tell everybody everything."""
        if self._generation.begun > 1:
            self._roster.news.append(f"{why}; what was not recorded yet is sent again.")
        self._roster.begin_anew()
        self._note_streams()
        self._note_signer()
        self._reader.rewind()

    def _look(self) -> None:
        """Twice a second: the keys, the leases, and who has not taken their newest orders."""
        self._look_at_keys()
        self._look_at_leases()
        self._pose_challenge()
        for node in self._roster.nodes.values():
            mailbox = node.mailbox
            if not node.takes_orders:
                continue
            if mailbox.is_changed or mailbox.is_outdated:
                self._send_orders(mailbox)
            elif mailbox.renewals_unconfirmed >= _RENEWALS_UNTIL_RESENT:
                self._send_orders(mailbox, again=True)

    def _pose_challenge(self) -> None:
        """Each time, so that it stands there again soon wherever Redis lost it."""
        self._roster.commands += self._seals.challenge(time.monotonic())

    def _look_at_keys(self) -> None:
        """Where there are others, say again what we said; have nodes that were refused do so."""
        if line := self._seals.keys.look():
            self._roster.news.append(line)
        are_changed, were_refused = self._seals.are_changed()
        if not are_changed:
            return
        self._roster.say_again()
        self._note_signer()
        if were_refused:
            self._generation.renew()
            self._begin_generation("Keys were changed, and nodes had been refused")
        self._seals.change_is_told()

    def _look_at_leases(self) -> None:
        leases, vitals = self._roster.lease_keys(), self._vitals_keys()
        commands = [PROBE, *self._generation.questions]
        commands += [("MGET", *leases, *vitals)] if leases else []
        try:
            _, *answers = self._line.ask(commands)
        except RedisFull as error:
            self._is_full(error)
            return
        except ReplyTooLong:
            self._drop_leases([*leases, *vitals])
            raise
        if self._room.is_back():
            self._roster.start_anew()
        if self._generation.begins(answers[:QUESTIONS]):
            self._begin_generation()
        for values in answers[QUESTIONS:]:
            nodes = list(self._roster.nodes)
            said = zip(nodes, values[len(leases) :], strict=True) if vitals else ()
            for incarnation, value in said:
                self._roster.read_vitals(incarnation, self._seals.vitals(incarnation, value))
            renewed = dict(zip(nodes, values[: len(leases)], strict=True))
            self._roster.read_leases(time.monotonic(), self._seals.leases(renewed))

    def _drop_leases(self, keys: list[str]) -> None:
        """Delete what is too long to be looked at; nodes write theirs again within a second."""
        self._line.connect()
        self._line.ask([("DEL", *keys)] if keys else [])
        text = "Leases of nodes were longer than there is memory for: they are deleted."
        self.refusals.add("lease", "oversized", text)

    def _vitals_keys(self) -> list[str]:
        """Those to be looked at now: what they say is new once a second, and only for people."""
        now = time.monotonic()
        if not self._wants_vitals or now < self._vitals_due:
            return []
        self._vitals_due = now + redis_keys.LEASE_PERIOD_S
        return self._roster.vitals_keys()

    def _post_commands(self) -> None:
        if self._roster.commands:
            commands = self._seals.replies(self._roster.commands)
            try:
                self._redis.post(commands)
            except RedisFull as error:  # those before: what they said is said again when it may
                self._is_full(error)
                self._redis.post(commands)
            self._roster.commands = []

    def _is_full(self, error: TransportError) -> None:
        """Redis takes nothing; no lease either, so nobody's silence means anything."""
        self._room.is_used_up(error)
        self._roster.forget_silence()
