"""Starting an ear, and the frames that it sends; apart from `ear`, which imports Celery.

Imported before everything else of a node, so it imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Final, NamedTuple

#: The ear consumes the queue; sent once.
READY: Final = ord("R")
#: A task's argument: base64 of a msgpack Assignment.
MAIL: Final = ord("A")


class EarProcess(NamedTuple):
    """A running ear: its process, and the node's end of the socket pair."""

    pid: int
    sock: socket.socket


def start_ear(redis_url: str, incarnation: str, log_path: str) -> EarProcess:
    """Start an ear; call it in the thread whose end shall be the ear's end.

    Raises:
        OSError: no process or no socket is to be had, or the log cannot be written.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        arguments = ["--redis", redis_url, "--incarnation", incarnation]
        arguments += ["--fd", str(theirs.fileno()), "--node-pid", str(os.getpid())]
        writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "tunemq_workers.ear", *arguments],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log_path, writing, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except OSError:
            ours.close()
            raise
    return EarProcess(pid, ours)
