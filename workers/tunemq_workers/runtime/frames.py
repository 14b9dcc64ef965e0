"""Frames on the stream socket between a trial process and its node.

A frame is a 4-byte big-endian length of the rest, one byte for its kind, and a payload:

    process -> node   E  a NodeEvent (msgpack), which the node checks and passes on unchanged
                      F  the last event of an attempt: TrialFinished, TrialFailed or TrialPaused
                      I  no payload: the attempt has ended and the process waits for another trial
                      W  a CheckpointWritten (msgpack), which the node passes on; it then uploads
                         the checkpoint
                      R  no payload: request to write a checkpoint; the process waits for `r`
                      H  number of received orders (4 bytes): the process waits for another order;
                         sent only if its time is limited
                      G  a FetchCheckpoint (msgpack); the process waits for `g`
                      S  one byte: 1, the process begins to save a checkpoint; 0, it has ended that
                      A  an answer of a helper process
    node -> process   r  a SaveAnswer (msgpack)
                      g  a FetchAnswer (msgpack)
                      O  a TrialOrder (msgpack); the newest counts
                      N  a TrialOrder with its ``start``: the next trial of a waiting process
                      L  no payload: no next trial follows, a waiting process exits
"""

from __future__ import annotations

import struct
from typing import Final

from tunemq_shared.base.errors import TransportError

#: No kind of frame: the node's end of the socket reports an invalid frame; the payload says why.
UNREADABLE: Final = 0
#: No kind of frame: the node's end of the socket reports that the process does not read.
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
SAVING: Final = ord("S")
ANSWER: Final = ord("A")

#: Both ends reject longer frames: a process whose code writes to a stray descriptor must not make
#: its node wait for gigabytes that never come.
MAX_FRAME_BYTES: Final = 32 * 2**20
#: The longest event of a trial process. The node's loop, which serves all trials, decodes it into
#: objects: up to 60 bytes of memory and 0.5 µs for each byte.
MAX_EVENT_BYTES: Final = 2**20
#: The longest frame of a trial process. Its node holds an unfinished one, and no limit of the trial
#: counts it.
MAX_FROM_TRIAL_BYTES: Final = 2 * MAX_EVENT_BYTES

_HEADER: Final = struct.Struct(">IB")
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return _pack_header(len(payload) + 1, kind) + payload


class FrameDecoder:
    """Split a stream of bytes, which may arrive in any pieces, into frames of ``longest`` bytes."""

    def __init__(self, longest: int = MAX_FRAME_BYTES) -> None:
        self._longest = longest
        #: The frames that the last `feed` completed before an invalid length.
        self.whole: list[tuple[int, bytes]] = []
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the (kind, payload) of each frame that ``data`` completes, in order.

        Raises:
            TransportError: the length of a frame is invalid, and the rest of the stream is
                unreadable. `whole` contains the frames before it.
        """
        if self._rest:
            data = self._rest + data
        frames: list[tuple[int, bytes]] = []
        offset, end = 0, len(data)
        while end - offset >= _HEADER.size:
            length, kind = _unpack_header(data, offset)
            if not 0 < length <= self._longest:
                self.whole = frames
                raise TransportError(
                    f"a frame says that it has {length} bytes; 1 to {self._longest} are possible."
                )
            after = offset + 4 + length
            if after > end:
                break
            frames.append((kind, data[offset + _HEADER.size : after]))
            offset = after
        self._rest = data[offset:] if offset else data
        return frames
