"""Checks whether a node that registers is compatible with this scheduler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

import cloudpickle
import msgspec

from tunemq_scheduler.core.placement.placement_reasons import device_set_aside
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import TransportError
from tunemq_shared.protocol.message_limits import MOST_OF_NODE, NAME_CHARACTERS, is_possible
from tunemq_shared.protocol.messages import PROTOCOL_VERSION, NodeJoined
from tunemq_shared.protocol.registration import NodeRegistration, decode_registration
from tunemq_shared.trainable.resource_names import GPU

#: Limits for a node's withheld devices, which are written into every journal; a node may lie.
_MOST_WITHHELD: Final = 64
_LONGEST_REASON: Final = 200


def read_registration(data: bytes) -> NodeRegistration:
    """Decode a node's registration.

    Raises:
        TransportError: it cannot be decoded, or has another version of the protocol, Python or
            cloudpickle; names both versions.
    """
    try:
        registration = decode_registration(data)
    except UNDECODABLE as error:
        raise TransportError(_why_unreadable(data, error)) from error
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for what, theirs, ours in (
        ("TuneMQ's protocol", registration.protocol, PROTOCOL_VERSION),
        ("Python", ".".join(registration.python.split(".")[:2]), python),
        ("cloudpickle", registration.cloudpickle, cloudpickle.__version__),
    ):
        if theirs != ours:
            raise TransportError(_mismatch(registration.node, what, theirs, ours))
    check_gpus(registration.node, registration.resources)
    return registration


def check_known(node: NodeJoined) -> None:
    """Check the description of a node that a search knows from an earlier run.

    Raises:
        TransportError: no node has such resources.
    """
    amounts = (*node.resources.values(), *(gpu.memory for gpu in node.gpus))
    if not all(map(is_possible, amounts)):
        raise TransportError(
            f"Node {node.node[:NAME_CHARACTERS]} is refused: it has an impossible amount."
        )
    check_gpus(node.node, node.resources)


def check_gpus(node: str, resources: Mapping[str, float]) -> None:
    """Check how many GPUs a node claims to have: placement considers each of them.

    Raises:
        TransportError: no machine has as many.
    """
    if resources.get(GPU, 0.0) > MOST_OF_NODE:
        raise TransportError(
            f"Node {node[:NAME_CHARACTERS]} is refused: it says that it has {resources[GPU]:g}"
            f" GPUs, and {MOST_OF_NODE:,} are possible."
        )


def joined(registration: NodeRegistration) -> NodeJoined:
    """Return the registration as an event for the runner."""
    return NodeJoined(
        registration.instance_id,
        registration.node,
        registration.hostname,
        registration.node_ip,
        registration.resources,
        registration.gpus,
        withheld=_withheld(registration),
        is_ending=registration.is_ending,
    )


def report_withheld(node: NodeJoined, before: Mapping[str, str]) -> list[str]:
    """Return changes of a node's withheld devices, as lines for people."""
    told = [
        f"{device_set_aside(node.node, uuid, why)}."
        for uuid, why in node.withheld.items()
        if before.get(uuid) != why
    ]
    back = [uuid for uuid in before if uuid not in node.withheld]
    return [*told, *(f"GPU {uuid} of node {node.node} may be used again." for uuid in back)]


def _withheld(registration: NodeRegistration) -> dict[str, str]:
    """Return the node's own withheld devices, each with one short line."""
    uuids = [gpu.uuid for gpu in registration.gpus if gpu.uuid in registration.withheld]
    return {uuid: _short(registration.withheld[uuid]) for uuid in uuids[:_MOST_WITHHELD]}


def _short(reason: str) -> str:
    line = " ".join(reason[: 4 * _LONGEST_REASON].split())
    return "".join(letter for letter in line if letter.isprintable())[:_LONGEST_REASON]


def _mismatch(node: str, what: str, theirs: object, ours: object) -> str:
    return (
        f"Node {node} is refused: it has version {theirs} of {what}, this scheduler has {ours}."
        " Install the same on both."
    )


def _why_unreadable(data: bytes, error: Exception) -> str:
    """A newer version's registration may have other fields, but its second is the version."""
    try:
        fields = msgspec.msgpack.decode(data)
        protocol, node = int(fields[1]), str(fields[2])
    except (*UNDECODABLE, TypeError, ValueError, LookupError, OverflowError):
        return f"A node's introduction cannot be read ({error}); it is ignored."
    return _mismatch(node, "TuneMQ's protocol", protocol, PROTOCOL_VERSION)
