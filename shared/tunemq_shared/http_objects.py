"""`HttpObjects`: objects below a prefix of a folder that `tunemq store serve` serves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from tunemq_shared.http_address import HttpAddress, find_token
from tunemq_shared.http_client import HttpClient
from tunemq_shared.remote_objects import CONNECTIONS, Reading, RemoteObjects


class HttpObjects(RemoteObjects):
    """See `ObjectStore`; the token is looked for when it is made, and when it is refused.

    Args:
        environ: Where the token is; see `tunemq_shared.http_address`.
        reading: A file with the token is read within it.

    Raises:
        StoreError: there is no token.
        ConfigError: there is no such certificate.
    """

    def __init__(
        self, address: HttpAddress, environ: Mapping[str, str], reading: Reading = nullcontext
    ) -> None:
        def connect(connect_s: float, read_s: float) -> HttpClient:
            with reading():
                token = find_token(address.place, environ)
            return HttpClient(
                address, token, connect_s=connect_s, read_s=read_s, at_once=CONNECTIONS
            )

        super().__init__(address.place, address.prefix, connect)
