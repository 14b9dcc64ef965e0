"""A trial's line to its node: frames on a blocking stream socket."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from tunemq_shared.base.errors import (
    BugError,
    CheckpointCorrupt,
    MetricError,
    StoreError,
    TuneError,
)
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.protocol.messages import (
    CheckpointRef,
    CheckpointWritten,
    NodeEvent,
    TrialFailed,
    TrialFinished,
    TrialOrder,
    TrialPaused,
    encode,
)
from tunemq_shared.trial.trial_channel import TrialChannel
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.runtime import frames

_CHUNK: Final = 64 * 1024
_HEADER_BYTES: Final = 5
#: Of what is sent in one piece; a larger buffer is not kept.
_KEPT_BYTES: Final = 1 << 20

_decode_order = msgspec.msgpack.Decoder(TrialOrder).decode
_encode_into = msgspec.msgpack.Encoder().encode_into
_put_header = struct.Struct(">IB").pack_into
_pack_count = struct.Struct(">I").pack


class NodeChannel(TrialChannel):
    """The host's end. When the node's is gone the process ends: nobody would hear the trial.

    Forked children of the trial do not keep the socket, so they neither hold it open nor write to
    it.
    """

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(True)
        #: Whether a trial's failure was sent.
        self.has_failed = False
        self._sock = line
        self._decoder = frames.FrameDecoder()
        self._buffer = bytearray(_CHUNK)
        #: Called before it is said that the trial has ended.
        self.before_ending: Callable[[], object] = _do_nothing
        #: Whether the node is to know when this one waits for an order.
        self.says_that_it_waits = False
        self._orders = 0
        self._next: TrialOrder | None = None
        self._newest: TrialOrder | None = None
        self._is_dismissed = False
        self._awaits_answer = False
        self._answer: bytes | None = None
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=line.close)

    def send(self, event: NodeEvent) -> None:
        """Send ``event``; waits while the node does not read.

        Raises:
            MetricError: it is larger than any message may be.
        """
        if type(event) is CheckpointWritten:
            failpoint("written.before_send")
            self._send(frames.frame(frames.WRITTEN, encode(event)))
            failpoint("written.after_send")
            return
        is_ending = type(event) in _ENDINGS
        if is_ending:
            self.before_ending()
        buffer = self._buffer
        _encode_into(event, buffer, _HEADER_BYTES)
        length = len(buffer) - 4
        if length > frames.MAX_EVENT_BYTES:
            self._buffer = bytearray(_CHUNK)
            raise MetricError(
                f"the result has {length / 2**20:.0f} MiB, and {frames.MAX_EVENT_BYTES >> 20} MiB "
                "are possible; write large data to a file in the trial's folder or a checkpoint."
            )
        kind = frames.EVENT
        if is_ending:
            kind = frames.ENDING
            self.has_failed = type(event) is TrialFailed
        _put_header(buffer, 0, length, kind)
        self._send(buffer)
        if length > _KEPT_BYTES:
            self._buffer = bytearray(_CHUNK)

    def poll(self) -> TrialOrder | None:
        """The newest order that has come, if one has."""
        while self._receive(socket.MSG_DONTWAIT):
            pass
        return self._taken()

    def wait(self) -> TrialOrder:
        """The newest order, once one has come."""
        order = self.poll()
        if order is None and self.says_that_it_waits:
            self._send(frames.frame(frames.AWAIT_ORDER, _pack_count(self._orders)))
        while order is None:
            self._receive(0)
            order = self.poll()
        return order

    def ask_to_save(self) -> Path:
        """The node's folder of checkpoints, once there may be one more of this trial in it.

        Raises:
            StoreError: there was no room in time; says what it was waited for.
        """
        answer = checkpoint_messages.decode_save_answer(self._asked(frames.ASK_SAVE))
        if answer.error:
            raise StoreError(answer.error)
        return Path(answer.cache)

    def fetch(self, ref: CheckpointRef, *, again: bool = False) -> tuple[Path, CheckpointRef]:
        """The node's folder of checkpoints, once ``ref`` is below it under its key.

        Nothing in it is verified. With ``again`` the copy that is there is of no use: the node
        gets another one. Also returns ``ref``, with the hash of its manifest in the store if it
        has been committed meanwhile.

        Raises:
            CheckpointCorrupt: it is damaged or missing in the store.
            StoreError: the store did not give it in time.
        """
        question = checkpoint_messages.encode(checkpoint_messages.FetchCheckpoint(ref, again))
        answer = checkpoint_messages.decode_fetched(self._asked(frames.FETCH, question))
        if answer.error:
            raise (CheckpointCorrupt if answer.is_corrupt else StoreError)(answer.error)
        known = msgspec.structs.replace(ref, sha256=ref.sha256 or answer.sha256)
        return Path(answer.cache), known

    def wait_for_next_trial(self) -> TrialOrder | None:
        """Say that the host is free, and wait for its next trial; None when none will come."""
        self._newest = None
        self._send(frames.frame(frames.IDLE))
        while self._next is None and not self._is_dismissed:
            self._receive(0)
        order, self._next = self._next, None
        return order

    def _asked(self, kind: int, payload: bytes = b"") -> bytes:
        """Ask the node, and wait for its answer; orders that come meanwhile are kept."""
        if self._pid != os.getpid():
            raise TuneError(
                f"a checkpoint was asked for in process {os.getpid()}, a child of the trial's "
                f"process {self._pid}; ask in the trial's process, before the child is started."
            )
        if self._awaits_answer:  # a signal's handler raised while somebody waited for it
            self._answered()
        self._send(frames.frame(kind, payload))
        self._awaits_answer = True
        return self._answered()

    def _answered(self) -> bytes:
        while (answer := self._answer) is None:
            self._receive(0)
        self._answer, self._awaits_answer = None, False
        return answer

    def _send(self, data: bytes | bytearray) -> None:
        try:
            self._sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            _node_is_gone()

    def _taken(self) -> TrialOrder | None:
        order, self._newest = self._newest, None
        return order

    def _receive(self, flags: int) -> bool:
        """Take in what is there; False when there is nothing."""
        try:
            data = self._sock.recv(_CHUNK, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            _node_is_gone()
        if not data:
            _node_is_gone()
        for kind, payload in self._decoder.feed(data):
            if kind == frames.ORDER:
                self._newest = _decode_order(payload)
                self._orders += 1
            elif kind in _ANSWERS:
                self._answer = payload
            elif kind == frames.NEXT:
                # Orders before it were for the trial before.
                self._next, self._newest = _decode_order(payload), None
                self._orders = 0
            elif kind == frames.LEAVE:
                self._is_dismissed = True
            else:
                raise BugError(f"The node sent a frame of kind {kind}.")
        return True


_ENDINGS: Final = frozenset({TrialFinished, TrialFailed, TrialPaused})
_ANSWERS: Final = frozenset({frames.SAVE_ANSWER, frames.FETCHED})


def _do_nothing() -> None:
    """Nothing has to be done."""


def _node_is_gone() -> NoReturn:
    # Not an exception: user code could catch it, and has nothing to clean up that anybody would
    # see. The forkserver kills the rest of the family.
    os._exit(1)
