"""`HttpObjects`: objects below a prefix of a folder that `tunemq store serve` serves."""

from __future__ import annotations

from collections.abc import Mapping

from tunemq_shared.http_address import HttpAddress, find_token
from tunemq_shared.http_client import HttpClient
from tunemq_shared.remote_objects import CONNECTIONS, RemoteObjects


class HttpObjects(RemoteObjects):
    """See `ObjectStore`; the token is looked for when it is made.

    Args:
        environ: Where the token is; see `tunemq_shared.http_address`.

    Raises:
        StoreError: there is no token.
        ConfigError: there is no such certificate.
    """

    def __init__(self, address: HttpAddress, environ: Mapping[str, str]) -> None:
        token = find_token(address.place, environ)

        def connect(connect_s: float, read_s: float) -> HttpClient:
            return HttpClient(
                address, token, connect_s=connect_s, read_s=read_s, at_once=CONNECTIONS
            )

        super().__init__(address.place, address.prefix, connect)
