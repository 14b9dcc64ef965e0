"""Where Redis is: one URL, understood alike by the node and by the ear's Celery."""

from __future__ import annotations

import socket
from typing import Final, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from tunemq_shared.errors import ConfigError

#: Where Redis is, if the command line does not say: a password in it is then in no list of
#: processes that others see.
REDIS_VARIABLE: Final = "TUNEMQ_REDIS"

_DEFAULT_PORT: Final = 6379


class RedisAddress(NamedTuple):
    """A parsed ``unix://``, ``redis://`` or ``rediss://`` URL.

    ``path`` is that of a unix socket, else empty. ``ca_file`` and ``verify`` matter with ``tls``.
    """

    path: str
    host: str
    port: int
    database: int
    user: str
    password: str
    tls: bool = False
    verify: bool = True
    ca_file: str = ""

    def __str__(self) -> str:
        """The place without the credentials, for logs and errors."""
        place = self.path or f"{self.host}:{self.port}"
        return f"{place}/{self.database}" if self.database else place

    def connect(self, timeout_s: float) -> socket.socket:
        """Open a socket; ``timeout_s`` bounds connecting and, later, every send and receive.

        Raises:
            OSError: nobody listens there, or not in time.
        """
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout_s)
                sock.connect(self.path)
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self.host, self.port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return self._secured(sock) if self.tls else sock

    def celery_url(self) -> str:
        """The same place as Celery spells it."""
        if self.path:
            credentials = f":{quote(self.password, safe='')}@" if self.password else ""
            query = urlencode({"virtual_host": self.database})
            return f"redis+socket://{credentials}{self.path}?{query}"
        credentials = ""
        if self.password:
            credentials = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@"
        scheme = "rediss" if self.tls else "redis"
        url = f"{scheme}://{credentials}{_bracketed(self.host)}:{self.port}/{self.database}"
        if not self.tls:
            return url
        options = {"ssl_cert_reqs": "required" if self.verify else "none"}
        if self.ca_file:
            options["ssl_ca_certs"] = self.ca_file
        return f"{url}?{urlencode(options)}"

    def _secured(self, sock: socket.socket) -> socket.socket:
        import ssl  # half a megabyte that a node beside its Redis does not need

        context = ssl.create_default_context(cafile=self.ca_file or None)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        try:
            return context.wrap_socket(sock, server_hostname=self.host)
        except OSError:
            sock.close()
            raise


def parse_address(url: str) -> RedisAddress:
    """Read a Redis URL.

    Raises:
        ConfigError: it is not one; says what one looks like.
    """
    parts = urlsplit(url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    try:
        if parts.scheme == "unix" and parts.path:
            return RedisAddress(
                path=unquote(parts.path),
                host="",
                port=0,
                database=int(options.get("db", "0")),
                user=unquote(parts.username or ""),
                password=unquote(parts.password or options.get("password", "")),
            )
        if parts.scheme in {"redis", "rediss"}:
            return RedisAddress(
                path="",
                host=parts.hostname or "localhost",
                port=parts.port or _DEFAULT_PORT,
                database=int(parts.path.strip("/") or options.get("db", "0")),
                user=unquote(parts.username or ""),
                password=unquote(parts.password or ""),
                tls=parts.scheme == "rediss",
                verify=options.get("ssl_cert_reqs", "required") != "none",
                ca_file=options.get("ssl_ca_certs", ""),
            )
    except ValueError as problem:
        raise ConfigError(f"The address of Redis has a part that is wrong: {problem}.") from None
    raise ConfigError(
        f"The address of Redis starts with {parts.scheme or 'no scheme'!r}; "
        "write redis://host:6379/0, rediss://host:6379/0 or unix:///path/of/socket."
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
