"""Expiry of the TLS certificates of Redis and the store, as the farm's head sees them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from tunemq_shared.base.errors import TuneError
from tunemq_shared.broker.redis_address import RedisAddress
from tunemq_shared.broker.redis_address import parse_address as parse_redis
from tunemq_shared.objects.s3_address import as_reached_from_here, find_ca_file, parse_address
from tunemq_shared.objects.store_address import is_remote

_ANSWER_S: Final = 10.0
#: A file with more is a bundle of public authorities: some of them expire, and none is the farm's.
_MOST_AUTHORITIES: Final = 10


class Certificate(NamedTuple):
    """One of a farm's certificates.

    Attributes:
        name: Its use: ``redis``, ``redis_ca``, ``store`` or ``store_ca``.
        place: The server that presents it, or its file, for people.
        expires: Returns its expiry in Unix time; None if unknown. Raises OSError, ValueError or
            TuneError if it cannot be read.
    """

    name: str
    place: str
    expires: Callable[[], float | None]


def certificates_of(url: str, store: str, environ: Mapping[str, str]) -> Iterator[Certificate]:
    """Iterate over the certificates of Redis and the store: the servers' and the trusted ones.

    Args:
        url: Of Redis.
        store: The store's address; empty if unknown.
        environ: Names the store's certificates.
    """
    redis = parse_redis(url)
    if redis.tls:
        yield Certificate("redis", f"Redis at {redis}", partial(_of_redis, redis))
        if redis.ca_file:
            yield Certificate("redis_ca", redis.ca_file, partial(_first_in, redis.ca_file))
    if not is_remote(store):
        return
    with suppress(TuneError):
        endpoint, ca_file = _store_place(store, environ)
        if endpoint.startswith("https://"):
            served = partial(_of_server, endpoint, ca_file)
            yield Certificate("store", f"the store at {endpoint}", served)
            if ca_file:
                yield Certificate("store_ca", ca_file, partial(_first_in, ca_file))


def _of_redis(redis: RedisAddress) -> float | None:
    connection = redis.connect(_ANSWER_S)
    with connection:
        return _expiry(connection)


def _store_place(store: str, environ: Mapping[str, str]) -> tuple[str, str]:
    known = as_reached_from_here(parse_address(store, environ), environ)
    return known.endpoint, find_ca_file(known, environ)


def _of_server(endpoint: str, ca_file: str) -> float | None:
    place = urlsplit(endpoint)
    host = place.hostname or ""
    context = ssl.create_default_context(cafile=ca_file or None)
    with (
        socket.create_connection((host, place.port or 443), _ANSWER_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return _expiry(connection)


def _expiry(connection: socket.socket) -> float | None:
    """Expiry of the server's certificate, in Unix time."""
    assert isinstance(connection, ssl.SSLSocket)
    return _not_after(connection.getpeercert())


def _first_in(ca_file: str) -> float | None:
    """Earliest expiry of the certificates in a file of trusted ones, in Unix time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca_file)
    found = context.get_ca_certs()
    if len(found) > _MOST_AUTHORITIES:
        return None
    return min((at for one in found if (at := _not_after(one))), default=None)


def _not_after(certificate: Mapping[str, Any] | None) -> float | None:
    text = (certificate or {}).get("notAfter")
    return float(ssl.cert_time_to_seconds(text)) if isinstance(text, str) else None
