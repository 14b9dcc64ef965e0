"""Message signing: prove that a holder of a key sent exactly this message.

A signed message is its body after a header: one byte, 0 for an unsigned message, else 1 and the id
of a key (`KEY_ID_BYTES`) and an HMAC-SHA-256 (RFC 2104, FIPS 180-4) of the purpose, the context and
the body, each preceded by its length. The context is what the message is about and the reader knows
anyway, such as its key in Redis: a message signed for one place is invalid in another. Signatures
do not detect replays within one place; each kind of message does so with a term and a version, a
sequence number, or an id and a time.

A `MessageSigner` without keys writes and accepts only unsigned messages. So both sides have keys of
a purpose, or neither has: there is no mode in between to which an attacker could downgrade a side.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

from tunemq_shared.base.errors import TransportError

#: Bytes of a key's id, and of its secret.
KEY_ID_BYTES: Final = 8
SECRET_BYTES: Final = 32

_OPEN, _SIGNED = b"\0", b"\1"
_MAC_BYTES: Final = 32
#: The most bytes that a signature adds.
HEAD_BYTES: Final = 1 + KEY_ID_BYTES + _MAC_BYTES
_LENGTH_BYTES: Final = 8


class SigningKey(NamedTuple):
    """A secret that the senders and the readers of one purpose share.

    Attributes:
        id: `KEY_ID_BYTES` bytes that name it in messages; not secret.
        secret: `SECRET_BYTES` random bytes.
    """

    id: bytes
    secret: bytes

    def __repr__(self) -> str:
        """The id without the secret, for logs."""
        return f"SigningKey({self.id.hex()})"


class InvalidSignature(TransportError):
    """A message has no valid signature; its content must not be used.

    Attributes:
        reason: The reason as one word, for counters: ``unreadable``, ``unsigned``,
            ``signed_without_keys``, ``unknown_key``, ``altered``, ``unknown_submitter``; of
            requests also ``expired`` and ``early``. The error's text completes a sentence for
            people that begins with the message's name: "is not signed".
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidSignature], tuple[str, str]]:
        return type(self), (str(self), self.reason)


class _KeyRing(NamedTuple):
    """The keys of a signer; replaced as a whole, since other threads use them meanwhile."""

    signer: SigningKey | None
    secrets: dict[bytes, bytes]

    def __repr__(self) -> str:
        """The ids without the secrets."""
        return f"_KeyRing({[key.hex() for key in self.secrets]})"


class MessageSigner:
    """Signs and verifies the messages of one purpose.

    Args:
        purpose: What the keys are for, such as "orders".
        keys: The first one signs, all verify; empty if nothing is signed.
    """

    def __init__(self, purpose: str, keys: Sequence[SigningKey] = ()) -> None:
        self.purpose = purpose
        name = purpose.encode()
        self._purpose = _length(name) + name
        self._ring = _ring(keys)

    def __repr__(self) -> str:
        return f"MessageSigner({self.purpose!r}, {[key.hex() for key in self._ring.secrets]})"

    @property
    def is_signed(self) -> bool:
        """Whether there are keys, so that messages are signed."""
        return self._ring.signer is not None

    @property
    def signer(self) -> bytes:
        """The id of the signing key; empty without keys."""
        signer = self._ring.signer
        return b"" if signer is None else signer.id

    def believes(self, key: bytes) -> bool:
        """Whether the key with this id verifies messages."""
        return key in self._ring.secrets

    def use(self, keys: Sequence[SigningKey]) -> None:
        """Replace all keys; callable in any thread.

        Raises:
            ValueError: ``keys`` is empty and there were some: signing cannot be turned off.
        """
        if self.is_signed and not keys:
            raise ValueError(f"a seal of {self.purpose} cannot lose its last key")
        self._ring = _ring(keys)

    def close(self, body: bytes, *context: bytes) -> bytes:
        """Sign a message.

        Args:
            body: The content.
            context: What it is about, which the reader knows; both sides use the same order.
        """
        signer = self._ring.signer
        if signer is None:
            return _OPEN + body
        mac = self._mac(signer.secret, body, context)
        return b"".join((_SIGNED, signer.id, mac, body))

    def open(self, signed_message: bytes, *context: bytes) -> bytes:
        """Verify a signed message and return its body.

        Raises:
            InvalidSignature: No holder of a key sent this body in this context; says why.
        """
        ring, kind = self._ring, signed_message[:1]
        if ring.signer is None:
            if kind == _OPEN:
                return signed_message[1:]
            if kind == _SIGNED:
                raise InvalidSignature(
                    "is signed, and there are no keys here to check it with", "signed_without_keys"
                )
            raise InvalidSignature("cannot be read", "unreadable")
        if kind == _OPEN:
            raise InvalidSignature("is not signed", "unsigned")
        if kind != _SIGNED or len(signed_message) < HEAD_BYTES:
            raise InvalidSignature("cannot be read", "unreadable")
        key, mac = (
            signed_message[1 : 1 + KEY_ID_BYTES],
            signed_message[1 + KEY_ID_BYTES : HEAD_BYTES],
        )
        secret = ring.secrets.get(key)
        if secret is None:
            raise InvalidSignature(
                f"is signed with the key {key.hex()}, which is not known here", "unknown_key"
            )
        body = signed_message[HEAD_BYTES:]
        if not hmac.compare_digest(mac, self._mac(secret, body, context)):
            raise InvalidSignature("was altered, or is about something else", "altered")
        return body

    def _mac(self, secret: bytes, body: bytes, context: Sequence[bytes]) -> bytes:
        # The number of parts comes first, and each part's length before it: no two different
        # messages are framed to the same bytes.
        parts = [(len(context) + 2).to_bytes(_LENGTH_BYTES, "big"), self._purpose]
        for part in (*context, body):
            parts += (_length(part), part)
        return hmac.digest(secret, b"".join(parts), "sha256")


def unchecked_body(signed_message: bytes) -> bytes:
    """The body of a signed message, unverified: for a reader without the key.

    Raises:
        InvalidSignature: It is not a signed message.
    """
    head = {_OPEN: 1, _SIGNED: HEAD_BYTES}.get(signed_message[:1])
    if head is None or len(signed_message) < head:
        raise InvalidSignature("cannot be read", "unreadable")
    return signed_message[head:]


def _ring(keys: Sequence[SigningKey]) -> _KeyRing:
    return _KeyRing(keys[0] if keys else None, {key.id: key.secret for key in keys})


def _length(part: bytes) -> bytes:
    return len(part).to_bytes(_LENGTH_BYTES, "big")
