"""How a process begins that works on trials' files for a node (`child_process`)."""

from __future__ import annotations

import argparse
import signal
import socket
from typing import Final

from tunemq_shared.base.unpickling import never_unpickle
from tunemq_shared.system.process_control import die_with_parent, set_name
from tunemq_workers.system.credentials import take_keys
from tunemq_workers.system.trial_user import act_for, find_account

_RECEIVE_BYTES: Final = 256 * 2**10


def begin(module: str, name: str) -> socket.socket:
    """Become what the command line says; the socket to the node.

    Args:
        module: for messages about a wrong command line.
        name: of the process.
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
    # A signal to the whole group is for the node, which may want to let its trials save.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return node


def receive(node: socket.socket) -> bytes:
    """What the node has sent next; empty once it has closed its end."""
    try:
        return node.recv(_RECEIVE_BYTES)
    except ConnectionResetError:  # with answers unread
        return b""
