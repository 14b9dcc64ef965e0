"""Requests of trial processes about checkpoints, and the node's answers; payloads of frames."""

from __future__ import annotations

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.protocol.messages import CheckpointRef


class SaveAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer: write the checkpoint into the folder ``cache``, or ``error`` says why not."""

    cache: str
    error: str = ""


class FetchCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """Request: get a checkpoint onto the node's disk; ``again``: the copy there is damaged."""

    ref: CheckpointRef
    again: bool = False


class FetchAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer: the checkpoint is in the folder ``cache`` under its key, or ``error`` says why not.

    ``is_corrupt``: it is damaged or missing in the store, so a retry cannot succeed. ``sha256`` is
    the hash of its manifest in the store if the request did not contain it, because the checkpoint
    was committed after the order was written.
    """

    cache: str
    error: str = ""
    is_corrupt: bool = False
    sha256: str = ""


encode = message_encoding.encode
decode_save_answer = msgspec.msgpack.Decoder(SaveAnswer).decode
decode_fetch = msgspec.msgpack.Decoder(FetchCheckpoint).decode
decode_fetched = msgspec.msgpack.Decoder(FetchAnswer).decode
