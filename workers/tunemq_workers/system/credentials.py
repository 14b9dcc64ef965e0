"""Separate the farm's keys from a node's environment, and pass them to its children.

A farm's node and its children hide their memory from other processes of the same user. But
``/proc/PID/environ`` shows a process's initial environment from the start, before it can hide
anything. So children receive keys over their sockets; see `tunemq_workers.processes.child_process`.
An embedded farm has nothing to hide: trials have their script's environment.

A node imports this module before all others, so it imports almost nothing itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from tunemq_shared.system.process_attributes import keep_memory_private

#: The variables that processes with access to stores need and that trials must not have.
STORE_KEYS: Final = frozenset({
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MINIO_ACCESS_KEY",
    "MINIO_SECRET_KEY",
    "MINIO_ROOT_USER",
    "MINIO_ROOT_PASSWORD",
})  # fmt: skip
_OURS: Final = "TUNEMQ_"
#: The variables that consumers need.
REDIS_KEYS: Final = frozenset({"TUNEMQ_REDIS"})

_LENGTH_BYTES: Final = 4


def is_for_trials(name: str) -> bool:
    """Return whether trials may have this variable of their node's environment."""
    return not name.startswith(_OURS) and name not in STORE_KEYS


def split(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split an environment into variables that all may see, and keys."""
    keys = {name: value for name, value in variables.items() if name in REDIS_KEYS | STORE_KEYS}
    return {name: value for name, value in variables.items() if name not in keys}, keys


def send_keys(child: socket.socket, keys: Mapping[str, str], *, is_hidden: bool) -> None:
    """Send a child the keys that `take_keys` waits for; a few hundred bytes, so this never blocks.

    Args:
        child: the socket to the child.
        keys: variables to add to its environment.
        is_hidden: whether the child must hide its memory.
    """
    text = b"\0".join(os.fsencode(f"{name}={value}") for name, value in keys.items())
    child.sendall(bytes([is_hidden]) + len(text).to_bytes(_LENGTH_BYTES, "big") + text)


def take_keys(node: socket.socket) -> None:
    """Hide this process's memory if the node says so, then add its keys to the environment.

    If the node is gone, nothing arrives, and the next read from ``node`` shows that.
    """
    if _read(node, 1) == b"\1":
        keep_memory_private()
    text = _read(node, int.from_bytes(_read(node, _LENGTH_BYTES), "big"))
    for variable in filter(None, text.split(b"\0")):
        name, _, value = variable.partition(b"=")
        os.environb[name] = value


def _read(node: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := node.recv(size - len(data))):
        data += more
    return data
