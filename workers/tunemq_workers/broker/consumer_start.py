"""Starting consumers, and the frames that they send; apart from `consumer`, which imports Celery.

Imported before everything else of a node, so it imports next to nothing.
"""

from __future__ import annotations

import socket
from typing import Final

from tunemq_shared.broker.redis_address import REDIS_VARIABLE
from tunemq_workers.processes.child_process import ChildProcess, start_child
from tunemq_workers.system.credentials import REDIS_KEYS

#: The consumer consumes the queue; sent once.
READY: Final = ord("R")
#: A task's argument: base64 of a msgpack Assignment.
COMMAND: Final = ord("A")
#: Why something in the queue was no task of ours; see `tunemq_workers.broker.consumer_messages`.
REJECTED: Final = ord("X")

#: What goes with a consumer's socket: a descriptor does not travel alone.
_RUN_CONSUMER: Final = b"E"


def start_forkserver(redis_url: str, instance_id: str, log_path: str) -> ChildProcess:
    """Start a process that consumers are forked from; see `start_child`."""
    redis = {REDIS_VARIABLE: redis_url}  # on a command line all could read its password
    line = ["--instance-id", instance_id]
    return start_child(
        "tunemq_workers.broker.celery_consumer", line, log_path, redis, needs=REDIS_KEYS
    )


def fork_consumer(forkserver: ChildProcess) -> socket.socket:
    """Have a consumer forked, as soon as Celery is imported; the one forked before is killed first.

    Returns the node's end of the consumer's socket; the consumer ends with it.

    Raises:
        OSError: no socket is to be had, or the forkserver has ended, or is stuck.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(forkserver.sock, [_RUN_CONSUMER], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


def next_socket(node: socket.socket) -> socket.socket | None:
    """Wait for the order to fork a consumer: its socket, or None once the node is gone."""
    wanted, descriptors, _, _ = socket.recv_fds(node, len(_RUN_CONSUMER), 1)
    return socket.socket(fileno=descriptors[0]) if wanted else None
