"""`OutputChunk`: output of running trials, on the way from their nodes to the scheduler.

Chunks have low priority: they use a short stream of their own, and a node drops them rather than
delay anything else. The trial's files hold the whole output, and reach the store after its process
ends.
"""

from __future__ import annotations

import msgspec

from tunemq_shared.base import message_encoding


class OutputChunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a trial's output; ``name`` is ``stdout`` or ``stderr``, ``folder`` the trial's name.

    They start at byte ``offset`` in the file of this ``attempt`` on its node; a gap before that was
    dropped. ``round`` increases each time the file is truncated and starts again.
    """

    trial: str
    attempt: int
    folder: str
    name: str
    offset: int
    data: bytes
    round: int = 0


encode = message_encoding.encode
decode = msgspec.msgpack.Decoder(OutputChunk).decode
