"""Finds the store that an address means: a folder, or ``s3://``.

Whoever imports this can reach the client of a service. So a trial's own process, what forks it, and
the node do not: what they need of an address is in `tunemq_shared.store_address`.
"""

from __future__ import annotations

import os

from tunemq_shared.errors import ConfigError
from tunemq_shared.local_store import LocalStore
from tunemq_shared.object_store import ObjectStore
from tunemq_shared.s3_address import parse_address
from tunemq_shared.store import Store
from tunemq_shared.store_address import canonical_address, is_remote, join

__all__ = ["canonical_address", "is_remote", "join", "open_objects", "open_store"]


def open_store(address: str) -> Store:
    """The store of checkpoints at a local path, ``file://`` or ``s3://`` address.

    Raises:
        ConfigError: the address has another scheme, or cannot be used.
        StoreError: there are no keys for it. Whether it answers is not tried.
    """
    if not is_remote(address):
        return LocalStore(canonical_address(address))
    from tunemq_shared.s3_store import S3Store

    return S3Store(open_objects(address))


def open_objects(address: str) -> ObjectStore:
    """The objects below an ``s3://`` address.

    Raises:
        ConfigError: it is no such address, or cannot be used.
        StoreError: there are no keys for it. Whether it answers is not tried.
    """
    if not is_remote(address):
        raise ConfigError(f"{address!r} is no address of an object store; give s3://bucket/prefix.")
    from tunemq_shared.s3_objects import S3Objects

    return S3Objects(parse_address(address, os.environ), os.environ)
