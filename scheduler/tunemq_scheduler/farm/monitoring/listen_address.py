"""Parses listen addresses (``HOST:PORT``) of a command line, and opens their sockets."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

from tunemq_shared.base.errors import ConfigError

_BACKLOG: Final = 256


class AddressInUse(ConfigError):
    """Another process listens at the address, perhaps for a while only."""


def parse_listen(text: str, option: str = "--listen") -> tuple[str, int]:
    """Return the host, empty for all of the machine's addresses, and the port.

    Args:
        text: the address.
        option: the command-line option, for messages.

    Raises:
        ConfigError: it is not ``HOST:PORT``.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (
        not colon
        or not (port.isascii() and port.isdecimal() and int(port) < 2**16)
        or (":" in host and not is_bracketed)
    ):
        raise ConfigError(
            f"{option} {text!r} is invalid; give HOST:PORT, :PORT for all of this machine's "
            "addresses, or [::1]:PORT."
        )
    return (host[1:-1] if is_bracketed else host), int(port)


def listener(host: str, port: int, option: str) -> socket.socket:
    """Open a listening socket.

    Raises:
        AddressInUse: another process listens there.
        ConfigError: the address cannot be used; names the option.
    """
    try:
        if not host and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be disabled
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
                )
        (family, *_, address), *_ = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        kind = AddressInUse if error.errno == errno.EADDRINUSE else ConfigError
        raise kind(
            f"{option} {host}:{port} cannot be used: {error.strerror or error}; choose an address "
            "of this machine, and a port that is free."
        ) from error
