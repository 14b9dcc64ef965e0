"""`StorePermissions`: which stores a submitted search may use, decided in this one place.

Credentials belong to addresses: a farm's to its store's server, a profile's to the addresses that
name it. A search may use the farm's store, and those that the administrator allows
its owner. A search's environment variables change neither addresses nor credentials.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from tunemq_shared.base.errors import StoreNotAllowed
from tunemq_shared.objects.s3_address import own_profiles, parse_address
from tunemq_shared.objects.store_address import is_remote, without_settings
from tunemq_shared.protocol.messages import BlobRef
from tunemq_shared.protocol.node_orders import TrialSpec

#: Prefixes and names of the variables for stores' addresses and credentials.
_PREFIXES: Final = ("AWS_", "MINIO_", "TUNEMQ_S3_")
_NAMES: Final = frozenset({"HOME", "SSL_CERT_FILE"})


class StorePermissions(msgspec.Struct, frozen=True):
    """The stores and credentials that a process of a submitted search may use.

    Attributes:
        allowed: The canonical addresses of the farm's store and of others, each with all below it.
            One without a profile is on the server of the farm's store; see `why_not_allowed`.
        environ: The farm's variables for stores and credentials, which override the search's.
    """

    allowed: tuple[str, ...] = ()
    environ: dict[str, str] = {}

    def __repr__(self) -> str:
        """The addresses without the credentials."""
        return f"StorePermissions({self.allowed!r})"

    def check(self, address: str, field: str) -> None:
        """Check that the search may use this address, with the credentials that belong to it.

        Args:
            address: Of a remote store.
            field: Where the address was given, for the error.

        Raises:
            StoreNotAllowed: It may not.
        """
        if any(_is_below(address, one, self.environ) for one in self.allowed):
            return
        known = ", ".join(_shown(one, self.environ) for one in self.allowed) or "none"
        raise StoreNotAllowed(
            f"{field} names the store {_shown(address, self.environ)}, which this search may not"
            f" use, for credentials belong to addresses; its owner may use: {known}. Leave it out,"
            " so that the farm's store is used; if the search began with it, start the scheduler"
            " with that --store again (and with TUNEMQ_S3_REACHED_AT, if its server moved); or have"
            " the farm's administrator allow it:"
            f' stores = ["{without_settings(address)}?endpoint=...&profile=NAME"] in the file of'
            " tunemq scheduler --settings."
        )

    def check_order(self, order: TrialSpec) -> None:
        """Check that a node may use all stores that this order names.

        Raises:
            StoreNotAllowed: It may not.
        """
        for field, address in _addresses(order):
            if is_remote(address):
                self.check(address, field)


def why_not_allowed(address: str, own: str, environ: Mapping[str, str]) -> str:
    """Say why an administrator cannot allow this address, and what to do; empty if possible.

    Args:
        address: Canonical, of a remote store.
        own: The farm's store.
        environ: The scheduler's environment.
    """
    is_near = is_remote(own) and _server(address, environ) == _server(own, environ)
    known = parse_address(address, environ)
    farms = parse_address(own, environ).profile if is_remote(own) else ""
    if not known.profile and (farms or not is_near):
        return (
            "has no profile, and the keys without one are sent to the server of the farm's store"
            " alone; add profile=NAME, and write the keys for it as [NAME] into the credentials"
            " file of this machine and of each worker"
        )
    if known.profile in {farms, *own_profiles(environ)} and not is_near:
        return (
            f"is at {known.endpoint} and has profile={known.profile}, which holds the farm's own"
            " keys, and these are sent to no other server; name another profile"
        )
    return ""


def store_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the variables for stores' addresses and credentials."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def _addresses(order: TrialSpec) -> Iterator[tuple[str, str]]:
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
    """Everything that determines a request's target and credentials; the prefix comes last."""
    known = parse_address(address, environ)
    return *_server(address, environ), known.profile, known.bucket, known.prefix


def _server(address: str, environ: Mapping[str, str]) -> tuple[Any, ...]:
    """Everything that determines the server of a request."""
    known = parse_address(address, environ)
    return known.endpoint.lower(), known.path_style, known.ca_file


def _shown(address: str, environ: Mapping[str, str]) -> str:
    place = repr(without_settings(address))
    known = parse_address(address, environ)
    profile = f" with profile={known.profile}" if known.profile else ""
    return f"{place} at {known.endpoint}{profile}"
