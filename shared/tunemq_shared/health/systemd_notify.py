"""`SystemdNotifier`: reports a service's state by the protocol of systemd's ``sd_notify``.

It sends datagrams of ``NAME=VALUE`` lines to the socket in ``$NOTIFY_SOCKET``. It never waits for
the service manager, and ignores the manager's failures.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
#: The watchdog timeout in microseconds, and the pid of the process that it is for.
_WATCHDOG_VARIABLE: Final = "WATCHDOG_USEC"
_WATCHDOG_PID_VARIABLE: Final = "WATCHDOG_PID"
#: A process with these variables can report for the service.
VARIABLES: Final = (SOCKET_VARIABLE, _WATCHDOG_VARIABLE, _WATCHDOG_PID_VARIABLE)


class SystemdNotifier:
    """Reports to one service manager.

    It connects here and keeps the connection: later this process may lose access to the socket.

    Args:
        address: A path, or ``@`` and an abstract name; any other text is ignored.
    """

    def __init__(self, address: str) -> None:
        abstract = address.startswith("@")
        self._address = "\0" + address[1:] if abstract else address
        self._socket: socket.socket | None = None
        self._is_usable = address.startswith(("/", "@")) and len(address) > 1
        self._connect()

    def tell(self, *lines: str) -> bool:
        """Send the lines in one message; returns whether the manager's socket accepted it."""
        message = "\n".join(lines).encode()
        # A restarted manager has another socket with the same name.
        return self._send(message) or (self._connect() and self._send(message))

    def close(self) -> None:
        """Stop sending."""
        self._is_usable = False
        self._drop()

    def _send(self, message: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(message)
        except OSError:  # the socket's buffer is full, or the manager is gone
            return False
        return True

    def _connect(self) -> bool:
        self._drop()
        if not self._is_usable:
            return False
        # For a path that is too long, Python raises ValueError or OSError.
        with suppress(OSError, ValueError):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            try:
                made.setblocking(False)
                made.connect(self._address)
            except BaseException:
                made.close()
                raise
            self._socket = made
        return self._socket is not None

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def watchdog_s(variables: MutableMapping[str, str]) -> float | None:
    """The watchdog timeout in seconds for this process; None if there is none."""
    microseconds = variables.get(_WATCHDOG_VARIABLE, "")
    about = variables.get(_WATCHDOG_PID_VARIABLE, "")
    if not _is_number(microseconds) or (about and about != str(os.getpid())):
        return None
    return int(microseconds) / 1e6 or None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
