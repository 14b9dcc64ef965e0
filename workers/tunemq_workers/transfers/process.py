"""The transfers process: sends checkpoints to object stores and fetches them, for its node.

    python -P -m tunemq_workers.transfers.process --fd FD --node-pid PID [--trial-user USER]

A process of its own, so that neither hashing nor a store's client slows the node's loop, and with a
lower priority than training. It holds nothing that would be missed, so whatever breaks it, its node
starts another and orders again what is unfinished. It ends when its node closes the socket.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import threading
from typing import Final

from tunemq_shared.prctl import die_with_parent, set_name
from tunemq_workers.account import act_for, find_account
from tunemq_workers.credentials import take_keys
from tunemq_workers.frames import FrameDecoder, frame
from tunemq_workers.transfers.messages import ANSWER, Answer, decode_order, encode
from tunemq_workers.transfers.performer import Performer

#: Added to the node's own: training comes first.
_NICENESS: Final = 10
_RECEIVE_BYTES: Final = 256 * 2**10
#: The process is broken (EX_SOFTWARE).
_EXIT_BROKEN: Final = 70

_log = logging.getLogger(__name__)


def main() -> None:
    """Do what the node orders until it closes the socket named on the command line."""
    parser = argparse.ArgumentParser(prog="tunemq_workers.transfers.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--node-pid", type=int, required=True)
    parser.add_argument("--trial-user", help="with whose rights it works on files")
    options = parser.parse_args()
    node = socket.socket(fileno=options.fd)
    take_keys(node)
    if options.trial_user:
        act_for(find_account(options.trial_user))
    die_with_parent(options.node_pid)
    set_name("tunemq-transfer")
    os.nice(_NICENESS)
    # A signal to the whole group is for the node, which may want to finish its uploads.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    code = 0
    try:
        _serve(node)
    except BaseException:  # noqa: BLE001 - whoever started the process sees its exit code, this the log
        _log.critical("transfers.broken", exc_info=True)
        code = _EXIT_BROKEN
    # Threads may be in the middle of transfers; nothing of them outlives the node.
    os._exit(code)


def _serve(node: socket.socket) -> None:
    sending = threading.Lock()

    def answer(answer: Answer) -> None:
        with sending:
            node.sendall(frame(ANSWER, encode(answer)))

    performer, decoder = Performer(answer), FrameDecoder()
    while data := _receive(node):
        for _, payload in decoder.feed(data):
            performer.obey(decode_order(payload))


def _receive(node: socket.socket) -> bytes:
    try:
        return node.recv(_RECEIVE_BYTES)
    except ConnectionResetError:  # it closed with answers unread
        return b""


if __name__ == "__main__":
    main()
