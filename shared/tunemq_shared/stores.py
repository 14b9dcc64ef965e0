"""Finds the store that an address means: a folder, ``s3://``, or ``http://``.

Whoever imports this can reach the client of a service. So a trial's own process, what forks it, and
the node do not: what they need of an address is in `tunemq_shared.store_address`.
"""

from __future__ import annotations

import importlib
import os

from tunemq_shared.errors import ConfigError
from tunemq_shared.http_address import parse_http_address
from tunemq_shared.local_store import LocalStore
from tunemq_shared.object_store import ObjectStore
from tunemq_shared.s3_address import as_reached_from_here, parse_address
from tunemq_shared.store import Store
from tunemq_shared.store_address import canonical_address, is_http, is_remote, join

__all__ = [
    "canonical_address",
    "import_client",
    "is_remote",
    "join",
    "open_objects",
    "open_store",
]


def open_store(address: str) -> Store:
    """The store of checkpoints at a local path, ``file://``, ``s3://`` or ``http://`` address.

    Raises:
        ConfigError: the address has another scheme, or cannot be used.
        StoreError: there are no keys for it. Whether it answers is not tried.
    """
    if not is_remote(address):
        return LocalStore(canonical_address(address))
    from tunemq_shared.remote_store import RemoteStore

    return RemoteStore(open_objects(address))


def open_objects(address: str) -> ObjectStore:
    """The objects below an ``s3://`` or ``http://`` address.

    Raises:
        ConfigError: it is no such address, or cannot be used.
        StoreError: there are no keys for it. Whether it answers is not tried.
    """
    if is_http(address):
        from tunemq_shared.http_objects import HttpObjects

        return HttpObjects(parse_http_address(address), os.environ)
    if not is_remote(address):
        raise ConfigError(
            f"{address!r} is no address of an object store; give s3://bucket/prefix or "
            "http://host:port/prefix."
        )
    from tunemq_shared.s3_objects import S3Objects

    known = parse_address(address, os.environ)
    return S3Objects(as_reached_from_here(known, os.environ), os.environ)


def import_client(address: str) -> None:
    """Import what `open_objects` needs for an address: processes that are forked then have it."""
    if is_http(address):
        importlib.import_module("tunemq_shared.http_objects")
    elif is_remote(address):
        importlib.import_module("tunemq_shared.s3_objects")
