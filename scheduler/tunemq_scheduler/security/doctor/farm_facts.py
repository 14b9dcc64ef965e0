"""What there is to know of a farm's nodes and scheduler, read from Redis.

It is read there, not asked of the scheduler: a farm without one is looked over, too, and a node
that the scheduler refuses is known to nobody else.
"""

from __future__ import annotations

import re
import time
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.transport.redis.redis_connection import (
    RedisCommand,
    RedisConnection,
    ReplyTooLong,
)
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeDescription, NodeMetrics, decode_node_metrics
from tunemq_shared.protocol.message_limits import NODE_METRICS_BYTES
from tunemq_shared.signing.message_signing import InvalidSignature, MessageSigner

_SCANNED_AT_ONCE: Final = "1000"
_PREFIX: Final = redis_keys.node_metrics("")
_STRANGE: Final = re.compile(r"[^\w.+:@/ -]", re.ASCII)
_LONGEST_WORD: Final = 80


class NodeReport(NamedTuple):
    """A node that lives, as it describes itself.

    Attributes:
        clock_ahead_s: of its clock before Redis's; None where it does not say.
    """

    instance_id: str
    node_metrics: NodeMetrics
    clock_ahead_s: float | None

    @property
    def name(self) -> str:
        """As people know it."""
        return (
            self.node_metrics.about.node
            if self.node_metrics.about is not None
            else self.instance_id
        )


class FarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read.

    Attributes:
        unreadable: of nodes whose words nobody is to believe, the instance and why.
        sealed: how many sign what they say, while there are no keys here to check it with.
        clock_ahead_s: of this machine's clock before Redis's.
    """

    nodes: tuple[NodeReport, ...]
    unreadable: dict[str, str]
    signed: int
    clock_ahead_s: float


def read_farm(line: RedisConnection, events: MessageSigner) -> FarmReport:
    """Read it.

    Args:
        line: a connection as a user who may do what the scheduler may.
        events: verifies what nodes say.

    Raises:
        WireError: this user may not.
        WireUnavailable: Redis cannot be reached.
    """
    line.connect()
    before = time.time()
    (now,) = line.ask([("TIME",)])
    here = (before + time.time()) / 2
    nodes: list[NodeReport] = []
    unreadable: dict[str, str] = {}
    signed = 0
    for key in _node_metrics_keys(line):
        instance_id = key.removeprefix(_PREFIX)
        try:
            said, left_ms, at = line.ask([("GET", key), ("PTTL", key), ("TIME",)])
        except ReplyTooLong as error:
            unreadable[instance_id] = str(error)
            line.connect()
            continue
        if said is None:
            continue  # it has ended meanwhile
        if len(said) > NODE_METRICS_BYTES:
            unreadable[instance_id] = (
                f"has {len(said)} bytes, and {NODE_METRICS_BYTES} are the most"
            )
            continue
        try:
            body = events.open(said, b"node_metrics", instance_id.encode())
            node_metrics = _harmless(decode_node_metrics(body))
        except InvalidSignature as error:
            if error.reason == "signed_without_keys":
                signed += 1
                continue
            unreadable[instance_id] = str(error)
            continue
        except UNDECODABLE:
            unreadable[instance_id] = "cannot be read: it is of another version of TuneMQ"
            continue
        nodes.append(
            NodeReport(instance_id, node_metrics, _ahead(node_metrics, left_ms, _unix(at)))
        )
    nodes.sort(key=lambda node: (node.name, node.instance_id))
    return FarmReport(
        nodes=tuple(nodes),
        unreadable=unreadable,
        signed=signed,
        clock_ahead_s=here - _unix(now),
    )


def _harmless(node_metrics: NodeMetrics) -> NodeMetrics:
    """What stands in commands that people copy has nothing in it that a shell understands."""
    about = node_metrics.about
    if about is not None:
        about = NodeDescription(
            harmless_word(about.node),
            harmless_word(about.hostname),
            harmless_word(about.python),
            {
                harmless_word(name): harmless_word(version)
                for name, version in about.libraries.items()
            },
            tuple(map(harmless_word, about.gpus)),
        )
    return msgspec.structs.replace(
        node_metrics, version=harmless_word(node_metrics.version), about=about
    )


def harmless_word(said: str) -> str:
    """A word of a node's without what a shell or a terminal understands."""
    return _STRANGE.sub("?", said[:_LONGEST_WORD])


def _node_metrics_keys(line: RedisConnection) -> list[str]:
    found: set[str] = set()
    cursor = "0"
    while True:
        look: RedisCommand = (
            "SCAN",
            cursor,
            "MATCH",
            redis_keys.node_metrics("*"),
            "COUNT",
            _SCANNED_AT_ONCE,
        )
        ((following, keys),) = line.ask([look])
        found.update(key.decode(errors="replace") for key in keys)
        cursor = following.decode()
        if cursor == "0":
            return sorted(found)


def _ahead(node_metrics: NodeMetrics, left_ms: int, now: float) -> float | None:
    """How far a node's clock was ahead when it said this, which Redis knows by what is left."""
    if node_metrics.clock is None or left_ms < 0:
        return None
    return node_metrics.clock - (now - (redis_keys.LEASE_TTL_S - left_ms / 1000))


def _unix(answer: list[bytes]) -> float:
    """The Unix time that Redis says in seconds and microseconds."""
    return int(answer[0]) + int(answer[1]) / 1e6
