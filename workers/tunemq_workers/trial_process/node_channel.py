"""`NodeChannel`: a trial's connection to its node: frames on a blocking stream socket."""

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
from tunemq_shared.protocol import messages
from tunemq_shared.trial.trial_channel import TrialChannel
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.runtime import frames

_CHUNK: Final = 64 * 1024
_HEADER_BYTES: Final = 5
#: A send buffer that grew beyond this size is replaced by a small one.
_KEPT_BYTES: Final = 1 << 20

_decode_order = msgspec.msgpack.Decoder(messages.TrialOrder).decode
_encode_into = msgspec.msgpack.Encoder().encode_into
_put_header = struct.Struct(">IB").pack_into
_pack_count = struct.Struct(">I").pack


class NodeChannel(TrialChannel):
    """The trial's end of the connection; the process exits when the node closes the other end.

    Forked children of the trial close the socket, so they neither hold it open nor write to it.
    """

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(True)
        #: Whether a `TrialFailed` was sent.
        self.has_failed = False
        self._sock = line
        self._decoder = frames.FrameDecoder()
        self._buffer = bytearray(_CHUNK)
        #: Called before a message that the trial has ended.
        self.before_ending: Callable[[], object] = _do_nothing
        #: Whether to tell the node that this process waits for an order.
        self.says_that_it_waits = False
        self._is_saving = False
        self._orders = 0
        self._next: messages.TrialOrder | None = None
        self._newest: messages.TrialOrder | None = None
        self._is_dismissed = False
        self._awaits_answer = False
        self._answer: bytes | None = None
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=line.close)

    def send(self, event: messages.NodeEvent) -> None:
        """Send ``event``; wait while the node does not read.

        Raises:
            MetricError: it is larger than the largest possible message.
        """
        if type(event) is messages.CheckpointWritten:
            failpoint("written.before_send")
            self._send(frames.frame(frames.WRITTEN, messages.encode(event)))
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
                f"the result has {length:,} bytes, and {frames.MAX_EVENT_BYTES:,} are possible; "
                "write large data to a file in the trial's folder or a checkpoint."
            )
        kind = frames.EVENT
        if is_ending:
            kind = frames.ENDING
            self.has_failed = type(event) is messages.TrialFailed
        _put_header(buffer, 0, length, kind)
        self._send(buffer)
        if length > _KEPT_BYTES:
            self._buffer = bytearray(_CHUNK)

    def saves(self, *, is_saving: bool) -> None:
        """Tell the node that the trial begins, or has ended, to save a checkpoint."""
        self._is_saving = is_saving
        self._send(frames.frame(frames.SAVING, bytes([is_saving])))

    def waits(self, *, is_waiting: bool) -> None:
        """Tell the node that a save waits for the store, or continues; a stop does not wait."""
        if self._is_saving:
            self._send(frames.frame(frames.SAVING, bytes([not is_waiting])))

    def poll(self) -> messages.TrialOrder | None:
        """Return the newest order that has arrived; None if there is none."""
        while self._receive(socket.MSG_DONTWAIT):
            pass
        return self._taken()

    def wait(self) -> messages.TrialOrder:
        """Wait until an order has arrived, and return the newest one."""
        order = self.poll()
        if order is None and self.says_that_it_waits:
            self._send(frames.frame(frames.AWAIT_ORDER, _pack_count(self._orders)))
        while order is None:
            self._receive(0)
            order = self.poll()
        return order

    def ask_to_save(self) -> Path:
        """Wait until there is room for one more checkpoint, and return the node's cache folder.

        Raises:
            StoreError: there was no room in time; says why.
        """
        self.waits(is_waiting=True)
        answer = checkpoint_messages.decode_save_answer(self._asked(frames.ASK_SAVE))
        if answer.error:
            raise StoreError(answer.error)
        self.waits(is_waiting=False)
        return Path(answer.cache)

    def fetch(
        self, ref: messages.CheckpointRef, *, again: bool = False
    ) -> tuple[Path, messages.CheckpointRef]:
        """Wait until ``ref`` is in the node's cache, and return the cache folder.

        The copy is not verified. With ``again`` the node replaces its copy. Also returns ``ref``,
        with the hash of its manifest in the store if it has been committed meanwhile.

        Raises:
            CheckpointCorrupt: it is damaged or missing in the store.
            StoreError: the store did not deliver it in time.
        """
        question = checkpoint_messages.encode(checkpoint_messages.FetchCheckpoint(ref, again))
        answer = checkpoint_messages.decode_fetched(self._asked(frames.FETCH, question))
        if answer.error:
            raise (CheckpointCorrupt if answer.is_corrupt else StoreError)(answer.error)
        known = msgspec.structs.replace(ref, sha256=ref.sha256 or answer.sha256)
        return Path(answer.cache), known

    def wait_for_next_trial(self) -> messages.TrialOrder | None:
        """Report that this process is free, and return its next trial; None if it is to end."""
        self._newest = None
        self._send(frames.frame(frames.IDLE))
        while self._next is None and not self._is_dismissed:
            self._receive(0)
        order, self._next = self._next, None
        return order

    def _asked(self, kind: int, payload: bytes = b"") -> bytes:
        """Send a request to the node and wait for the answer; keep orders that arrive meanwhile."""
        if self._pid != os.getpid():
            raise TuneError(
                f"a checkpoint was asked for in process {os.getpid()}, a child of the trial's "
                f"process {self._pid}; ask in the trial's process, before the child is started."
            )
        if self._awaits_answer:  # a signal handler raised during the last wait
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

    def _taken(self) -> messages.TrialOrder | None:
        order, self._newest = self._newest, None
        return order

    def _receive(self, flags: int) -> bool:
        """Read what has arrived; return False if nothing has."""
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
                # Earlier orders were for the previous trial.
                self._next, self._newest = _decode_order(payload), None
                self._orders = 0
            elif kind == frames.LEAVE:
                self._is_dismissed = True
            else:
                raise BugError(f"The node sent a frame of kind {kind}.")
        return True


_ENDINGS: Final = frozenset({messages.TrialFinished, messages.TrialFailed, messages.TrialPaused})
_ANSWERS: Final = frozenset({frames.SAVE_ANSWER, frames.FETCHED})


def _do_nothing() -> None:
    """Do nothing."""


def _node_is_gone() -> NoReturn:
    # Not an exception: user code could catch it, and cleaning up has no effect without a node. The
    # forkserver kills the rest of the process tree.
    os._exit(1)
