"""What the client and the server of a served folder say to each other.

    PUT    /<key>                             write an object; `HASH_HEADER` has its SHA-256
    GET    /<key>                             read it, or with ``Range`` a part of it
    HEAD   /<key>                             its size
    DELETE /<key>                             remove it
    GET    /?list=<prefix>&after=<key>        a `Page` of objects, behind that key
    POST   /<key>?upload                      begin an upload in parts: `Begun`
    PUT    /<key>?upload=<id>&start=<byte>    send a part
    POST   /<key>?upload=<id>                 make the object of its parts: `Parts`
    DELETE /<key>?upload=<id>                 throw the parts away
    GET    /?uploads                          the uploads under way: `Uploads`

Each request has ``Authorization: Bearer <token>``; each answer has `SERVER_HEADER`. An answer above
399 is a `Problem`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

#: In each answer: the version of all this.
SERVER_HEADER: Final = "X-TuneMQ-Store"
VERSION: Final = "1"
#: The SHA-256 of what is sent, in hexadecimal.
HASH_HEADER: Final = "X-TuneMQ-SHA256"
#: More is never in an answer that is JSON, in bytes.
MAX_ANSWER: Final = 16 * 2**20


class Code(StrEnum):
    """Why a request was refused."""

    NO_SUCH_OBJECT = "NoSuchObject"
    NO_SUCH_UPLOAD = "NoSuchUpload"
    CUT_SHORT = "CutShort"
    DAMAGED = "Damaged"
    FULL = "Full"
    BUSY = "Busy"
    WRONG_TOKEN = "WrongToken"  # noqa: S105  not one
    TAKEN = "Taken"
    BAD_REQUEST = "BadRequest"
    WRONG_HOST = "WrongHost"
    FROM_PAGE = "FromPage"
    FAILED = "Failed"


class Problem(msgspec.Struct, frozen=True):
    """Why a request was refused; the message is for people."""

    code: str
    message: str


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """An object: its key, its bytes, when it was written (Unix time)."""

    key: str
    size: int
    modified: float


class Page(msgspec.Struct, frozen=True):
    """Objects in the order of their keys; whether there are none behind these."""

    objects: tuple[Listed, ...]
    is_last: bool


class Begun(msgspec.Struct, frozen=True):
    """An upload that was begun."""

    upload: str


class Parts(msgspec.Struct, frozen=True):
    """The hashes of all parts of a file, in order."""

    hashes: tuple[str, ...]


class UnderWay(msgspec.Struct, frozen=True, array_like=True):
    """An upload: the key of its object, its id."""

    key: str
    upload: str


class Uploads(msgspec.Struct, frozen=True):
    """All uploads under way."""

    uploads: tuple[UnderWay, ...]
