"""The socket of a service manager such as systemd, which records messages and their senders."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")


class ServiceManager:
    """Receives a service's messages by the notify protocol.

    Args:
        address: a path, or ``@`` and an abstract name.
        watchdog_s: the watchdog timeout, in seconds.
    """

    def __init__(self, address: str, watchdog_s: float = 4.0) -> None:
        self.address, self._watchdog_s = address, watchdog_s
        self._heard: list[tuple[int, str]] = []
        self.listen()

    def listen(self) -> None:
        """Start or restart the service."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.address.replace("@", "\0", 1))

    @property
    def variables(self) -> dict[str, str]:
        """For the service's environment; but for its pid, which only it knows."""
        return {
            "NOTIFY_SOCKET": self.address,
            "WATCHDOG_USEC": str(int(self._watchdog_s * 1e6)),
        }

    def messages(self) -> list[str]:
        """The messages since the last call."""
        found = self._take()
        self._heard += found
        return [text for _, text in found]

    def lines(self) -> list[str]:
        """All lines received so far."""
        self._heard += self._take()
        return [line for _, text in self._heard for line in text.split("\n")]

    def speakers(self) -> set[int]:
        """The pids of all senders so far."""
        self._heard += self._take()
        return {pid for pid, _ in self._heard}

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        Path(self.address).unlink(missing_ok=True)

    def _take(self) -> list[tuple[int, str]]:
        found = []
        while True:
            try:
                text, about, _, _ = self._socket.recvmsg(4096, 256)
            except BlockingIOError:
                return found
            pid = next(
                _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
                for _, kind, data in about
                if kind == socket.SCM_CREDENTIALS
            )
            found.append((pid, text.decode()))


def variable_of(pid: int, name: str) -> str | None:
    """A variable of a running process's environment, as it was started."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = f"{name}=".encode()
    return next((os.fsdecode(v[len(start) :]) for v in variables if v.startswith(start)), None)
