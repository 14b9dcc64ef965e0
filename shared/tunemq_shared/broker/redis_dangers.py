"""Find security risks of a Redis, as far as any of its clients can see them.

Scheduler and nodes check at start. A Redis that is not on the loopback must ask for a password,
must have one user per role, must encrypt connections, and must not have a known weakness by which a
user gains all rights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tunemq_shared.broker.redis_address import REDIS_VARIABLE, RedisAddress
from tunemq_shared.broker.redis_cves import VALKEY, RedisRelease

_TIMEOUT_S: Final = 2.0

#: The first with ``XADD NOMKSTREAM`` and ``XTRIM MINID``, and the oldest that Celery 5.7 supports.
OLDEST: Final = (6, 2, 0)

PASSWORD, DEFAULT_USER, TLS = "redis-password", "redis-default-user", "redis-tls"
VERSION, CVE = "redis-version", "redis-cve"

_USERS: Final = (
    "load deploy/redis/users.acl (aclfile in redis.conf), which switches the default user off, and"
    " give each role its own: redis://scheduler:PASSWORD@host:6379/0."
)

#: The first words of a rejected login.
LOGIN_REJECTED: Final = ("WRONGPASS ", "NOAUTH ")

#: What to do if Redis forbids a command to the user of a role.
LACKS_RIGHTS: Final = "give its user the rights of its role in deploy/redis/users.acl"

_PATCHED: Final = (
    "or a release of your line or a vendor's package that has the fix (a backport), with"
    " --insecure."
)


class RedisRisk(NamedTuple):
    """A problem and its fix; ``check`` is its name in `tunemq doctor`."""

    check: str
    what: str
    fix: str


def login_rejected(address: RedisAddress, answer: object) -> str:
    """Say which user Redis does not let in, why, and what to do."""
    return (
        f"Redis at {address} refuses the user {address.user or 'default'!r}"
        f" ({str(answer).rstrip('.')}): write"
        f" its present password into ${REDIS_VARIABLE} and start this again, or give it the"
        " password back in Redis (ACL SETUSER)."
    )


def dangers(address: RedisAddress, release: RedisRelease) -> Iterator[RedisRisk]:
    """Iterate over the reasons not to use a reachable Redis; none if it is safe.

    Args:
        address: Its address, with the user that we log in as.
        release: Its product and version, as the server reports them.
    """
    if release.number and release.number < OLDEST:
        yield RedisRisk(
            VERSION,
            f"Redis at {address} is of version {release.version}, and lacks commands of 6.2.",
            "install Redis 6.2 or later (or Valkey).",
        )
    if address.is_local:
        return
    yield from dangers_with_password(address, release)
    if lets_everybody_in(address):
        yield RedisRisk(
            PASSWORD, f"Redis at {address} lets everybody in, without a password.", _USERS
        )


def dangers_with_password(address: RedisAddress, release: RedisRelease) -> Iterator[RedisRisk]:
    """Iterate over the dangers of a Redis that other machines reach, if it has a password."""
    yield from _dangers_of_way(address)
    if release.has_cve:
        yield _cve(address, release)


def lets_everybody_in(address: RedisAddress) -> bool:
    """Whether Redis serves a client that has neither password nor certificate."""
    return _answer(address._replace(cert_file="", key_file="")).startswith(b"+PONG")


def is_there(address: RedisAddress) -> bool:
    """Whether Redis serves clients there, if only those with a password; sends it none."""
    return _answer(address).startswith((b"+PONG", b"-NOAUTH"))


def _answer(address: RedisAddress) -> bytes:
    """The answer to a client without a password; empty for none."""
    try:
        with address.connect(_TIMEOUT_S) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(64)
    except OSError:  # Redis does not even accept the connection
        return b""


def _cve(address: RedisAddress, release: RedisRelease) -> RedisRisk:
    if release.product == VALKEY:
        weak = f"Redis at {address} is {release}: before 7.2.13, 8.0.8, 8.1.7 and 9.0.4"
        fix = "install one of these, or later of its line"
    else:
        weak = f"Redis at {address} is of version {release.version}: from 7.2.0 to 8.6.2"
        fix = "install Redis 8.6.3 or later (6.2 and 7.0 do not have this weakness)"
    what = f"{weak} any of its users can have it run code (CVE-2026-23479)."
    return RedisRisk(CVE, what, f"{fix}, {_PATCHED}")


def _dangers_of_way(address: RedisAddress) -> Iterator[RedisRisk]:
    if address.is_default_user:
        yield RedisRisk(
            DEFAULT_USER,
            f"Redis at {address} is used as its default user, who may do everything.",
            _USERS,
        )
    if not address.tls:
        yield RedisRisk(
            TLS,
            f"What goes to Redis at {address} is not encrypted, the password included.",
            "give Redis a certificate (tls-port, tls-cert-file and tls-key-file, as in"
            " deploy/redis/redis.conf) and write rediss://host:6379/0?ssl_ca_certs=/path/of/ca.pem.",
        )
    elif not address.verify:
        yield RedisRisk(
            TLS,
            f"Redis at {address} could be another server: its certificate is not verified.",
            "write ssl_ca_certs=/path/of/ca.pem in place of ssl_cert_reqs=none.",
        )
