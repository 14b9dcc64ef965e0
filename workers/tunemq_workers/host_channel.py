"""A trial's line to its node: frames on a blocking stream socket."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NoReturn

import msgspec

from tunemq_shared.channel import Channel
from tunemq_shared.errors import BugError, MetricError
from tunemq_shared.messages import HostOrder, NodeEvent, TrialFailed, TrialFinished
from tunemq_workers import frames

_CHUNK: Final = 64 * 1024
_HEADER_BYTES: Final = 5
#: Of what is sent in one piece; a larger buffer is not kept.
_KEPT_BYTES: Final = 1 << 20

_decode_order = msgspec.msgpack.Decoder(HostOrder).decode
_encode_into = msgspec.msgpack.Encoder().encode_into
_put_header = struct.Struct(">IB").pack_into


class HostChannel(Channel):
    """The host's end. When the node's is gone the process ends: nobody would hear the trial.

    Forked children of the trial do not keep the socket, so they neither hold it open nor write to
    it.
    """

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(True)
        #: Whether a trial's failure was sent.
        self.has_failed = False
        self._line = line
        self._decoder = frames.FrameDecoder()
        self._buffer = bytearray(_CHUNK)
        self._next: HostOrder | None = None
        self._newest: HostOrder | None = None
        self._is_dismissed = False
        os.register_at_fork(after_in_child=line.close)

    def send(self, event: NodeEvent) -> None:
        """Send ``event``; waits while the node does not read.

        Raises:
            MetricError: it is larger than any message may be.
        """
        buffer = self._buffer
        _encode_into(event, buffer, _HEADER_BYTES)
        length = len(buffer) - 4
        if length > frames.MAX_FRAME_BYTES:
            self._buffer = bytearray(_CHUNK)
            raise MetricError(
                f"the result has {length / 2**20:.0f} MiB, and {frames.MAX_FRAME_BYTES >> 20} MiB "
                "are possible; write large data to a file in the trial's folder or a checkpoint."
            )
        kind = frames.EVENT
        if type(event) in _ENDINGS:
            kind = frames.ENDING
            self.has_failed = type(event) is TrialFailed
        _put_header(buffer, 0, length, kind)
        self._send(buffer)
        if length > _KEPT_BYTES:
            self._buffer = bytearray(_CHUNK)

    def poll(self) -> HostOrder | None:
        """The newest order that has come, if one has."""
        while self._receive(socket.MSG_DONTWAIT):
            pass
        return self._taken()

    def wait(self) -> HostOrder:
        """The newest order, once one has come."""
        while (order := self.poll()) is None:
            self._receive(0)
        return order

    def wait_for_next_trial(self) -> HostOrder | None:
        """Say that the host is free, and wait for its next trial; None when none will come."""
        self._newest = None
        self._send(frames.frame(frames.IDLE))
        while self._next is None and not self._is_dismissed:
            self._receive(0)
        order, self._next = self._next, None
        return order

    def _send(self, data: bytes | bytearray) -> None:
        try:
            self._line.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            _node_is_gone()

    def _taken(self) -> HostOrder | None:
        order, self._newest = self._newest, None
        return order

    def _receive(self, flags: int) -> bool:
        """Take in what is there; False when there is nothing."""
        try:
            data = self._line.recv(_CHUNK, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            _node_is_gone()
        if not data:
            _node_is_gone()
        for kind, payload in self._decoder.feed(data):
            if kind == frames.ORDER:
                self._newest = _decode_order(payload)
            elif kind == frames.NEXT:
                # Orders before it were for the trial before.
                self._next, self._newest = _decode_order(payload), None
            elif kind == frames.LEAVE:
                self._is_dismissed = True
            else:
                raise BugError(f"The node sent a frame of kind {kind}.")
        return True


_ENDINGS: Final = frozenset({TrialFinished, TrialFailed})


def _node_is_gone() -> NoReturn:
    # Not an exception: user code could catch it, and has nothing to clean up that anybody would
    # see. The forkserver kills the rest of the family.
    os._exit(1)
