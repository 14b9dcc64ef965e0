"""Tells a service manager how a service is, by the protocol of systemd's ``sd_notify``.

Datagrams of ``NAME=VALUE`` lines to the socket that ``$NOTIFY_SOCKET`` names. Nothing here waits
for the manager, and nothing fails with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
#: In how many microseconds the manager wants to hear of the process with this pid.
_WATCHDOG_VARIABLE: Final = "WATCHDOG_USEC"
_WATCHDOG_PID_VARIABLE: Final = "WATCHDOG_PID"
#: Whoever has these may speak for the service.
VARIABLES: Final = (SOCKET_VARIABLE, _WATCHDOG_VARIABLE, _WATCHDOG_PID_VARIABLE)


class SystemdNotifier:
    """Speaks to one manager.

    The connection is made here and kept: later this process may have fewer rights on files.

    Args:
        address: a path, or ``@`` and an abstract name; anything else is nobody's.
    """

    def __init__(self, address: str) -> None:
        abstract = address.startswith("@")
        self._address = "\0" + address[1:] if abstract else address
        self._socket: socket.socket | None = None
        self._is_usable = address.startswith(("/", "@")) and len(address) > 1
        self._connect()

    def tell(self, *lines: str) -> bool:
        """Say this in one message; whether the manager's socket took it."""
        message = "\n".join(lines).encode()
        # A manager that was started anew has another socket of the same name.
        return self._send(message) or (self._connect() and self._send(message))

    def close(self) -> None:
        """Say nothing more."""
        self._is_usable = False
        self._drop()

    def _send(self, message: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(message)
        except OSError:  # it is full, or gone
            return False
        return True

    def _connect(self) -> bool:
        self._drop()
        if not self._is_usable:
            return False
        # A path of more bytes than fit into an address is a ValueError or an OSError, by its kind.
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
    """Within how many seconds the manager wants to hear of this process; None where it does not."""
    microseconds = variables.get(_WATCHDOG_VARIABLE, "")
    about = variables.get(_WATCHDOG_PID_VARIABLE, "")
    if not _is_number(microseconds) or (about and about != str(os.getpid())):
        return None
    return int(microseconds) / 1e6 or None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
