"""Where a folder is that `tunemq store serve` serves, and the token with which one is let in.

    http://host:7380/prefix        https://host/prefix?ca_file=/ca.pem

The token is never in an address: an address is written into journals, logs and messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from tunemq_shared.errors import ConfigError, StoreError
from tunemq_shared.manifest import is_safe_name

SCHEMES: Final = ("http://", "https://")
TOKEN_VARIABLE: Final = "TUNEMQ_STORE_TOKEN"  # noqa: S105  the name of one
TOKEN_FILE_VARIABLE: Final = "TUNEMQ_STORE_TOKEN_FILE"  # noqa: S105  likewise

_TOKEN: Final = re.compile(r"[!-~]{16,512}")


class HttpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of a served folder; ``endpoint`` is ``http[s]://host[:port]``.

    ``ca_file`` has the certificates to trust; empty for those that the machine trusts.
    """

    endpoint: str
    prefix: str
    ca_file: str = ""

    def __str__(self) -> str:
        """The address that means the same on every machine."""
        settings = f"?{urlencode({'ca_file': self.ca_file}, safe=':/')}" if self.ca_file else ""
        return f"{self.place}{settings}"

    @property
    def place(self) -> str:
        """Server and prefix, for messages."""
        return f"{self.endpoint}/{quote(self.prefix, safe='/ ')}".rstrip("/")


def parse_http_address(text: str) -> HttpAddress:
    """What the address means.

    Raises:
        ConfigError: it cannot be used; the message never quotes what might be a secret.
    """
    try:
        parts = urlsplit(text)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        raise ConfigError(
            f"the storage {_shown(text)!r} is no address; give http://host:port/prefix."
        ) from None
    endpoint = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    place = f"{endpoint}{parts.path}"
    if "@" in parts.netloc:
        raise ConfigError(
            f"the storage {place!r} has a user or token before its host; leave that out and set "
            f"{TOKEN_VARIABLE}, or {TOKEN_FILE_VARIABLE}, instead."
        )
    prefix = unquote(parts.path).strip("/")
    if not is_usable or parts.fragment or (prefix and not is_safe_name(prefix)):
        raise ConfigError(
            f"the storage {place!r} cannot be used; give http://host:port/prefix, whose prefix has "
            "visible names between single slashes, and no '.', '..' or '#'."
        )
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    ca_file = settings.pop("ca_file", "")
    if settings:
        raise ConfigError(
            f"the storage {place!r} has an unknown setting {min(settings)!r}; there is ca_file. A "
            f"token does not belong into an address: set {TOKEN_VARIABLE} instead."
        )
    return HttpAddress(endpoint=endpoint, prefix=prefix, ca_file=ca_file)


def find_token(place: str, environ: Mapping[str, str]) -> str:
    """The token in the environment, or in the file that it names.

    Raises:
        StoreError: there is none, or it cannot be one; says where to look.
    """
    token, file = environ.get(TOKEN_VARIABLE, ""), environ.get(TOKEN_FILE_VARIABLE, "")
    if token:
        return check_token(token, TOKEN_VARIABLE)
    if not file:
        raise StoreError(
            f"there is no token for the store at {place}: set {TOKEN_VARIABLE}, or "
            f"{TOKEN_FILE_VARIABLE} to a file with it, on each machine that uses the store; "
            "`tunemq store serve` said where it is."
        )
    return read_token(Path(file).expanduser(), TOKEN_FILE_VARIABLE)


def read_token(path: Path, setting: str) -> str:
    """The token in a file, without white space around it.

    Raises:
        StoreError: it cannot be read, or is none; names the setting that led there.
    """
    try:
        with path.open("rb") as file:
            text = file.read(4096).decode("ascii", errors="replace")
    except OSError as error:
        raise StoreError(
            f"the store's token cannot be read from {path}: {error.strerror}; correct {setting}."
        ) from None
    return check_token(text.strip(), f"{setting}, the file {path},")


def check_token(token: str, source: str) -> str:
    """The token, if it can be one.

    Raises:
        StoreError: it cannot; does not quote it.
    """
    if not _TOKEN.fullmatch(token):
        raise StoreError(
            f"{source} has no token in it: that has 16 to 512 letters, digits and signs of ASCII, "
            "and no spaces."
        )
    return token


def _shown(text: str) -> str:
    """An address that nobody can read, without what might be a secret."""
    scheme, mark, rest = text.partition("://")
    return f"{scheme}{mark}{rest.partition('?')[0].rpartition('@')[2]}"
