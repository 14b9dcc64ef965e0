"""Whether a node that introduces itself can work with this scheduler."""

from __future__ import annotations

import sys

import cloudpickle
import msgspec

from tunemq_shared.errors import WireError
from tunemq_shared.introductions import NodeHello, decode_hello
from tunemq_shared.messages import PROTOCOL_VERSION, NodeJoined
from tunemq_shared.undecodable import UNDECODABLE


def read_hello(data: bytes) -> NodeHello:
    """Read a node's introduction.

    Raises:
        WireError: it is not one, or of another version of the protocol, Python or cloudpickle; both
            versions are named.
    """
    try:
        hello = decode_hello(data)
    except UNDECODABLE as error:
        raise WireError(_why_unreadable(data, error)) from error
    if hello.protocol != PROTOCOL_VERSION:
        raise WireError(
            _mismatch(hello.node, "TuneMQ's protocol", hello.protocol, PROTOCOL_VERSION)
        )
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    theirs = ".".join(hello.python.split(".")[:2])
    if theirs != ours:
        raise WireError(_mismatch(hello.node, "Python", theirs, ours))
    if hello.cloudpickle != cloudpickle.__version__:
        raise WireError(
            _mismatch(hello.node, "cloudpickle", hello.cloudpickle, cloudpickle.__version__)
        )
    return hello


def joined(hello: NodeHello) -> NodeJoined:
    """The introduction as a fact for the runner."""
    return NodeJoined(
        hello.incarnation, hello.node, hello.hostname, hello.node_ip, hello.resources, hello.gpus
    )


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
