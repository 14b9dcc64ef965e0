"""Frames between an experiment process and its supervisor, on real sockets."""

from __future__ import annotations

import socket
import struct

import pytest

from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.nonblocking_frames import (
    MAX_FRAME_BYTES,
    FrameSocket,
    IpcFrameDecoder,
)
from tunemq_scheduler.farm.ipc.supervisor_side import _FRAME_BYTES, frames_of
from tunemq_scheduler.transport.event_batches import EventBatch, ReadEvent
from tunemq_shared.base.errors import TransportError
from tunemq_shared.protocol import messages as m


def pair() -> tuple[FrameSocket, FrameSocket]:
    """Return two connected ends."""
    ours, theirs = socket.socketpair()
    return FrameSocket(ours), FrameSocket(theirs)


def test_frames_arrive_whole_and_in_order_however_the_stream_is_cut():
    data = b"".join(struct.pack(">I", len(one)) + one for one in (b"a", b"bc" * 500, b"d"))
    for size in (1, 3, 7, 1000, len(data)):
        decoder = IpcFrameDecoder()
        found = []
        for place in range(0, len(data), size):
            found += decoder.feed(data[place : place + size])
        assert found == [b"a", b"bc" * 500, b"d"]


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1])
def test_frame_of_an_invalid_length_is_rejected(length):
    with pytest.raises(TransportError, match="says that it has"):
        IpcFrameDecoder().feed(struct.pack(">I", length) + b"rest")


def test_both_ends_send_more_than_the_sockets_hold_without_waiting():
    left, right = pair()
    sent = [bytes([number]) * 2**20 for number in range(1, 9)]
    for payload in sent:
        left.put(payload)
        right.put(payload)
    left.flush()
    right.flush()
    assert left.waiting > 0
    assert right.waiting > 0
    got: dict[FrameSocket, list[bytes]] = {left: [], right: []}
    while len(got[left]) < 8 or len(got[right]) < 8:
        for end in (left, right):
            got[end] += end.receive()
            end.flush()
    assert got == {left: sent, right: sent}
    assert left.waiting == right.waiting == 0
    left.close()
    right.close()


def test_frames_sent_before_the_end_are_read_before_it():
    left, right = pair()
    right.put(b"unread")
    right.flush()
    left.put(b"last words")
    left.flush()
    left.close()
    assert right.receive() == [b"last words"]
    assert not right.is_at_end
    assert right.receive() == []
    assert right.is_at_end
    right.put(b"too late")
    right.flush()
    assert right.is_stalled
    assert right.waiting == 0
    right.close()


def test_message_that_is_too_large_is_rejected_and_none_of_it_is_sent():
    left, right = pair()
    with pytest.raises(TransportError, match="bytes"):
        left.put(bytes(MAX_FRAME_BYTES + 1))
    assert left.waiting == 0
    left.close()
    right.close()


def test_events_are_sent_in_bounded_frames_and_no_batch_is_split():
    text = "x" * (_FRAME_BYTES // 4)
    read_events: list[ReadEvent] = []
    for number in range(6):
        first = 3 * number + 1
        read = m.BatchRead("inc", first, first + 2, f"{number}-0")
        read_events.append(EventBatch(read, m.encode([m.NodeWarned(text) for _ in range(3)])))
        read_events.append(m.NodeLost("other", "silent"))
    frames = frames_of(read_events)
    assert len(frames) > 3
    assert [read_event for frame in frames for read_event in frame] == read_events
    encoded = [r.encode(r.NewEvents(frame)) for frame in frames]
    assert all(len(frame) < 2 * _FRAME_BYTES for frame in encoded)
    assert [
        read_event
        for frame in map(r.decode_for_experiment, encoded)
        for read_event in frame.read_events
    ] == read_events


def test_s15_large_nodes_are_sent_in_bounded_frames():
    gpus = tuple(m.Gpu(f"{number}-{'x' * 40}", "A100", 8e10) for number in range(800))
    nodes = [m.NodeJoined(f"n{n}", "n", "h", "127.0.0.1", {"gpu": 800.0}, gpus) for n in range(100)]
    frames = frames_of(nodes)
    assert max(len(r.encode(r.NewEvents(frame))) for frame in frames) < 2 * _FRAME_BYTES
    assert [one for frame in frames for one in frame] == nodes
