"""TLS for a server without it; a program that runs on any machine of `network_namespaces`.

    python tls_proxy.py SOCKET ADDRESS PORT CERTIFICATES [strict]

It passes the decrypted data to a unix socket. A client's certificate must be signed by ca.crt in
the folder CERTIFICATES; with ``strict`` every client must show one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from functools import partial
from pathlib import Path


def proxy_command(
    target: Path, address: str, port: int, certificates: Path, *, is_strict: bool = False
) -> list[str]:
    """The command line that starts a proxy."""
    strict = ["strict"] * is_strict
    return [sys.executable, __file__, str(target), address, str(port), str(certificates), *strict]


async def _serve(target: str, address: str, port: str, certificates: str, strict: str = "") -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{certificates}/redis.crt", f"{certificates}/redis.key")
    context.load_verify_locations(f"{certificates}/ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED if strict else ssl.CERT_OPTIONAL
    pass_on = partial(_pass_on, target)
    server = await asyncio.start_server(pass_on, address, int(port), ssl=context, backlog=256)
    await server.serve_forever()


async def _pass_on(
    target: str, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
) -> None:
    try:
        reader, writer = await asyncio.open_unix_connection(target)
    except OSError:
        client_writer.close()
        return
    await asyncio.gather(_copy(client_reader, writer), _copy(reader, client_writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
