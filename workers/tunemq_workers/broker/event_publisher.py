"""`EventPublisher`: the thread that writes a node's events to Redis and renews its lease.

The node's loop sends it orders and reads its reports. The thread holds none of the node's state, so
a lost connection costs only time. Once a second (every 50 ms when events pile up) it renews the
lease and reads the scheduler's reply. While Redis is unreachable it keeps trying to connect and
answers orders with `AppendFailed`.

It appends batches in a transaction that Redis aborts if the generation in Redis has changed: an
event behind a gap in a recreated stream would be worse than none. Scripts would also be atomic, but
a worker that may run scripts can exploit every weakness of Redis' Lua. The generation key stays
watched from one transaction to the next, so each transaction takes one round trip.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.errors import RedisRejectsUser, RedisUnavailable
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.broker import redis_keys
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_workers.broker import publisher_messages as messages
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.broker.redis_client import (
    RedisClient,
    RedisCommand,
    RedisCommandError,
    RedisReply,
    user_rejected,
)
from tunemq_workers.system.trial_user import own_files

#: The lease's period in seconds while the node waits for the scheduler's reply.
HURRIED_PERIOD_S: Final = 0.05
#: Seconds after which a loop that handles no report counts as hung; its lease is then not renewed.
LOOP_HANGS_S: Final = 30.0
#: Seconds between attempts to reach Redis: the first pause and the longest, before jitter. They
#: stay short in long outages, because an attempt is cheap and much work may wait for Redis.
_RETRY_S: Final = (0.05, 0.25)
#: Seconds for which the command queue of a node that died without deregistering stays in Redis.
_UNREAD_COMMAND_S: Final = 60
_LEASE_TTL_MS: Final = int(redis_keys.LEASE_TTL_S * 1_000)
#: The fields of a reply besides the acknowledgements of streams.
_ANSWERS: Final = ("v", "f", "r")
#: Numbers in a reply have fewer digits than this.
_DIGITS: Final = 20
#: The replies to the last two commands tell which generation is watched.
_WATCH: Final[tuple[RedisCommand, ...]] = (
    ["WATCH", redis_keys.GENERATION],
    ["GET", redis_keys.GENERATION],
)
#: Ends an earlier watch. A user without the right to transactions gets an error here, before any
#: event is sent.
_WATCH_ANEW: Final[tuple[RedisCommand, ...]] = (["MULTI"], ["EXEC"], *_WATCH)
_WAS_RESET: Final = "Redis was reset"
#: For each order, the failpoints at which tests kill the node: before the order is sent, and after
#: Redis has it but before the node knows.
_FAILPOINTS: Final[Mapping[type, tuple[str, str]]] = {
    messages.AppendBatches: ("events.before_send", "events.after_send"),
    messages.Register: ("hello.before_send", "hello.after_send"),
    messages.Deregister: ("deregistration.before_send", "deregistration.after_send"),
}

_log = logging.getLogger(__name__)


class EventPublisher:
    """Write to Redis in a thread: `start` begins it, `order` queues an order for it.

    Args:
        address: the address of Redis.
        instance_id: the node instance whose lease to renew.
        post: takes reports; called in the publisher's thread, must not block.
        node_metrics: returns the encoded node metrics, once a second; called in the publisher's
            thread, must not block.
        signing: signs messages to the scheduler and verifies messages from it.
    """

    def __init__(
        self,
        address: RedisAddress,
        instance_id: str,
        post: Callable[[messages.PublisherReport], None],
        node_metrics: Callable[[], bytes] | None = None,
        signing: NodeSigning | None = None,
    ) -> None:
        #: Set by the loop: the (term, version) of the newest accepted assignment.
        self.confirmed = (0, 0)
        #: Set by the loop: the streams whose acknowledgements it needs.
        self.keys: tuple[str, ...] = ()
        #: Set by the loop: whether it needs the scheduler's reply often.
        self.is_hurried = True
        self._address, self._node_metrics = address, node_metrics
        self._take_report = post
        #: Time since which a report waits for the loop; None if the loop handled all.
        self._untaken_since: float | None = None
        self._says_hang = False
        self._signing = NodeSigning(instance_id) if signing is None else signing
        self._orders: queue.SimpleQueue[messages.PublisherOrder] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="event publisher", daemon=True)
        self._client: RedisClient | None = None
        #: The generation at the moment when the client began to watch it; None while it does not.
        self._watched: bytes | None = None
        self._instance_id = instance_id
        self._lease, self._reply = redis_keys.lease(instance_id), redis_keys.reply(instance_id)
        self._queue = redis_keys.queue(instance_id)
        self._node_metrics_key, self._node_metrics_due = redis_keys.node_metrics(instance_id), 0.0
        self._renewals = 0
        self._looked_at = float("-inf")
        self._failures = 0
        #: The reason that the newest `RedisLost` gave.
        self._told = ""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def order(self, order: messages.PublisherOrder) -> None:
        """Queue an order."""
        self._orders.put(order)

    def reports_handled(self) -> None:
        """Note that the loop handles reports; the loop calls this."""
        self._untaken_since = None

    def join(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds for the thread, which ends after `Deregister`."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        order: messages.PublisherOrder | None = None
        with own_files():  # for access to Redis' Unix socket and certificates
            while not isinstance(order, messages.Deregister):
                try:
                    order = self._orders.get(timeout=self._pause())
                except queue.Empty:
                    order = None
                try:
                    self._turn(order)
                except RedisUnavailable as problem:
                    self._lost(order, problem)

    def _pause(self) -> float:
        """Return the seconds until the thread has to act without an order."""
        if self._failures:
            jitter = 0.5 + os.urandom(1)[0] / 512
            return backoff_s(self._failures - 1, *_RETRY_S) * jitter
        period = HURRIED_PERIOD_S if self.is_hurried else redis_keys.LEASE_PERIOD_S
        return max(0.0, self._looked_at + period - time.monotonic())

    def _turn(self, order: messages.PublisherOrder | None) -> None:
        """Carry out ``order``, and renew the lease if that is due, in one round trip."""
        if self._client is None:
            self._client = RedisClient(self._address)
            self._looked_at, self._watched = float("-inf"), None
        if isinstance(order, messages.AppendBatches) and not self._watches(
            self._client, order.generation
        ):
            self._post(messages.AppendFailed(order.key, _WAS_RESET))
            order = None
        commands = list(self._commands(order))
        asked = told = len(commands)
        keys = self.keys
        period = HURRIED_PERIOD_S if self.is_hurried else redis_keys.LEASE_PERIOD_S
        now = time.monotonic()
        is_due = isinstance(order, messages.RenewLeaseNow) or now >= self._looked_at + period
        if is_due and not isinstance(order, messages.Deregister):
            self._looked_at = now
            if not self._loop_hangs(now):
                commands += self._node_metrics_commands(now)
                told = len(commands)
                commands += self._lease_commands(keys)
        if not commands:
            return
        renews = len(commands) > told
        before, after = _FAILPOINTS.get(type(order), ("", ""))
        failpoint(before)
        if renews:
            failpoint("lease.before_send")
        replies = self._client.pipeline(commands)
        failpoint(after)
        if renews:
            failpoint("lease.after_send")
            # A rejected SET of node metrics has no consequences.
            self._report_lease(keys, replies[told:])
        self._tell_done(order, replies[:asked])
        self._failures = 0  # last, because a rejected registration raises and counts as a failure

    def _post(self, report: messages.PublisherReport) -> None:
        if self._untaken_since is None:
            self._untaken_since = time.monotonic()
        self._take_report(report)

    def _loop_hangs(self, now: float) -> bool:
        """Return whether the loop hangs, so that the lease must expire.

        The scheduler then runs the node's trials elsewhere.
        """
        since = self._untaken_since
        hangs = since is not None and now - since > LOOP_HANGS_S
        if hangs and not self._says_hang:
            _log.error("loop.hangs seconds=%d lease=expires", LOOP_HANGS_S)
        self._says_hang = hangs
        return hangs

    def _watches(self, client: RedisClient, generation: bytes) -> bool:
        """Return whether Redis has this generation and aborts the next transaction on a change."""
        if self._watched != generation:
            replies = client.pipeline(_WATCH_ANEW)
            for reply in replies:
                if isinstance(reply, RedisCommandError) and not reply.is_wrong_type:
                    raise user_rejected(self._address, "events", reply)
            self._note_watched(replies[-1])
        return self._watched == generation

    def _note_watched(self, generation: RedisReply) -> None:
        self._watched = generation if isinstance(generation, bytes) else None

    def _commands(self, order: messages.PublisherOrder | None) -> tuple[RedisCommand, ...]:
        match order:
            case messages.AppendBatches(key, _, batches):
                header = self._signing.header
                entries: list[RedisCommand] = [
                    ["XADD", key, "NOMKSTREAM", "*", "h", header(key, head, events), "e", events]
                    for head, events in batches
                ]
                return (["MULTI"], *entries, ["EXEC"], *_WATCH)
            case messages.ForgetStream(key):
                return (["HDEL", self._reply, redis_keys.acknowledged_up_to(key)],)
            case messages.SendOutput(pieces):
                return tuple(self._output_commands(pieces))
            case messages.Register(registration):
                signed = self._signing.registration(registration)
                return (["XADD", redis_keys.NODES, "*", redis_keys.REGISTRATION, signed],)
            case messages.Deregister():
                signed = self._signing.deregistration()
                return (
                    ["XADD", redis_keys.NODES, "NOMKSTREAM", "*", redis_keys.BYE, signed],
                    ["DEL", self._lease, self._node_metrics_key, self._queue, self._reply],
                )
            case _:
                return ()

    def _node_metrics_commands(self, now: float) -> tuple[RedisCommand, ...]:
        if self._node_metrics is None or now < self._node_metrics_due:
            return ()
        self._node_metrics_due = now + redis_keys.LEASE_PERIOD_S
        node_metrics = self._signing.node_metrics(self._node_metrics())
        return (["SET", self._node_metrics_key, node_metrics, "PX", _LEASE_TTL_MS],)

    def _output_commands(self, pieces: tuple[tuple[str, bytes], ...]) -> Iterator[RedisCommand]:
        for key, piece in pieces:
            signed_message = self._signing.output(key, piece)
            bound = ("MAXLEN", "~", redis_keys.OUTPUT_CHUNKS)
            yield ["XADD", redis_keys.output(key), *bound, "*", redis_keys.CHUNK, signed_message]
        for key in {key for key, _ in pieces}:
            yield ["EXPIRE", redis_keys.output(key), redis_keys.OUTPUT_TTL_S]

    def _lease_commands(self, keys: tuple[str, ...]) -> tuple[RedisCommand, ...]:
        self._renewals += 1
        term, version = self.confirmed
        value = self._signing.lease(f"{self._renewals}:{term}:{version}")
        return (
            ["SET", self._lease, value, "PX", _LEASE_TTL_MS],
            ["GET", redis_keys.GENERATION],
            ["HMGET", self._reply, *_ANSWERS, *map(redis_keys.acknowledged_up_to, keys)],
            # The command queue of a dead node must not stay in Redis for ever.
            ["PEXPIRE", self._queue, _UNREAD_COMMAND_S * 1_000],
            ["EXPIRE", self._reply, redis_keys.REPLY_TTL_S],
            ["EXISTS", redis_keys.SCHEDULER],
            ["GET", redis_keys.SIGNS],
            ["GET", redis_keys.CHALLENGE],
            *(["EXISTS", key] for key in keys),
        )

    def _report_lease(self, keys: tuple[str, ...], replies: list[RedisReply]) -> None:
        lease, generation, fields, _, _, scheduler, signs, challenge, *exist = replies
        for reply in replies:
            # A Redis without free memory rejects the lease but can be read, and the scheduler
            # knows.
            if not isinstance(reply, RedisCommandError) or (reply is lease and reply.is_full):
                continue
            if not reply.is_wrong_type:
                raise user_rejected(self._address, "the lease", reply)
        # A key of the wrong type counts as missing: the scheduler deletes it.
        generation = self._unless_wrong(redis_keys.GENERATION, generation)
        fields = self._unless_wrong(self._reply, fields) or [None] * (len(_ANSWERS) + len(keys))
        signs = self._unless_wrong(redis_keys.SIGNS, signs)
        challenge = self._unless_wrong(redis_keys.CHALLENGE, challenge)
        assert isinstance(generation, bytes | None)  # what GET answers
        assert isinstance(fields, list)  # what HMGET answers
        if isinstance(challenge, bytes) and self._signing.hear_challenge(challenge):
            self._looked_at = float("-inf")  # the scheduler waits for a lease that answers it
        names = (*_ANSWERS, *map(redis_keys.acknowledged_up_to, keys))
        read = zip(names, fields, strict=True)
        said = self._signing.replies(
            {name: field if isinstance(field, bytes) else b"" for name, field in read}
        )
        term, _, version = said["v"].rpartition(b":")
        self._post(
            messages.LeaseReply(
                generation,
                (_number(term) or self.confirmed[0], _number(version)),
                {key: _number(said[redis_keys.acknowledged_up_to(key)]) for key in keys},
                frozenset(key for key, there in zip(keys, exist, strict=True) if not there),
                said["f"].decode(errors="replace"),
                said["r"].decode(errors="replace"),
                bool(scheduler),
                signs if isinstance(signs, bytes) else b"",
            )
        )

    def _unless_wrong(self, key: str, reply: RedisReply) -> RedisReply:
        if not isinstance(reply, RedisCommandError):
            return reply
        self._signing.reject_key(key)
        return None

    def _tell_done(self, order: messages.PublisherOrder | None, replies: list[RedisReply]) -> None:
        if not replies:
            return
        reply = replies[0]
        if isinstance(order, messages.AppendBatches):
            *_, done, _, generation = replies
            self._note_watched(generation)
            why = _why_not_appended(done)
            self._post(
                messages.AppendFailed(order.key, why)
                if why
                else messages.BatchesAppended(order.key)
            )
        elif isinstance(order, messages.SendOutput):
            self._post(messages.OutputSent())
        elif isinstance(order, messages.Register):
            if not isinstance(reply, RedisCommandError):
                self._post(messages.Registered())
            elif reply.is_full or reply.is_wrong_type:
                if reply.is_wrong_type:
                    self._signing.reject_key(redis_keys.NODES)
                self._post(messages.RegistrationFailed())
            else:
                raise user_rejected(self._address, "the hello", reply)

    def _lost(self, order: messages.PublisherOrder | None, problem: RedisUnavailable) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._failures += 1
        reason, is_rejected = str(problem), isinstance(problem, RedisRejectsUser)
        # A lost connection often comes first, and does not tell why Redis rejects the next one.
        if self._failures == 1 or (is_rejected and reason != self._told):
            self._told = reason
            _log.warning("publisher.unreachable reason=%r", reason)
            self._post(messages.RedisLost(reason))
        if isinstance(order, messages.AppendBatches):
            self._post(messages.AppendFailed(order.key, reason))
        elif isinstance(order, messages.SendOutput):
            self._post(messages.OutputSent())


def _number(said: bytes) -> int:
    """Parse a number in a reply; return 0 if it is not one."""
    return int(said) if said.isdigit() and len(said) < _DIGITS else 0


def _why_not_appended(done: RedisReply) -> str:
    """Say why a transaction with this reply did not append all batches; return "" if it did."""
    if done is None:
        return _WAS_RESET
    if not isinstance(done, list):
        return str(done)
    rejected = next((reply for reply in done if isinstance(reply, RedisCommandError)), None)
    if rejected is not None:
        return str(rejected)
    return "the stream is missing" if None in done else ""
