"""The transfers process: upload files to object stores and download them, for its node.

    python -P -m tunemq_workers.transfers.transfer_process --fd FD --node-pid PID [--trial-user
    USER]

It is a separate process so that hashing and store clients do not slow down the node's loop, and it
has a lower priority than training. It holds no state: after a failure the node starts another one
and repeats the unfinished orders. It ends when its node closes the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from tunemq_shared.objects.store_traffic import TRAFFIC, StoreTraffic
from tunemq_workers.processes.child_entry import begin, receive
from tunemq_workers.runtime import transfer_messages as messages
from tunemq_workers.runtime.frames import ANSWER, MAX_FRAME_BYTES, FrameDecoder, frame
from tunemq_workers.transfers.transfer_performer import TransferPerformer

#: Added to the node's niceness: training comes first.
_NICENESS: Final = 10
#: Seconds between two reports of store traffic; one is sent only if the traffic changed.
_COUNT_EVERY_S: Final = 2.0
#: Exit code after an internal error (EX_SOFTWARE).
_EXIT_BROKEN: Final = 70

_log = logging.getLogger(__name__)


def main() -> None:
    """Carry out the node's orders until it closes the socket named on the command line."""
    node = begin("tunemq_workers.transfers.transfer_process", "tunemq-transfer")
    os.nice(_NICENESS)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    code = 0
    try:
        _serve(node)
    except BaseException:  # noqa: BLE001 - the node sees the exit code, the log has the error
        _log.critical("transfers.broken", exc_info=True)
        code = _EXIT_BROKEN
    # Threads may still run transfers; none may outlive the node.
    os._exit(code)


def _serve(node: socket.socket) -> None:
    sending = threading.Lock()

    def answer(answer: messages.TransferAnswer) -> None:
        payload = frame(ANSWER, messages.encode(answer))
        if len(payload) > MAX_FRAME_BYTES:
            assert isinstance(answer, messages.TransferDone)  # other texts are shortened
            reason = f"the names of the objects that it refers to have {len(payload):,} bytes"
            payload = frame(ANSWER, messages.encode(messages.TransferFailed(answer.id, reason)))
        with sending:
            node.sendall(payload)

    threading.Thread(target=_count, args=(answer,), name="counts", daemon=True).start()
    performer, decoder = TransferPerformer(answer), FrameDecoder()
    while data := receive(node):
        for _, payload in decoder.feed(data):
            performer.obey(messages.decode_order(payload))


def _count(answer: Callable[[messages.TransferAnswer], None]) -> None:
    """Report store traffic to the node until it closes the socket."""
    told = StoreTraffic()
    with contextlib.suppress(OSError):
        while True:
            if (traffic := TRAFFIC.so_far()) != told:
                told = traffic
                answer(messages.TransferTraffic(traffic))
            time.sleep(_COUNT_EVERY_S)


if __name__ == "__main__":
    main()
