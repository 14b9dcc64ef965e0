"""Finds the store that an address means."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from tunemq_shared.errors import ConfigError
from tunemq_shared.local_store import LocalStore
from tunemq_shared.store import Store


def open_store(address: str) -> Store:
    """The store at a local path or ``file://`` address.

    Raises:
        ConfigError: the address has another scheme.
    """
    if "://" not in address:
        return LocalStore(address)
    parts = urlsplit(address)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"the storage {address!r} cannot be used; give a local path or file:///path."
        )
    return LocalStore(unquote(parts.path))
