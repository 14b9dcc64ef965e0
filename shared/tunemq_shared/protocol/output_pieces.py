"""What trials print, piece by piece, from their nodes to the scheduler while they run.

Pieces are of low priority: they travel in a stream of their own, which is short, and where they
would hold up anything they are left out. The whole is in the trial's files, which come to the store
when its host has ended.
"""

from __future__ import annotations

import msgspec

from tunemq_shared.base import message_encoding


class OutputChunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a trial's output; ``name`` is ``stdout`` or ``stderr``, ``folder`` the trial's name.

    They stand at ``offset`` in the file of this ``attempt`` on its node; what is missing before
    that was left out. ``round`` grows each time that the file was shortened there, and begins anew.
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
