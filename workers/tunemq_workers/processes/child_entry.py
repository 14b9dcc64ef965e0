"""The start of a process that works on trial files for a node (see `child_process`)."""

from __future__ import annotations

import argparse
import signal
import socket
from typing import Final

from tunemq_shared.base.unpickling import never_unpickle
from tunemq_shared.system.process_attributes import die_with_parent, set_name
from tunemq_workers.system.credentials import take_keys
from tunemq_workers.system.trial_user import act_for, find_account

_RECEIVE_BYTES: Final = 256 * 2**10


def begin(module: str, name: str) -> socket.socket:
    """Apply the options of the command line to this process, and return the socket to the node.

    Args:
        module: the program's name in messages about a wrong command line.
        name: the name of the process.
    """
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--node-pid", type=int, required=True)
    parser.add_argument("--trial-user", help="with whose rights it works on files")
    options = parser.parse_args()
    node = socket.socket(fileno=options.fd)
    take_keys(node)
    never_unpickle()
    if options.trial_user:
        act_for(find_account(options.trial_user))
    die_with_parent(options.node_pid)
    set_name(name)
    # Only the node handles a signal to the whole group: it may let its trials save first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return node


def receive(node: socket.socket) -> bytes:
    """Return the next bytes from the node; empty once it has closed its end."""
    try:
        return node.recv(_RECEIVE_BYTES)
    except ConnectionResetError:  # the node closed with answers unread
        return b""
