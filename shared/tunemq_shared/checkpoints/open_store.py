"""Open the store of an address: a folder, or ``s3://``.

Importing this module makes the client of a service importable. So trial processes, forkservers and
nodes do not import it: `tunemq_shared.objects.store_address` has what they need of an address.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.objects.allowed_stores import StorePermissions
from tunemq_shared.objects.object_store import ObjectStore
from tunemq_shared.objects.s3_address import as_reached_from_here, parse_address
from tunemq_shared.objects.store_address import canonical_address, is_remote, join

__all__ = [
    "canonical_address",
    "check_allowed",
    "import_client",
    "is_remote",
    "join",
    "open_objects",
    "open_store",
    "use_only",
]

#: The permissions of a process that runs a submitted search; None in a person's own command.
_rules: StorePermissions | None = None


def use_only(rules: StorePermissions) -> None:
    """Restrict this process to these stores and credentials from now on."""
    global _rules
    _rules = rules


def check_allowed(address: str, field: str) -> None:
    """Check that this process may use the store at this address (`use_only`).

    Args:
        address: Of the store.
        field: Where a person gave it, for the error.

    Raises:
        ConfigError: The process may not use it.
    """
    if _rules is not None and is_remote(address):
        _rules.check(address, field)


def open_store(address: str) -> CheckpointStore:
    """Open the checkpoint store at a local path, ``file://`` or ``s3://`` address.

    Raises:
        ConfigError: The address has another scheme, or is invalid.
        StoreError: There are no credentials for it. Nothing is sent to the store yet.
    """
    if not is_remote(address):
        return LocalCheckpointStore(canonical_address(address))
    from tunemq_shared.checkpoints.remote_store import RemoteCheckpointStore

    return RemoteCheckpointStore(open_objects(address))


def open_objects(
    address: str, reading: Callable[[], AbstractContextManager[None]] = nullcontext
) -> ObjectStore:
    """Open the objects below an ``s3://`` address.

    Args:
        address: Of the store.
        reading: A context in which key files are read, now and after each rejection, in any thread.

    Raises:
        ConfigError: The address is invalid, or `use_only` forbids it.
        StoreError: There are no credentials for it. Nothing is sent to the store yet.
    """
    environ = os.environ if _rules is None else _rules.environ
    check_allowed(address, "this search")
    if not is_remote(address):
        raise ConfigError(f"{address!r} is no address of an object store; give s3://bucket/prefix.")
    from tunemq_shared.objects.s3_objects import S3Objects

    known = parse_address(address, environ)
    return S3Objects(as_reached_from_here(known, environ), environ, reading)


def import_client(address: str) -> None:
    """Import what `open_objects` needs for an address, so that forked processes share it."""
    if is_remote(address):
        importlib.import_module("tunemq_shared.objects.s3_objects")
