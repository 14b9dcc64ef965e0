from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_shared.base.errors import TransportError
from tunemq_workers.runtime.frames import EVENT, IDLE, MAX_FRAME_BYTES, FrameDecoder, frame

KINDS = st.integers(0, 255)


@given(st.lists(st.tuples(KINDS, st.binary(max_size=300))), st.lists(st.integers(1, 40)))
def test_frames_round_trip_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(frame(kind, payload) for kind, payload in sent)
    decoder, received = FrameDecoder(), []
    for cut in cuts:
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    received += decoder.feed(stream)

    assert received == sent


def test_frame_is_its_length_its_kind_and_its_payload():
    assert frame(EVENT, b"abc") == b"\x00\x00\x00\x04Eabc"
    assert frame(IDLE) == b"\x00\x00\x00\x01I"


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0x6C6F7373])
def test_frame_of_an_invalid_length_is_rejected(length):
    with pytest.raises(TransportError, match=f"says that it has {length} bytes"):
        FrameDecoder().feed(length.to_bytes(4, "big") + b"E")


def test_decoder_rejects_a_longer_frame_than_its_sender_may_send_at_once():
    decoder = FrameDecoder(longest=10)
    assert decoder.feed(frame(EVENT, b"123456789")) == [(EVENT, b"123456789")]
    with pytest.raises(TransportError, match="has 11 bytes; 1 to 10 are possible"):
        decoder.feed(frame(EVENT, b"1234567890")[:5])
