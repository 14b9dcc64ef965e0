"""What of a request and of its answer is signed: everything that either side acts on.

A request is bound to its id, so that its answer is the answer to it and to no other; to its kind
and version; and to the time at which it was sent, so that one that was kept is void after
`wire.REQUEST_TTL_S`. For so long at least the scheduler knows which it has done.
"""

from __future__ import annotations

from tunemq_shared.protocol.farm_requests import REQUESTS_VERSION
from tunemq_shared.signing.message_signing import MessageSigner


def close_request(
    message_signer: MessageSigner, body: bytes, *, request: str, kind: str, sent: str
) -> bytes:
    """A request as it travels.

    Args:
        seal: of whose request it is.
        body: what is asked, in msgpack.
        request: its id.
        kind: of request.
        sent: when, as its entry says it.
    """
    return message_signer.close(body, *_context(request, kind, sent))


def open_request(
    message_signer: MessageSigner, signed_message: bytes, *, request: str, kind: str, sent: str
) -> bytes:
    """What is asked.

    Raises:
        SealBroken: nobody who has a key of the seal's asks this.
    """
    return message_signer.open(signed_message, *_context(request, kind, sent))


def close_answer(message_signer: MessageSigner, reply: bytes, request: str) -> bytes:
    """The answer to a request as it travels."""
    return message_signer.close(reply, b"answer", request.encode())


def open_answer(message_signer: MessageSigner, signed_message: bytes, request: str) -> bytes:
    """The answer to a request.

    Raises:
        SealBroken: the scheduler does not say this.
    """
    return message_signer.open(signed_message, b"answer", request.encode())


def _context(request: str, kind: str, sent: str) -> tuple[bytes, ...]:
    version = str(REQUESTS_VERSION)
    return (b"request", request.encode(), version.encode(), kind.encode(), sent.encode())
