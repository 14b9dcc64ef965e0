"""Finds the store that an address means: a folder, or ``s3://``.

Whoever imports this can reach the client of a service. So a trial's own process, what forks it, and
the node do not: what they need of an address is in `tunemq_shared.objects.store_address`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.objects.object_store import ObjectStore
from tunemq_shared.objects.s3_address import as_reached_from_here, parse_address
from tunemq_shared.objects.store_address import canonical_address, is_remote, join
from tunemq_shared.objects.store_permissions import StorePermissions

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

#: Of a process that runs a submitted search; None where a person's own command runs.
_rules: StorePermissions | None = None


def use_only(rules: StorePermissions) -> None:
    """From now on this process opens no other stores, and with these credentials alone."""
    global _rules
    _rules = rules


def check_allowed(address: str, field: str) -> None:
    """Return if this process may use what is at this address (`use_only`).

    Args:
        field: where a person gave it, for the error.

    Raises:
        ConfigError: it may not.
    """
    if _rules is not None and is_remote(address):
        _rules.check(address, field)


def open_store(address: str) -> CheckpointStore:
    """The store of checkpoints at a local path, ``file://`` or ``s3://`` address.

    Raises:
        ConfigError: the address has another scheme, or cannot be used.
        StoreError: there are no keys for it. Whether it answers is not tried.
    """
    if not is_remote(address):
        return LocalCheckpointStore(canonical_address(address))
    from tunemq_shared.checkpoints.remote_store import RemoteCheckpointStore

    return RemoteCheckpointStore(open_objects(address))


def open_objects(
    address: str, reading: Callable[[], AbstractContextManager[None]] = nullcontext
) -> ObjectStore:
    """The objects below an ``s3://`` address.

    Args:
        reading: files with keys are read within it, now and after each refusal, in any thread.

    Raises:
        ConfigError: it is no such address, cannot be used, or may not be (`use_only`).
        StoreError: there are no keys for it. Whether it answers is not tried.
    """
    environ = os.environ if _rules is None else _rules.environ
    check_allowed(address, "this search")
    if not is_remote(address):
        raise ConfigError(f"{address!r} is no address of an object store; give s3://bucket/prefix.")
    from tunemq_shared.objects.s3_objects import S3Objects

    known = parse_address(address, environ)
    return S3Objects(as_reached_from_here(known, environ), environ, reading)


def import_client(address: str) -> None:
    """Import what `open_objects` needs for an address: processes that are forked then have it."""
    if is_remote(address):
        importlib.import_module("tunemq_shared.objects.s3_objects")
