"""Signs requests and their answers: everything that either side acts on.

A signature covers the request's ID, so that an answer belongs to one request; its kind and version;
and the time of sending, so that a recorded request expires after `redis_keys.REQUEST_TTL_S`. The
scheduler remembers the requests that it executed for at least that time.
"""

from __future__ import annotations

from tunemq_shared.protocol.farm_requests import REQUESTS_VERSION
from tunemq_shared.signing.message_signing import MessageSigner


def close_request(
    message_signer: MessageSigner, body: bytes, *, request: str, kind: str, sent: str
) -> bytes:
    """Sign a request.

    Args:
        message_signer: signs in the owner's name.
        body: the request in msgpack.
        request: its ID.
        kind: its kind.
        sent: the time of sending, as in its stream entry.
    """
    return message_signer.close(body, *_context(request, kind, sent))


def open_request(
    message_signer: MessageSigner, signed_message: bytes, *, request: str, kind: str, sent: str
) -> bytes:
    """Verify a request; return its body.

    Raises:
        InvalidSignature: no key of the owner signed this request.
    """
    return message_signer.open(signed_message, *_context(request, kind, sent))


def close_answer(message_signer: MessageSigner, reply: bytes, request: str) -> bytes:
    """Sign the answer to a request."""
    return message_signer.close(reply, b"answer", request.encode())


def open_answer(message_signer: MessageSigner, signed_message: bytes, request: str) -> bytes:
    """Verify the answer to a request; return it.

    Raises:
        InvalidSignature: the scheduler did not sign this answer.
    """
    return message_signer.open(signed_message, b"answer", request.encode())


def _context(request: str, kind: str, sent: str) -> tuple[bytes, ...]:
    version = str(REQUESTS_VERSION)
    return (b"request", request.encode(), version.encode(), kind.encode(), sent.encode())
