"""Starting the transfers process; apart from `process`, which imports the stores' clients."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NamedTuple


class TransferProcess(NamedTuple):
    """A running transfers process, and the node's end of the socket pair."""

    pid: int
    sock: socket.socket


def start_transfers(log_path: str) -> TransferProcess:
    """Start a transfers process; call it in the thread whose end shall be the process's end.

    Raises:
        OSError: no process or no socket is to be had, or the log cannot be written.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        arguments = ["--fd", str(theirs.fileno()), "--node-pid", str(os.getpid())]
        writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "tunemq_workers.transfers.process", *arguments],
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
    return TransferProcess(pid, ours)
