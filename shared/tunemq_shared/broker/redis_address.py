"""`RedisAddress`: one Redis URL that all clients of scheduler and nodes understand alike.

    redis://USER:PASSWORD@HOST:6379/0
    rediss://USER:PASSWORD@HOST:6379/0?ssl_ca_certs=/etc/tunemq/ca.pem
    unix://USER:PASSWORD@/run/redis.sock?db=0

``rediss`` encrypts the connection. The server must then present a certificate for HOST that one of
``ssl_ca_certs`` has signed, by default one that this machine trusts. ``ssl_certfile`` and
``ssl_keyfile`` identify this client to a server that asks for a certificate.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from tunemq_shared.base.errors import ConfigError

#: The address of Redis if the command line has none. Unlike an argument, a password in it does not
#: show in the process list.
REDIS_VARIABLE: Final = "TUNEMQ_REDIS"

#: The user of a URL that names none.
DEFAULT_USER: Final = "default"

_DEFAULT_PORT: Final = 6379
_CA_FILE, _CERT_FILE, _KEY_FILE = _FILES = "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"
_VERIFY: Final = "ssl_cert_reqs"
_TLS_OPTIONS: Final = frozenset({*_FILES, _VERIFY})
_FORMS: Final = (
    "write redis://user:password@host:6379/0, rediss://user:password@host:6379/0 or"
    " unix:///path/of/socket."
)


class RedisAddress(NamedTuple):
    """A parsed ``unix://``, ``redis://`` or ``rediss://`` URL.

    ``path`` is that of a unix socket, else empty. The fields after ``tls`` matter only with it.
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
    cert_file: str = ""
    key_file: str = ""

    def __str__(self) -> str:
        """The address without credentials, for logs and errors."""
        place = self.path or f"{_bracketed(self.host)}:{self.port}"
        return f"{place}/{self.database}" if self.database else place

    def __repr__(self) -> str:
        """The URL without credentials."""
        return f"RedisAddress({self.without_credentials()!r})"

    @property
    def is_local(self) -> bool:
        """Whether the connection stays on this machine: a unix socket, or the loopback."""
        if self.path:
            return True
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:  # the name does not resolve: Redis cannot be reached either
            return False
        return all(_is_loopback(str(place[0])) for *_, place in found)

    @property
    def is_default_user(self) -> bool:
        """Whether this is Redis's default user, which clients without a user name become."""
        return self.user in {"", DEFAULT_USER}

    def connect(self, timeout_s: float) -> socket.socket:
        """Open a socket; ``timeout_s`` bounds connecting and, later, every send and receive.

        Raises:
            OSError: No server accepts the connection in time, or its certificate is wrong.
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

    def without_credentials(self) -> str:
        """The URL without credentials: for display, and for clients that add their own user."""
        return self._url({"db": str(self.database)} if self.path else {})

    def url(self) -> str:
        """The URL in redis-py's syntax."""
        if self.path:
            return self._url({"db": str(self.database)}, self._credentials())
        checked = {"ssl_check_hostname": str(self.verify).lower()} if self.tls else {}
        return self._url({**self._tls_options(), **checked}, self._credentials())

    def celery_url(self) -> str:
        """The URL in Celery's syntax."""
        if self.path:
            where = quote(self.path)
            query = urlencode({"virtual_host": self.database})
            return f"redis+socket://{self._credentials()}{where}?{query}"
        return self.url()

    def _url(self, options: Mapping[str, str], credentials: str = "") -> str:
        query = f"?{urlencode(options)}" if options else ""
        if self.path:
            return f"unix://{credentials}{quote(self.path)}{query}"
        scheme = "rediss" if self.tls else "redis"
        place = f"{_bracketed(self.host)}:{self.port}"
        return f"{scheme}://{credentials}{place}/{self.database}{query}"

    def _credentials(self) -> str:
        if not self.password:
            return ""
        return f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@"

    def _tls_options(self) -> dict[str, str]:
        if not self.tls:
            return {}
        files = dict(zip(_FILES, (self.ca_file, self.cert_file, self.key_file), strict=True))
        given = {name: path for name, path in files.items() if path}
        return {_VERIFY: "required" if self.verify else "none", **given}

    def _secured(self, sock: socket.socket) -> socket.socket:
        import ssl  # half a megabyte, which a node on the same machine as Redis does not need

        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file or None)
            return context.wrap_socket(sock, server_hostname=self.host)
        except OSError:
            sock.close()
            raise


def parse_address(url: str) -> RedisAddress:
    """Parse a Redis URL.

    Raises:
        ConfigError: The URL is invalid; shows the valid forms and repeats nothing of the URL.
    """
    try:
        return _parsed(url)
    except ConfigError:
        raise
    except ValueError:  # its text may quote a part of the password
        raise ConfigError(f"The address of Redis has a part that is wrong; {_FORMS}") from None


def _parsed(url: str) -> RedisAddress:
    parts = urlsplit(url)
    if "@" in parts.query or "@" in parts.fragment:  # an unescaped ? or # in the password
        raise ConfigError(
            "The address of Redis has an @ behind a ? or #: write ? / # in a password as"
            " %3F %2F %23."
        )
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix" and parts.path:
        _check_options(options, frozenset({"db", "password"}))
        return RedisAddress(
            path=unquote(parts.path),
            host="",
            port=0,
            database=int(options.get("db", "0")),
            user=user,
            password=password or options.get("password", ""),
        )
    if parts.scheme in {"redis", "rediss"}:
        tls = parts.scheme == "rediss"
        _check_options(options, _TLS_OPTIONS | {"db"} if tls else frozenset({"db"}))
        return RedisAddress(
            path="",
            host=parts.hostname or "localhost",
            port=parts.port or _DEFAULT_PORT,
            database=int(parts.path.strip("/") or options.get("db", "0")),
            user=user,
            password=password,
            tls=tls,
            verify=options.get(_VERIFY, "required") != "none",
            ca_file=options.get(_CA_FILE, ""),
            cert_file=options.get(_CERT_FILE, ""),
            key_file=options.get(_KEY_FILE, ""),
        )
    raise ConfigError(f"The address of Redis starts with {parts.scheme or 'no scheme'!r}; {_FORMS}")


def _check_options(options: Mapping[str, str], known: frozenset[str]) -> None:
    """Reject options that one client would use and another ignore.

    Raises:
        ConfigError: Names the unknown or invalid option.
    """
    for name in sorted(options.keys() - known):
        raise ConfigError(
            f"The address of Redis has an option {name!r}; there are: {', '.join(sorted(known))}."
        )
    if options.get(_VERIFY, "required") not in {"required", "none"}:
        raise ConfigError(
            f"The address of Redis has {_VERIFY}={options[_VERIFY]!r}; write required, or none."
        )
    for name in _FILES:
        path = options.get(name)
        if path is None:
            continue
        if not os.path.isabs(path):
            raise ConfigError(
                f"The address of Redis has {name}={path!r}; write an absolute path, for processes"
                " that work in other folders."
            )
        if not os.path.exists(path):
            raise ConfigError(f"The address of Redis has {name}={path!r}; there is no such file.")


def _is_loopback(host: str) -> bool:
    place = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(place, "ipv4_mapped", None)
    return (mapped or place).is_loopback


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
