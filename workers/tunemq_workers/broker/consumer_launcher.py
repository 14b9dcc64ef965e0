"""Start consumers, and the kinds of the frames that they send.

Separate from `celery_consumer`, which imports Celery. A node imports this module before all others,
so it imports almost nothing itself.
"""

from __future__ import annotations

import socket
from typing import Final

from tunemq_shared.broker.redis_address import REDIS_VARIABLE
from tunemq_workers.processes.child_process import ChildProcess, start_child
from tunemq_workers.system.credentials import REDIS_KEYS

#: The consumer began to consume the queue; sent once.
READY: Final = ord("R")
#: A task's argument: base64 of a msgpack Assignment.
COMMAND: Final = ord("A")
#: The reason why the consumer rejected a message; see `consumer_messages`.
REJECTED: Final = ord("X")

#: The byte that accompanies a consumer's socket: a descriptor needs at least one byte of data.
_RUN_CONSUMER: Final = b"E"


def start_forkserver(redis_url: str, instance_id: str, log_path: str) -> ChildProcess:
    """Start the process that forks consumers; see `start_child`."""
    redis = {REDIS_VARIABLE: redis_url}  # other users could read a password on the command line
    line = ["--instance-id", instance_id]
    return start_child(
        "tunemq_workers.broker.celery_consumer", line, log_path, redis, needs=REDIS_KEYS
    )


def fork_consumer(forkserver: ChildProcess) -> socket.socket:
    """Ask the forkserver for a consumer; it kills the consumer that it forked before.

    The forkserver answers as soon as it has imported Celery.

    Returns:
        The node's end of the consumer's socket; closing it ends the consumer.

    Raises:
        OSError: no descriptor is free, or the forkserver has ended or hangs.
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
    """Wait for a request to fork a consumer; return its socket, or None if the node is gone."""
    wanted, descriptors, _, _ = socket.recv_fds(node, len(_RUN_CONSUMER), 1)
    return socket.socket(fileno=descriptors[0]) if wanted else None
