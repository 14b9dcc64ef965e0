"""Which variables of a node's environment are the farm's keys, and how they reach its children.

A node of a farm hides its memory from other processes of its user, and so do its children. What a
process was started with stands in ``/proc/PID/environ`` from its first moment, before it can hide
anything: so they get keys over their sockets, see `tunemq_workers.processes.child_process`.
Embedded, there is nothing to hide: trials have the environment of their script.

Imported before everything else of a node, so it imports next to nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from tunemq_shared.system.process_control import keep_memory_private

#: What those need who send to stores and fetch from them, and trials must not have.
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
#: What consumers need.
REDIS_KEYS: Final = frozenset({"TUNEMQ_REDIS"})

_LENGTH_BYTES: Final = 4


def is_for_trials(name: str) -> bool:
    """Whether trials may have this variable of their node's environment."""
    return not name.startswith(_OURS) and name not in STORE_KEYS


def split(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """An environment's variables: those that all may see, and the keys."""
    keys = {name: value for name, value in variables.items() if name in REDIS_KEYS | STORE_KEYS}
    return {name: value for name, value in variables.items() if name not in keys}, keys


def send_keys(child: socket.socket, keys: Mapping[str, str], *, is_hidden: bool) -> None:
    """Give a child what `take_keys` waits for; a few hundred bytes, which never block.

    Args:
        keys: what is added to its environment.
        is_hidden: whether it is to hide its memory.
    """
    text = b"\0".join(os.fsencode(f"{name}={value}") for name, value in keys.items())
    child.sendall(bytes([is_hidden]) + len(text).to_bytes(_LENGTH_BYTES, "big") + text)


def take_keys(node: socket.socket) -> None:
    """Put what `send_keys` sent into the environment, having hidden this process's memory before.

    The node may be gone already; then nothing comes, and the next read from ``node`` says so.
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
