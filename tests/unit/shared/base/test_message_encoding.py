"""Messages with any text can be encoded."""

from __future__ import annotations

import msgspec
import pytest

from tunemq_shared.protocol import messages as m
from tunemq_workers.checkpoints import checkpoint_messages
from tunemq_workers.checkpoints.checkpoint_messages import SaveAnswer

RAW = "no room in \udcff\udcfe"
ESCAPED = "no room in \\udcff\\udcfe"


@pytest.mark.parametrize("text", ["ä", RAW])
def test_encode_of_a_message_with_any_text_is_decoded_with_escapes(text: str) -> None:
    shown = text if text != RAW else ESCAPED
    answer = checkpoint_messages.encode(SaveAnswer("", text))
    assert msgspec.msgpack.decode(answer, type=SaveAnswer) == SaveAnswer("", shown)
    failed = m.TrialFailed("t", 1, "user", text, text, 1.0)
    told = m.TrialFailed("t", 1, "user", shown, shown, 1.0)
    assert m.decode_node_event(m.encode(failed)) == told


def test_encode_keeps_bytes_beside_text_that_is_escaped() -> None:
    assert msgspec.msgpack.decode(m.encode([RAW, b"\xff"])) == [ESCAPED, b"\xff"]
