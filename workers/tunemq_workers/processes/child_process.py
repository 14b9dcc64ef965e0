"""Starts a child process of a node, connected with it by a socket pair.

A node imports this module before everything else, so it imports as little as possible.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from tunemq_shared.system.process_attributes import is_memory_private
from tunemq_workers.system.credentials import send_keys, split
from tunemq_workers.system.trial_user import own_files

#: The folder for logs, in a node's working folder. Only the node's user may enter it: a user that
#: may rename a file into a folder can keep others who make or open files there waiting.
LOGS: Final = "logs"


def log_path(workdir: str, name: str) -> str:
    """Return the path of the log of the node's process ``name``."""
    return os.path.join(workdir, LOGS, f"{name}.log")


class ChildProcess(NamedTuple):
    """A running child, and the node's end of the socket pair."""

    pid: int
    sock: socket.socket


def start_child(
    module: str,
    arguments: Sequence[str],
    log_path: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    needs: Container[str] = (),
) -> ChildProcess:
    """Run ``module``; call this in a thread at whose end the child may be killed.

    Besides ``arguments`` the child gets ``--fd`` with its end of the socket pair and
    ``--node-pid``. Its input is empty, and its output goes to ``log_path``. ``variables`` are added
    to its environment. It has to call `tunemq_workers.system.credentials.take_keys` first: if the
    node hides its memory, the child receives only the keys that it ``needs``.

    Raises:
        OSError: no process or socket is available, or the log cannot be written.
    """
    ours, theirs = socket.socketpair()
    shown, keys, is_hidden = {**os.environ, **variables}, dict[str, str](), is_memory_private()
    if is_hidden:
        shown, keys = split(shown)
    with theirs, own_files():
        theirs.set_inheritable(True)
        line = ["--fd", str(theirs.fileno()), "--node-pid", str(os.getpid())]
        writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", module, *arguments, *line],
                shown,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log_path, writing, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
                setpgroup=0,  # Ctrl-C at a worker's terminal is for the node only
            )
        except OSError:
            ours.close()
            raise
    given = {name: value for name, value in keys.items() if name in needs}
    send_keys(ours, given, is_hidden=is_hidden)
    return ChildProcess(pid, ours)
