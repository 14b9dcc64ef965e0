"""Frames on the stream socket between a trial host and its node.

A frame is a 4-byte big-endian length of what follows, one byte that says what it is, and a payload:

    host -> node   E  a NodeEvent (msgpack), which the node checks and hands on as it is
                   F  the last event of a trial: TrialFinished, TrialFailed or TrialPaused
                   I  no payload: the trial is over and the host waits to be reused
                   W  a CheckpointWritten (msgpack), to be handed on and uploaded
                   R  no payload: may a checkpoint be written? the host waits for the answer
                   H  how many orders it has had (4 bytes): it waits for another; said only by one
                      whose time is limited
                   G  a FetchCheckpoint (msgpack): where is it? the host waits for the answer
    node -> host   r  a RoomAnswer (msgpack)
                   g  a FetchAnswer (msgpack)
                   O  a HostOrder (msgpack); the newest counts
                   N  a HostOrder with its ``start``: the next trial of a host that waits
                   L  no payload: no next trial comes, a host that waits leaves
"""

from __future__ import annotations

import struct
from typing import Final

from tunemq_shared.base.errors import TransportError

#: No frame, but what the node's end of the socket passes on where it read none: the payload says
#: what is wrong.
UNREADABLE: Final = 0
#: Likewise: the other end does not read what is sent.
UNREAD: Final = -1
EVENT: Final = ord("E")
ENDING: Final = ord("F")
IDLE: Final = ord("I")
ORDER: Final = ord("O")
NEXT: Final = ord("N")
LEAVE: Final = ord("L")
WRITTEN: Final = ord("W")
ASK_SAVE: Final = ord("R")
AWAIT_ORDER: Final = ord("H")
SAVE_ANSWER: Final = ord("r")
FETCH: Final = ord("G")
FETCHED: Final = ord("g")

#: Longer frames are refused by both ends: a host whose code writes to a stray descriptor must not
#: make its node wait for gigabytes that never come.
MAX_FRAME_BYTES: Final = 32 * 2**20
#: The longest event of a trial's process. Its node makes objects of all that it holds, in the loop
#: that serves all trials: some 60 bytes and 2 µs for each byte of the worst.
MAX_EVENT_BYTES: Final = 4 * 2**20

_HEADER: Final = struct.Struct(">IB")
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from


def frame(kind: int, payload: bytes = b"") -> bytes:
    """One frame, ready to be sent."""
    return _pack_header(len(payload) + 1, kind) + payload


class FrameDecoder:
    """Cuts a stream of bytes, in whatever pieces it arrives, into frames."""

    def __init__(self) -> None:
        #: The frames that came just before a length that no frame has.
        self.whole: list[tuple[int, bytes]] = []
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The (kind, payload) of every frame that ``data`` completes, in order.

        Raises:
            WireError: a length that no frame has; the stream cannot be read any further. What it
                completed before is in `whole`.
        """
        if self._rest:
            data = self._rest + data
        frames: list[tuple[int, bytes]] = []
        offset, end = 0, len(data)
        while end - offset >= _HEADER.size:
            length, kind = _unpack_header(data, offset)
            if not 0 < length <= MAX_FRAME_BYTES:
                self.whole = frames
                raise TransportError(
                    f"a frame says that it has {length} bytes; 1 to {MAX_FRAME_BYTES} are possible."
                )
            after = offset + 4 + length
            if after > end:
                break
            frames.append((kind, data[offset + _HEADER.size : after]))
            offset = after
        self._rest = data[offset:] if offset else data
        return frames
