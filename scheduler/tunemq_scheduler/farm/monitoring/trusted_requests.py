"""`TrustedRequests`: rejects HTTP requests that web pages make in browsers.

A browser sends requests for web pages: for a page whose name was made to resolve to this server
(DNS rebinding), or for one that requests data it may not read (CSRF).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from email.message import Message
from http import HTTPMethod
from typing import Final

from tunemq_shared.base.errors import ConfigError

#: The allowed methods; requests with others are rejected before anything else is parsed.
METHODS: Final = frozenset({HTTPMethod.GET, HTTPMethod.HEAD})
#: The command-line option that adds names of this server.
_OPTION: Final = "--metrics-host"

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(:\d{1,5})?")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")


class UntrustedRequest(Exception):
    """A request that is not answered, with the reason."""


class TrustedRequests:
    """Rejects requests for other servers, and requests from web pages.

    Args:
        names: further names of the server. ``localhost``, the machine's name and all IP addresses
            are always allowed, because an IP address cannot be rebound.

    Raises:
        ConfigError: a name is invalid.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        machine = socket.gethostname()
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{_OPTION} {name!r} is no name; give that of this server, as clients "
                    "write it: without http:// and port."
                )
        self._names = {_plain(name) for name in (*names, machine, "localhost")}

    def check(self, method: str, headers: Message) -> None:
        """Check that a request may come from a legitimate client.

        Args:
            method: the HTTP method.
            headers: the request's headers.

        Raises:
            UntrustedRequest: it cannot.
        """
        if method not in METHODS:
            raise UntrustedRequest("there is no such request")
        hosts = headers.get_all("Host", [])
        if len(hosts) != 1 or not self._is_ours(str(hosts[0])):
            raise UntrustedRequest(
                f"this server is not called {str(hosts[0])[:253]!a}: start it with {_OPTION}"
                " NAME if it is"
                if hosts
                else "the request does not say which server it is for",
            )
        if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") != "none":
            raise UntrustedRequest("this is no server for the pages of browsers")

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host.strip())
        if found is None:
            return False
        name = found[1].strip("[]")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return _plain(name) in self._names
        return True


def _plain(name: str) -> str:
    return name.lower().rstrip(".")
