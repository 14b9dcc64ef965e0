"""A message verifies only with one of its keys, in the place for which it was signed."""

from __future__ import annotations

import hashlib
import hmac
import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tunemq_shared.signing.message_signing import (
    HEAD_BYTES,
    KEY_ID_BYTES,
    SECRET_BYTES,
    InvalidSignature,
    MessageSigner,
    SigningKey,
)

KEYS = st.builds(
    SigningKey,
    st.binary(min_size=KEY_ID_BYTES, max_size=KEY_ID_BYTES),
    st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
)
CONTEXTS = st.lists(st.binary(max_size=6), max_size=4).map(tuple)
BODIES = st.binary(max_size=200)
OLD, NEW = (
    SigningKey(b"old-key.", b"o" * SECRET_BYTES),
    SigningKey(b"new-key.", b"n" * SECRET_BYTES),
)


def reason(message_signer: MessageSigner, signed_message: bytes, *context: bytes) -> str:
    """Return why verification fails."""
    with pytest.raises(InvalidSignature) as found:
        message_signer.open(signed_message, *context)
    assert str(found.value)
    return found.value.reason


@given(st.lists(KEYS, max_size=3, unique_by=lambda key: key.id), BODIES, CONTEXTS)
def test_signed_message_is_opened(keys, body, context):
    message_signer = MessageSigner("orders", keys)
    assert message_signer.open(message_signer.close(body, *context), *context) == body


@given(BODIES, CONTEXTS, st.data())
def test_altered_byte_is_rejected(body, context, data):
    message_signer = MessageSigner("orders", [OLD])
    signed_message = bytearray(message_signer.close(body, *context))
    place = data.draw(st.integers(0, len(signed_message) - 1))
    signed_message[place] ^= data.draw(st.integers(1, 255))
    assert reason(message_signer, bytes(signed_message), *context) in {
        *("altered", "unknown_key", "unreadable", "unsigned"),
    }


@given(BODIES, st.integers(0, 300), st.binary(max_size=3))
def test_shortened_or_extended_message_is_rejected(body, size, more):
    message_signer = MessageSigner("orders", [OLD])
    signed_message = message_signer.close(body, b"place")
    changed = signed_message[:size] + more
    assume(changed != signed_message)
    assert reason(message_signer, changed, b"place") in {
        "altered",
        "unknown_key",
        "unreadable",
        "unsigned",
    }


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_rejected(rubbish):
    assert reason(MessageSigner("orders", [OLD]), rubbish)


@given(BODIES, CONTEXTS, BODIES, CONTEXTS)
def test_message_for_one_place_is_rejected_in_another(body, context, other, elsewhere):
    assume((body, context) != (other, elsewhere))
    message_signer = MessageSigner("orders", [OLD])
    mac = message_signer.close(body, *context)[:HEAD_BYTES]
    # Even if the same bytes are only split differently.
    assert reason(message_signer, mac + other, *elsewhere) == "altered"


def test_parts_are_not_concatenated():
    message_signer = MessageSigner("orders", [OLD])
    assert reason(message_signer, message_signer.close(b"c", b"ab"), b"a", b"b") == "altered"
    assert (
        reason(message_signer, message_signer.close(b"bc", b"a")[:HEAD_BYTES] + b"c", b"ab")
        == "altered"
    )
    assert reason(message_signer, message_signer.close(b"", b"", b""), b"") == "altered"


def test_purposes_are_separate_even_with_the_same_key():
    assert (
        reason(MessageSigner("events", [OLD]), MessageSigner("orders", [OLD]).close(b"x"))
        == "altered"
    )


def test_first_key_signs_and_each_is_accepted():
    both = MessageSigner("orders", [NEW, OLD])
    assert both.signer == NEW.id
    assert both.close(b"x")[1 : 1 + KEY_ID_BYTES] == NEW.id
    assert both.open(MessageSigner("orders", [OLD]).close(b"x")) == b"x"
    assert MessageSigner("orders", [OLD, NEW]).open(both.close(b"x")) == b"x"
    assert (both.believes(OLD.id), both.believes(b"another.")) == (True, False)


def test_unknown_key_is_named():
    with pytest.raises(InvalidSignature, match=NEW.id.hex()) as found:
        MessageSigner("orders", [OLD]).open(MessageSigner("orders", [NEW]).close(b"x"))
    assert found.value.reason == "unknown_key"


def test_other_secret_of_the_same_name_is_rejected():
    twin = SigningKey(OLD.id, NEW.secret)
    assert (
        reason(MessageSigner("orders", [OLD]), MessageSigner("orders", [twin]).close(b"x"))
        == "altered"
    )


def test_signed_and_unsigned_messages_are_never_confused():
    signed, unsigned = MessageSigner("orders", [OLD]), MessageSigner("orders")
    assert (signed.is_signed, unsigned.is_signed, unsigned.signer) == (True, False, b"")
    assert reason(signed, unsigned.close(b"x")) == "unsigned"
    assert reason(unsigned, signed.close(b"x")) == "signed_without_keys"
    assert reason(unsigned, b"") == "unreadable"
    assert reason(unsigned, b"\2x") == "unreadable"
    assert reason(signed, b"") == "unreadable"


def test_keys_are_replaced_but_never_by_none():
    message_signer = MessageSigner("orders", [OLD])
    message_signer.use([NEW])
    assert reason(message_signer, MessageSigner("orders", [OLD]).close(b"x")) == "unknown_key"
    with pytest.raises(ValueError, match="cannot lose its last key"):
        message_signer.use([])
    assert message_signer.signer == NEW.id


def test_bytes_are_those_that_the_page_describes():
    """The page suffices to write, or to check, another client."""
    parts = (b"orders", b"command", b"node-1", b"the body")
    framed = len(parts).to_bytes(8, "big")
    framed += b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    mac = hmac.new(OLD.secret, framed, hashlib.sha256).digest()
    signed_message = MessageSigner("orders", [OLD]).close(b"the body", b"command", b"node-1")
    assert signed_message == b"\1" + OLD.id + mac + b"the body"
    assert len(signed_message) == HEAD_BYTES + len(b"the body")


def test_no_secret_is_shown():
    key = SigningKey(b"k" * KEY_ID_BYTES, b"S" * SECRET_BYTES)
    assert "SSS" not in f"{key!r} {key} {MessageSigner('orders', [key])!r} {[key]} { ({'k': key}) }"


def test_error_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(InvalidSignature("is not signed", "unsigned")))
    assert (str(error), error.reason) == ("is not signed", "unsigned")
