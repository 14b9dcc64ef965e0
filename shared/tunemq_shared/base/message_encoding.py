"""Encode messages as msgpack, even if their text is not valid Unicode."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tunemq_shared.base.safe_text import encodable

_encode: Final = msgspec.msgpack.Encoder().encode
_AS_THEY_ARE: Final = (bytes, bytearray, memoryview)


def encode(message: Any) -> bytes:
    r"""Encode a message as msgpack.

    File names and error messages may hold bytes that are not UTF-8, and users choose them. Such a
    byte is sent as an escape, so that no file name can crash the process that mentions it.

    >>> msgspec.msgpack.decode(encode(["no room in \udcff"]))
    ['no room in \\udcff']
    """
    try:
        return _encode(message)
    except UnicodeEncodeError:
        return _encode(_escaped(msgspec.to_builtins(message, builtin_types=_AS_THEY_ARE)))


def _escaped(part: Any) -> Any:
    if isinstance(part, str):
        return encodable(part)
    if isinstance(part, dict):
        return {_escaped(key): _escaped(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_escaped(one) for one in part]
    return part
