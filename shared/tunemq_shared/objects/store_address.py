"""Addresses of stores: a path, or ``s3://bucket/prefix?settings``.

This module opens no store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.objects.s3_address import SCHEME, parse_address

#: Probably a mistyped address: folders hardly ever have such names.
_CUT_SHORT: Final = re.compile(r"(s3|https?|file):", re.IGNORECASE)


def is_remote(address: str) -> bool:
    """Whether this is the address of an object store."""
    return address.startswith(SCHEME)


def canonical_address(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Normalise an address so that it means the same on every machine; contains no credentials.

    Args:
        text: A path, a ``file://`` or ``s3://`` address.
        environ: Source of settings that the address lacks; by default this process's environment.

    Raises:
        ConfigError: It is invalid; says which part and why.
    """
    if is_remote(text):
        return str(parse_address(text, os.environ if environ is None else environ))
    if "://" not in text:
        if _CUT_SHORT.match(text):
            raise ConfigError(
                f"the storage {text!r} lacks a slash behind its colon; give s3://bucket/prefix,"
                " or ./ before a folder of that name."
            )
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"the storage {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path} cannot be "
            "used; give a local path, file:///path or s3://bucket/prefix?endpoint=http://host:port."
        )
    return os.path.abspath(unquote(parts.path))


def without_settings(address: str) -> str:
    """A store's address without settings, for messages."""
    return address.partition("?")[0] if is_remote(address) else address


def name_in(address: str) -> str:
    """The name of the search at this address in a store: its last part."""
    return unquote(without_settings(address)).rstrip("/").rpartition("/")[2]


def join(address: str, name: str) -> str:
    """The address of ``name`` (a relative path with ``/``) below another address."""
    if not is_remote(address):
        return os.path.join(address, name)
    place, mark, settings = address.partition("?")
    return f"{place.rstrip('/')}/{quote(name, safe='/ ')}{mark}{settings}"
