"""Whether a node that introduces itself can work with this scheduler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

import cloudpickle
import msgspec

from tunemq_scheduler.core.placement.placement_reasons import device_set_aside
from tunemq_shared.base.errors import TransportError
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.protocol.messages import PROTOCOL_VERSION, NodeJoined
from tunemq_shared.protocol.registration import NodeRegistration, decode_hello

#: So much is kept of what a node says of its devices, and stands in every journal; it may lie.
_MOST_WITHHELD: Final = 64
_LONGEST_REASON: Final = 200


def read_hello(data: bytes) -> NodeRegistration:
    """Read a node's introduction.

    Raises:
        WireError: it is not one, or of another version of the protocol, Python or cloudpickle; both
            versions are named.
    """
    try:
        hello = decode_hello(data)
    except UNDECODABLE as error:
        raise TransportError(_why_unreadable(data, error)) from error
    if hello.protocol != PROTOCOL_VERSION:
        raise TransportError(
            _mismatch(hello.node, "TuneMQ's protocol", hello.protocol, PROTOCOL_VERSION)
        )
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    theirs = ".".join(hello.python.split(".")[:2])
    if theirs != ours:
        raise TransportError(_mismatch(hello.node, "Python", theirs, ours))
    if hello.cloudpickle != cloudpickle.__version__:
        raise TransportError(
            _mismatch(hello.node, "cloudpickle", hello.cloudpickle, cloudpickle.__version__)
        )
    return hello


def joined(hello: NodeRegistration) -> NodeJoined:
    """The introduction as a fact for the runner."""
    return NodeJoined(
        hello.incarnation,
        hello.node,
        hello.hostname,
        hello.node_ip,
        hello.resources,
        hello.gpus,
        withheld=_withheld(hello),
    )


def told_of_withheld(node: NodeJoined, before: Mapping[str, str]) -> list[str]:
    """What is new about the devices that it withholds, in lines for people."""
    told = [
        f"{device_set_aside(node.node, uuid, why)}."
        for uuid, why in node.withheld.items()
        if before.get(uuid) != why
    ]
    back = [uuid for uuid in before if uuid not in node.withheld]
    return [*told, *(f"GPU {uuid} of node {node.node} may be used again." for uuid in back)]


def _withheld(hello: NodeRegistration) -> dict[str, str]:
    """Those of its devices that it withholds, each with one short line."""
    uuids = [gpu.uuid for gpu in hello.gpus if gpu.uuid in hello.withheld]
    return {uuid: _short(hello.withheld[uuid]) for uuid in uuids[:_MOST_WITHHELD]}


def _short(reason: str) -> str:
    line = " ".join(reason[: 4 * _LONGEST_REASON].split())
    return "".join(letter for letter in line if letter.isprintable())[:_LONGEST_REASON]


def _mismatch(node: str, what: str, theirs: object, ours: object) -> str:
    return (
        f"Node {node} is refused: it has version {theirs} of {what}, this scheduler has {ours}."
        " Install the same on both."
    )


def _why_unreadable(data: bytes, error: Exception) -> str:
    """The newer version's hello may have other fields, but its second one is the version."""
    try:
        fields = msgspec.msgpack.decode(data)
        protocol, node = int(fields[1]), str(fields[2])
    except (*UNDECODABLE, TypeError, ValueError, LookupError, OverflowError):
        return f"A node's introduction cannot be read ({error}); it is ignored."
    return _mismatch(node, "TuneMQ's protocol", protocol, PROTOCOL_VERSION)
