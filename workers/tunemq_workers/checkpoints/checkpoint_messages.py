"""What a host asks its node about checkpoints, and what the node answers; payloads of frames."""

from __future__ import annotations

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.protocol.messages import CheckpointRef


class SaveAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint may be written into the folder ``cache``, or ``error`` says why not."""

    cache: str
    error: str = ""


class FetchCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """Have a checkpoint on this node's disk; ``again``: the copy that is there is damaged."""

    ref: CheckpointRef
    again: bool = False


class FetchAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoint is in the folder ``cache`` under its key, or ``error`` says why not.

    ``is_corrupt``: it is damaged or missing in the store, so that asking again is of no use.
    ``sha256`` is the hash of its manifest in the store where the question did not know that: it was
    committed since the host was ordered.
    """

    cache: str
    error: str = ""
    is_corrupt: bool = False
    sha256: str = ""


encode = message_encoding.encode
decode_save_answer = msgspec.msgpack.Decoder(SaveAnswer).decode
decode_fetch = msgspec.msgpack.Decoder(FetchCheckpoint).decode
decode_fetched = msgspec.msgpack.Decoder(FetchAnswer).decode
