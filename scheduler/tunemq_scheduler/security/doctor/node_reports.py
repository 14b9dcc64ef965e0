"""`read_farm`: reads the metrics of a farm's nodes from Redis.

It does not ask the scheduler: a farm without one can be examined too, and the scheduler does not
know nodes that it rejects.
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
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.health.node_metrics import NodeDescription, NodeMetrics, decode_node_metrics
from tunemq_shared.protocol.message_limits import NODE_METRICS_BYTES
from tunemq_shared.signing.message_signing import InvalidSignature, MessageSigner

_SCANNED_AT_ONCE: Final = "1000"
_PREFIX: Final = redis_keys.node_metrics("")
_STRANGE: Final = re.compile(r"[^\w.+:@/ -]", re.ASCII)
_LONGEST_WORD: Final = 80


class NodeReport(NamedTuple):
    """A live node, as it describes itself.

    Attributes:
        instance_id: Its node instance.
        node_metrics: Its latest metrics.
        clock_ahead_s: Seconds by which its clock is ahead of Redis's; None if unknown.
    """

    instance_id: str
    node_metrics: NodeMetrics
    clock_ahead_s: float | None

    @property
    def name(self) -> str:
        """The node's name, or its instance id if unknown."""
        return (
            self.node_metrics.about.node
            if self.node_metrics.about is not None
            else self.instance_id
        )


class FarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `read_farm` found.

    Attributes:
        nodes: The live nodes with valid metrics, sorted by name.
        unreadable: Maps each instance whose metrics are invalid to the reason.
        signed: The number of nodes that sign their metrics although there is no key here to verify.
        clock_ahead_s: Seconds by which this machine's clock is ahead of Redis's.
    """

    nodes: tuple[NodeReport, ...]
    unreadable: dict[str, str]
    signed: int
    clock_ahead_s: float


def read_farm(line: RedisConnection, events: MessageSigner) -> FarmReport:
    """Read the metrics of all nodes.

    Args:
        line: A connection with the scheduler's rights.
        events: Verifies the nodes' messages.

    Raises:
        TransportError: This user lacks the rights.
        RedisUnavailable: Redis cannot be reached.
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
            continue  # its lease expired meanwhile
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
    """Make a node's words safe for commands that people copy to a shell."""
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
    """Replace characters of a node's word that a shell or terminal interprets."""
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
    """Seconds by which a node's clock was ahead; the key's remaining time gives its age."""
    if node_metrics.clock is None or left_ms < 0:
        return None
    return node_metrics.clock - (now - (redis_keys.LEASE_TTL_S - left_ms / 1000))


def _unix(answer: list[bytes]) -> float:
    """Convert Redis's seconds and microseconds to Unix time."""
    return int(answer[0]) + int(answer[1]) / 1e6
