"""Which stores a farm's credentials may be sent to: the one place that decides.

Credentials belong to addresses: those of a farm to its own store, and to the stores that its
administrator allows by name. Variables of a search change neither addresses nor credentials.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from tunemq_shared.errors import ConfigError
from tunemq_shared.http_address import parse_http_address
from tunemq_shared.messages import BlobRef
from tunemq_shared.node_orders import HostStart
from tunemq_shared.s3_address import parse_address
from tunemq_shared.store_address import is_http, is_remote, without_settings

#: Beginnings and names of the variables that say where stores are and how one is let in.
_PREFIXES: Final = ("AWS_", "MINIO_", "TUNEMQ_S3_", "TUNEMQ_STORE_")
_NAMES: Final = frozenset({"HOME", "SSL_CERT_FILE"})


class StoreRules(msgspec.Struct, frozen=True):
    """What a process that runs a submitted search may do with the farm's credentials.

    Attributes:
        allowed: the canonical addresses of the farm's store and of others, with all below them.
        environ: the farm's variables that name stores and credentials, which hold whatever the
            search's variables say.
    """

    allowed: tuple[str, ...] = ()
    environ: dict[str, str] = {}

    def __repr__(self) -> str:
        """Without the credentials."""
        return f"StoreRules({self.allowed!r})"

    def check(self, address: str, field: str) -> None:
        """Return if the farm's credentials may be sent to this address.

        Args:
            field: where the address was given, for the error.

        Raises:
            ConfigError: they may not.
        """
        if any(_is_below(address, one, self.environ) for one in self.allowed):
            return
        known = ", ".join(map(without_settings, self.allowed)) or "none"
        raise ConfigError(
            f"{field} names the store {without_settings(address)!r}"
            f"{_endpoint(address, self.environ)}, to which this farm's credentials may not be sent;"
            f" allowed: {known}. Leave it out, so that the farm's store is used, or have the farm's"
            f' administrator allow it: stores = ["{without_settings(address)}?..."] in the file of'
            " tunemq scheduler --settings."
        )

    def check_order(self, order: HostStart) -> None:
        """Return if a node may go to all stores that this order names.

        Raises:
            ConfigError: it may not.
        """
        for field, address in _addresses(order):
            if is_remote(address):
                self.check(address, field)


def store_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that name stores and credentials."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def _addresses(order: HostStart) -> Iterator[tuple[str, str]]:
    yield "RunConfig(storage_path)", order.store
    refs: tuple[BlobRef | None, ...] = (order.code, order.bundle, *order.blobs)
    for ref in refs:
        if ref is not None:
            yield "the code of the search", ref.store


def _is_below(address: str, allowed: str, environ: Mapping[str, str]) -> bool:
    one, other = _place(address, environ), _place(allowed, environ)
    place, prefix = one[:-1], one[-1]
    return place == other[:-1] and (
        not other[-1] or prefix == other[-1] or prefix.startswith(f"{other[-1]}/")
    )


def _place(address: str, environ: Mapping[str, str]) -> tuple[Any, ...]:
    """All that says to whom a request goes, and the prefix last."""
    if is_http(address):
        served = parse_http_address(address)
        return served.endpoint.lower(), served.ca_file, served.prefix
    known = parse_address(address, environ)
    return known.endpoint.lower(), known.path_style, known.ca_file, known.bucket, known.prefix


def _endpoint(address: str, environ: Mapping[str, str]) -> str:
    return "" if is_http(address) else f" at {parse_address(address, environ).endpoint}"
