"""Sockets to processes that run users' code, which may send descriptors to block their node.

A descriptor that is not received is closed by the process that it was sent to, inside the receiving
call or the socket's own `close`. That may take as long as the sender wants: for a socket with
SO_LINGER, or a pipe that another thread splices into. A pipe in place of the socket would not help:
its writer can hold its lock (`splice` from a silent socket), and every read then waits.
"""

from __future__ import annotations

import atexit
import signal
import socket
from typing import Final

from tunemq_workers.runtime.reactor import do_nothing

#: Of Linux 6.16 and newer, by its number because Python has no name for it.
_SO_PASSRIGHTS: Final = 83
_INTERRUPT_S: Final = 0.2


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Return a node's end, to which no descriptors can be sent, and the other end.

    Linux before 6.16 cannot refuse them: see `interrupt_lingering`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.setblocking(False)
    _refuses_descriptors(ours)
    return ours, theirs


def interrupt_lingering() -> None:
    """Bound how long a descriptor that was sent can make this process linger (SO_LINGER).

    Has no effect where descriptors are refused. Signals end the wait; call it in the main thread.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        if not _refuses_descriptors(sock):
            signal.signal(signal.SIGALRM, do_nothing)
            signal.siginterrupt(signal.SIGALRM, False)
            signal.setitimer(signal.ITIMER_REAL, _INTERRUPT_S, _INTERRUPT_S)
            # An interpreter that ends restores the default action of SIGALRM, which is to die.
            atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


def _refuses_descriptors(sock: socket.socket) -> bool:
    """Make a socket refuse descriptors; return whether the kernel can do that."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True
