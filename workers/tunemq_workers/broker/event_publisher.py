"""The pump: the thread that owns the node's connection to Redis.

The loop hands it orders and reads its facts; the pump holds nothing of the node's state, so a lost
connection costs nothing but time. Once a second (every 50 ms when events pile up) it renews the
lease and reads what the scheduler replies. It tries for ever to reach Redis, and while it cannot it
answers orders with `AppendFailed`.

Batches are appended in a transaction that Redis drops if the wire's generation has changed: an
event behind a gap in a stream that was made anew would be worse than none, and a transaction is
done whole or not at all. Scripts would do the same, but a worker that may run some can use each
weakness of Redis' Lua. The key is watched from one transaction to the next, so each takes one
round trip.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Final

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.broker import redis_keys
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.broker.publisher_messages import (
    AppendBatches,
    AppendFailed,
    BatchesAppended,
    Deregister,
    ForgetStream,
    LeaseReply,
    OutputSent,
    PublisherOrder,
    PublisherReport,
    RedisLost,
    Register,
    Registered,
    RegistrationFailed,
    RenewLeaseNow,
    SendOutput,
)
from tunemq_workers.broker.redis_client import (
    RedisClient,
    RedisCommand,
    RedisCommandError,
    RedisReply,
)
from tunemq_workers.system.trial_user import own_files

#: The lease's period while the scheduler's reply is what holds the node up.
HURRIED_PERIOD_S: Final = 0.05
#: A loop that takes no fact for so long hangs; its node's lease is not renewed meanwhile.
LOOP_HANGS_S: Final = 30.0
#: Pauses between attempts to reach a Redis that is away, at first and at most, before jitter. They
#: stay short however long that lasts: what they cost is nothing beside what waits for its return.
_RETRY_S: Final = (0.05, 0.25)
#: How long mail of a node that died unheard stays in Redis.
_UNREAD_COMMAND_S: Final = 60
#: The fields of a reply, beside those that say how far events are journalled.
_ANSWERS: Final = ("v", "f", "r")
#: No number in a reply has as many.
_DIGITS: Final = 20
#: The replies to the last two say which generation is watched.
_WATCH: Final[tuple[RedisCommand, ...]] = (
    ["WATCH", redis_keys.GENERATION],
    ["GET", redis_keys.GENERATION],
)
#: Drops what was watched before; without the right to transactions it says so, before one is sent.
_WATCH_ANEW: Final[tuple[RedisCommand, ...]] = (["MULTI"], ["EXEC"], *_WATCH)
_WAS_RESET: Final = "the wire was reset"
#: By order: where tests have the node die before others see what a turn does, and before it knows
#: that they do.
_FAILPOINTS: Final = MappingProxyType(
    {
        AppendBatches: ("events.before_send", "events.after_send"),
        Register: ("hello.before_send", "hello.after_send"),
        Deregister: ("deregistration.before_send", "deregistration.after_send"),
    }
)

_log = logging.getLogger(__name__)


class EventPublisher:
    """Start it with `start`, give it orders with `order`; it posts facts from its own thread.

    Args:
        address: of Redis.
        attempt: whose lease is renewed.
        post: takes facts; called in the pump's thread, must not block.
        vitals: what to say of the machine, once a second; likewise.
        seals: seal what is told, and open what is heard.
    """

    def __init__(
        self,
        address: RedisAddress,
        instance_id: str,
        post: Callable[[PublisherReport], None],
        node_metrics: Callable[[], bytes] | None = None,
        signing: NodeSigning | None = None,
    ) -> None:
        #: Set by the loop: the (term, version) of the assignment taken.
        self.confirmed = (0, 0)
        #: Set by the loop: the streams of which it wants to know how far they are journalled.
        self.keys: tuple[str, ...] = ()
        #: Set by the loop: whether the scheduler's reply is wanted often.
        self.is_hurried = True
        self._address, self._node_metrics = address, node_metrics
        self._take_report = post
        #: Since when the loop has not taken a fact; None where it has taken all.
        self._untaken_since: float | None = None
        self._says_hang = False
        self._signing = NodeSigning(instance_id) if signing is None else signing
        self._orders: queue.SimpleQueue[PublisherOrder] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="event publisher", daemon=True)
        self._client: RedisClient | None = None
        #: The generation as it was when the client began to watch it; None while it does not.
        self._watched: bytes | None = None
        self._instance_id = instance_id
        self._lease, self._reply = redis_keys.lease(instance_id), redis_keys.reply(instance_id)
        self._queue = redis_keys.queue(instance_id)
        self._node_metrics_key, self._node_metrics_due = redis_keys.node_metrics(instance_id), 0.0
        self._renewals = 0
        self._looked_at = float("-inf")
        self._failures = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def order(self, order: PublisherOrder) -> None:
        """Queue an order."""
        self._orders.put(order)

    def reports_handled(self) -> None:
        """The loop takes facts; called by it."""
        self._untaken_since = None

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, which `Deregister` brings about."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with own_files():  # the socket of Redis, perhaps, and the certificates that are trusted
            self._publisher()

    def _publisher(self) -> None:
        order: PublisherOrder | None = None
        while not isinstance(order, Deregister):
            try:
                order = self._orders.get(timeout=self._pause())
            except queue.Empty:
                order = None
            try:
                self._turn(order)
            except RedisUnavailable as problem:
                self._lost(order, str(problem))

    def _pause(self) -> float:
        """Seconds until the pump has something to do by itself."""
        if self._failures:
            jitter = 0.5 + os.urandom(1)[0] / 512
            return backoff_s(self._failures - 1, *_RETRY_S) * jitter
        period = HURRIED_PERIOD_S if self.is_hurried else redis_keys.LEASE_PERIOD_S
        return max(0.0, self._looked_at + period - time.monotonic())

    def _turn(self, order: PublisherOrder | None) -> None:
        """Do ``order``, and renew the lease if that is due, in one round trip."""
        if self._client is None:
            self._client = RedisClient(self._address)
            self._looked_at, self._watched = float("-inf"), None
        if isinstance(order, AppendBatches) and not self._watches(self._client, order.generation):
            self._post(AppendFailed(order.key, _WAS_RESET))
            order = None
        commands = list(self._commands(order))
        asked = told = len(commands)
        keys = self.keys
        period = HURRIED_PERIOD_S if self.is_hurried else redis_keys.LEASE_PERIOD_S
        now = time.monotonic()
        polls = isinstance(order, RenewLeaseNow) or now >= self._looked_at + period
        if polls and not isinstance(order, Deregister):
            self._looked_at = now
            polls = not self._loop_hangs(now)
        if polls and not isinstance(order, Deregister):
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
            self._report_lease(
                keys, replies[told:]
            )  # whether the vitals were taken matters to nobody
        self._tell_done(order, replies[:asked])
        self._failures = 0  # one that answers, and refuses, is as good as away

    def _post(self, report: PublisherReport) -> None:
        if self._untaken_since is None:
            self._untaken_since = time.monotonic()
        self._take_report(report)

    def _loop_hangs(self, now: float) -> bool:
        """Whether nobody would obey: the scheduler then has the node's trials run elsewhere."""
        since = self._untaken_since
        hangs = since is not None and now - since > LOOP_HANGS_S
        if hangs and not self._says_hang:
            _log.error("loop.hangs seconds=%d lease=expires", LOOP_HANGS_S)
        self._says_hang = hangs
        return hangs

    def _watches(self, client: RedisClient, generation: bytes) -> bool:
        """Whether the wire has this generation, and a change of it stops the next transaction."""
        if self._watched != generation:
            replies = client.pipeline(_WATCH_ANEW)
            for reply in replies:
                if isinstance(reply, RedisCommandError) and not reply.is_wrong_type:
                    raise RedisUnavailable(f"Redis at {self._address} refuses events: {reply}")
            self._note_watched(replies[-1])
        return self._watched == generation

    def _note_watched(self, generation: RedisReply) -> None:
        self._watched = generation if isinstance(generation, bytes) else None

    def _commands(self, order: PublisherOrder | None) -> tuple[RedisCommand, ...]:
        match order:
            case AppendBatches(key, _, batches):
                header = self._signing.header
                entries: list[RedisCommand] = [
                    ["XADD", key, "NOMKSTREAM", "*", "h", header(key, head, events), "e", events]
                    for head, events in batches
                ]
                return (["MULTI"], *entries, ["EXEC"], *_WATCH)
            case ForgetStream(key):
                return (["HDEL", self._reply, redis_keys.acknowledged_up_to(key)],)
            case SendOutput(pieces):
                return tuple(self._output_commands(pieces))
            case Register(registration):
                return (
                    [
                        "XADD",
                        redis_keys.NODES,
                        "*",
                        redis_keys.REGISTRATION,
                        self._signing.registration(registration),
                    ],
                )
            case Deregister():
                return (
                    [
                        "XADD",
                        redis_keys.NODES,
                        "NOMKSTREAM",
                        "*",
                        redis_keys.BYE,
                        self._signing.deregistration(),
                    ],
                    ["DEL", self._lease, self._node_metrics_key, self._queue, self._reply],
                )
            case _:
                return ()

    def _node_metrics_commands(self, now: float) -> tuple[RedisCommand, ...]:
        if self._node_metrics is None or now < self._node_metrics_due:
            return ()
        self._node_metrics_due = now + redis_keys.LEASE_PERIOD_S
        node_metrics = self._signing.node_metrics(self._node_metrics())
        return (
            [
                "SET",
                self._node_metrics_key,
                node_metrics,
                "PX",
                int(redis_keys.LEASE_TTL_S * 1_000),
            ],
        )

    def _output_commands(self, pieces: tuple[tuple[str, bytes], ...]) -> Iterator[RedisCommand]:
        for key, piece in pieces:
            signed_message = self._signing.output(key, piece)
            bound = ("MAXLEN", "~", redis_keys.OUTPUT_PIECES)
            yield ["XADD", redis_keys.output(key), *bound, "*", redis_keys.PIECE, signed_message]
        for key in {key for key, _ in pieces}:
            yield ["EXPIRE", redis_keys.output(key), redis_keys.OUTPUT_TTL_S]

    def _lease_commands(self, keys: tuple[str, ...]) -> tuple[RedisCommand, ...]:
        self._renewals += 1
        term, version = self.confirmed
        value = self._signing.lease(f"{self._renewals}:{term}:{version}")
        ttl_ms = int(redis_keys.LEASE_TTL_S * 1_000)
        return (
            ["SET", self._lease, value, "PX", ttl_ms],
            ["GET", redis_keys.GENERATION],
            ["HMGET", self._reply, *_ANSWERS, *map(redis_keys.acknowledged_up_to, keys)],
            # Mail that waits for the consumer does not outlive the node for ever.
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
            # A Redis that is full takes no lease, and the scheduler knows; all else can be read.
            if not isinstance(reply, RedisCommandError) or (reply is lease and reply.is_full):
                continue
            if not reply.is_wrong_type:
                raise RedisUnavailable(f"Redis at {self._address} refuses the lease: {reply}")
        # A key of another type is as good as gone: the scheduler deletes it.
        generation = self._unless_wrong(redis_keys.GENERATION, generation)
        fields = self._unless_wrong(self._reply, fields) or [None] * (len(_ANSWERS) + len(keys))
        signs = self._unless_wrong(redis_keys.SIGNS, signs)
        challenge = self._unless_wrong(redis_keys.CHALLENGE, challenge)
        assert isinstance(generation, bytes | None)  # what GET answers
        assert isinstance(fields, list)  # what HMGET answers
        if isinstance(challenge, bytes) and self._signing.hear_challenge(challenge):
            self._looked_at = float("-inf")  # the scheduler waits for a lease that answers it
        names = (*_ANSWERS, *map(redis_keys.acknowledged_up_to, keys))
        said = self._signing.replies(
            {
                name: field if isinstance(field, bytes) else b""
                for name, field in zip(names, fields, strict=True)
            }
        )
        term, _, version = said["v"].rpartition(b":")
        self._post(
            LeaseReply(
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

    def _tell_done(self, order: PublisherOrder | None, replies: list[RedisReply]) -> None:
        if not replies:
            return
        reply = replies[0]
        if isinstance(order, AppendBatches):
            *_, done, _, generation = replies
            self._note_watched(generation)
            why = _why_not_appended(done)
            self._post(AppendFailed(order.key, why) if why else BatchesAppended(order.key))
        elif isinstance(order, SendOutput):
            self._post(OutputSent())
        elif isinstance(order, Register):
            if not isinstance(reply, RedisCommandError):
                self._post(Registered())
            elif reply.is_full or reply.is_wrong_type:
                if reply.is_wrong_type:
                    self._signing.reject_key(redis_keys.NODES)
                self._post(RegistrationFailed())
            else:
                raise RedisUnavailable(f"Redis at {self._address} refuses the hello: {reply}")

    def _lost(self, order: PublisherOrder | None, reason: str) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._failures += 1
        if self._failures == 1:
            _log.warning("pump.out_of_reach reason=%r", reason)
            self._post(RedisLost(reason))
        if isinstance(order, AppendBatches):
            self._post(AppendFailed(order.key, reason))
        elif isinstance(order, SendOutput):
            self._post(OutputSent())


def _number(said: bytes) -> int:
    """A number that a reply says; 0 where it says none."""
    return int(said) if said.isdigit() and len(said) < _DIGITS else 0


def _why_not_appended(done: RedisReply) -> str:
    """Why a transaction with this reply did not append all its batches; empty if it did."""
    if done is None:
        return _WAS_RESET
    if not isinstance(done, list):
        return str(done)
    rejected = next((reply for reply in done if isinstance(reply, RedisCommandError)), None)
    if rejected is not None:
        return str(rejected)
    return "the stream is missing" if None in done else ""
