"""Uploads with forged signatures, which `tunemq_scheduler.security.store_probes` sends to a store.

Each names a real access key, which is not secret, and has an invalid signature. A server must
reject all.
"""

from __future__ import annotations

import base64
import io
import tarfile
import time
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import urlencode

#: Marks content that is sent in chunks with a trailing checksum, without a signature.
UNSIGNED: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_NO_SIGNATURE: Final = "0" * 64
_CONTENT: Final = b"probe"


class ForgedRequest(NamedTuple):
    """A request; ``weakness`` is the CVE of a server that accepts it."""

    weakness: str
    query: str
    headers: dict[str, str]
    body: bytes


def forgeries(folder: str, name: str, access_key: str, region: str) -> Iterator[ForgedRequest]:
    """Iterate over forged PUT requests that would write the object ``folder/name``.

    Args:
        folder: The object's key up to the last slash; empty for none.
        name: The rest of the key.
        access_key: Of a user with the right to write there.
        region: The server's.
    """
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    credential = f"{access_key}/{now[:8]}/{region}/s3/aws4_request"
    named = {
        "Authorization": f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders="
        f"host;x-amz-content-sha256;x-amz-date, Signature={_NO_SIGNATURE}"
    }
    of_all = {"x-amz-content-sha256": UNSIGNED, "x-amz-date": now}
    chunked = of_all | {
        "Content-Encoding": "aws-chunked",
        "x-amz-decoded-content-length": str(len(_CONTENT)),
        "x-amz-trailer": "x-amz-checksum-crc32",
    }
    yield ForgedRequest("CVE-2025-31489", "", chunked | named, _chunks())
    in_query = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": credential,
        "X-Amz-Date": now,
        "X-Amz-Expires": "60",
        "X-Amz-SignedHeaders": "host",
        "X-Amz-Signature": _NO_SIGNATURE,
    }
    yield ForgedRequest("CVE-2026-41145", urlencode(in_query), chunked, _chunks())
    unpacked = {
        "X-Amz-Meta-Snowball-Auto-Extract": "true",
        "X-Amz-Meta-Minio-Snowball-Prefix": folder,
    }
    yield ForgedRequest("CVE-2026-40344", "", of_all | named | unpacked, _archive(name))


def _chunks() -> bytes:
    checksum = base64.b64encode(zlib.crc32(_CONTENT).to_bytes(4, "big")).decode()
    return b"%x\r\n%s\r\n0\r\nx-amz-checksum-crc32:%s\r\n\r\n" % (
        len(_CONTENT),
        _CONTENT,
        checksum.encode(),
    )


def _archive(name: str) -> bytes:
    packed, entry = io.BytesIO(), tarfile.TarInfo(name)
    entry.size = len(_CONTENT)
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(entry, io.BytesIO(_CONTENT))
    return packed.getvalue()
