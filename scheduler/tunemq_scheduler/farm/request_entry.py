"""What an entry of the stream of requests says, checked: anybody with the password can append."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, get_args

import msgspec

from tunemq_shared import requests as r

_ID: Final = re.compile(rb"[0-9a-f]{32}")
_OWNER: Final = re.compile(r"[\w.@+=-][\w .@+=-]{0,63}")

#: Each kind of request by its name on the wire.
KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(r.AnyRequest)}


class Asked(NamedTuple):
    """A request, by whom, and its id."""

    id: str
    owner: str
    request: r.AnyRequest


class Unanswerable(Exception):
    """An entry that is no request of a kind that is known here.

    Attributes:
        request: its id; empty where it has none, so that nobody can be told.
    """

    def __init__(self, text: str, request: str = "") -> None:
        super().__init__(text)
        self.request = request


def decode_entry(fields: dict[bytes, bytes], tunemq: str) -> Asked:
    """The request in an entry.

    Args:
        tunemq: the version of this TuneMQ.

    Raises:
        Unanswerable: it cannot be read; says why.
    """
    raw_id = fields.get(b"id", b"")
    if not _ID.fullmatch(raw_id):
        raise Unanswerable("it has no id")
    request = raw_id.decode()
    version, kind = _text(fields, b"v"), _text(fields, b"kind")
    if version != str(r.REQUESTS_VERSION):
        raise Unanswerable(
            f"this farm's scheduler (TuneMQ {tunemq}) reads requests of version"
            f" {r.REQUESTS_VERSION}, and this is one of version {version or 'none'} (TuneMQ"
            f" {_text(fields, b'tunemq') or 'unknown'}); use the same TuneMQ on both sides.",
            request,
        )
    wanted = KINDS.get(kind)
    if wanted is None:
        raise Unanswerable(
            f"this farm's scheduler (TuneMQ {tunemq}) does not know the request {kind!r}; it may be"
            f" older than the TuneMQ that sent it ({_text(fields, b'tunemq') or 'unknown'}).",
            request,
        )
    owner, body = _text(fields, b"owner"), fields.get(b"body", b"")
    if not _OWNER.fullmatch(owner):
        raise Unanswerable(
            f"the owner {owner!r} cannot be used: give letters, digits and .@+=-, 64 at most.",
            request,
        )
    if len(body) > r.MAX_REQUEST_BYTES:
        raise Unanswerable(
            f"the request has {len(body)} bytes; {r.MAX_REQUEST_BYTES} are the most.", request
        )
    try:
        return Asked(request, owner, msgspec.msgpack.decode(body, type=wanted))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unanswerable(f"the request {kind!r} cannot be read: {error}.", request) from error


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"")[:200].decode(errors="replace")
