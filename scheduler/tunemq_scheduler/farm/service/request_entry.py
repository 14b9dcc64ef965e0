"""Decodes and checks request entries, because any client of Redis can append one."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final, NamedTuple, get_args

import msgspec

from tunemq_scheduler.api.request_signing import open_request
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.signing.key_files import KEYS_VARIABLE, SUBMITTER_NAME
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import HEAD_BYTES, InvalidSignature, MessageSigner

_ID: Final = re.compile(rb"[0-9a-f]{32}")
_SENT: Final = re.compile(r"[0-9]{1,15}")
#: Each kind of request by its name in Redis.
KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(r.AnyRequest)}

#: Answers senders that have proved no identity.
UNSIGNED: Final = MessageSigner("")


class ReceivedRequest(NamedTuple):
    """A request with its id, its owner, and the signer for its answer."""

    id: str
    owner: str
    request: r.AnyRequest
    message_signer: MessageSigner

    @property
    def key(self) -> str:
        """The request's unique key; it has the owner, because others may reuse an id."""
        return f"{self.id} {self.owner}"


class InvalidRequest(Exception):
    """An entry that is not a valid request of an authorised user.

    Attributes:
        reason: a word, for counting.
        request: its id; empty if it has none and cannot be answered.
        message_signer: signs the rejection; None for another version of requests, whose signatures
            may differ.
    """

    def __init__(
        self,
        text: str,
        reason: str,
        request: str = "",
        message_signer: MessageSigner | None = UNSIGNED,
    ) -> None:
        super().__init__(text)
        self.reason, self.request, self.message_signer = reason, request, message_signer


def decode_entry(
    fields: dict[bytes, bytes], keys: LiveKeys, tunemq: str, now: float
) -> ReceivedRequest:
    """Decode and verify the request in an entry.

    Args:
        fields: the entry's fields.
        keys: the keys of the users; without keys, every sender may use any name.
        tunemq: the version of this TuneMQ.
        now: the scheduler's Unix time in seconds.

    Returns:
        The request.

    Raises:
        InvalidRequest: it cannot be decoded, is not from an authorised user, or is too old.
    """
    raw_id = fields.get(b"id", b"")
    if not _ID.fullmatch(raw_id):
        raise InvalidRequest("it has no id", "unreadable")
    request = raw_id.decode()
    version, kind = _text(fields, b"v"), _text(fields, b"kind")
    if version != str(r.REQUESTS_VERSION):
        raise InvalidRequest(
            f"this farm's scheduler (TuneMQ {tunemq}) reads requests of version"
            f" {r.REQUESTS_VERSION}, and this is one of version {_shown(fields, b'v')} (TuneMQ"
            f" {_shown(fields, b'tunemq')}); use the same TuneMQ on both sides.",
            "version",
            request,
            None,
        )
    owner, signed_message = _text(fields, b"owner"), fields.get(b"body", b"")
    if not SUBMITTER_NAME.fullmatch(owner):
        raise InvalidRequest(
            f"the owner {owner!r} is invalid: use letters, digits and .@+=-, 64 at most.",
            "unreadable",
            request,
        )
    size = len(signed_message) - (HEAD_BYTES if keys.is_signed else 1)
    if size > r.MAX_REQUEST_BYTES:
        raise InvalidRequest(
            f"the request has more than the limit of {r.MAX_REQUEST_BYTES} bytes.",
            "oversized",
            request,
        )
    sent = _text(fields, b"sent")
    try:
        message_signer = keys.submitter(owner)
        body = open_request(message_signer, signed_message, request=request, kind=kind, sent=sent)
    except InvalidSignature as error:
        raise InvalidRequest(_not_hers(error, owner), error.reason, request) from error
    if message_signer.is_signed:
        _check_time(sent, now, request, message_signer)
    wanted = KINDS.get(kind)
    if wanted is None:
        raise InvalidRequest(
            f"this farm's scheduler (TuneMQ {tunemq}) does not know the request {kind!r}; it may be"
            f" older than the TuneMQ that sent it ({_shown(fields, b'tunemq')}).",
            "unknown_kind",
            request,
            message_signer,
        )
    try:
        return ReceivedRequest(
            request, owner, msgspec.msgpack.decode(body, type=wanted), message_signer
        )
    except UNDECODABLE as error:
        raise InvalidRequest(
            f"the request {kind!r} cannot be read: {error}.", "unreadable", request, message_signer
        ) from error


def _not_hers(error: InvalidSignature, owner: str) -> str:
    """Explain why a request's signature is invalid, and what its sender can do."""
    if error.reason in {"unsigned", "unknown_submitter"}:
        known = "" if error.reason == "unsigned" else f", and has no keys of {owner!r}"
        return (
            f"this farm accepts signed requests only{known}: ask its administrator for keys "
            f"(tunemq keys add FOLDER {owner}), and pass the file {owner}.toml with --keys or "
            f"${KEYS_VARIABLE}."
        )
    if error.reason == "signed_without_keys":
        return (
            "this farm has no keys, and this request is signed: start the scheduler with "
            "--keys scheduler.toml, or run the command without --keys and without "
            f"${KEYS_VARIABLE}."
        )
    return f"the request {error}."


def _check_time(sent: str, now: float, request: str, message_signer: MessageSigner) -> None:
    """Reject a request from long ago or from the future, because it may be replayed.

    Raises:
        InvalidRequest: its time is out of range.
    """
    if not _SENT.fullmatch(sent):
        raise InvalidRequest("the request lacks its time.", "unreadable", request, message_signer)
    at = int(sent) / 1000
    behind = now - at
    if -redis_keys.CLOCK_TOLERANCE_S <= behind <= redis_keys.REQUEST_TTL_S:
        return
    is_late = behind > 0
    most = redis_keys.REQUEST_TTL_S if is_late else redis_keys.CLOCK_TOLERANCE_S
    raise InvalidRequest(
        f"the request was sent at {_clock(at)} by its sender's clock, and the scheduler's clock"
        f" says {_clock(now)}: that is {abs(behind):.0f} s {'behind' if is_late else 'ahead'}, and"
        f" {most} s is the limit. Set the clock of one machine (with NTP).",
        "expired" if is_late else "early",
        request,
        message_signer,
    )


def _clock(at: float) -> str:
    try:
        found = dt.datetime.fromtimestamp(at, tz=dt.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f} s after 1970"
    return f"{found:%Y-%m-%d %H:%M:%S} UTC"


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"")[:200].decode(errors="replace")


def _shown(fields: dict[bytes, bytes], name: bytes) -> str:
    """Return a field as text without characters that control a terminal."""
    return "".join(one if one.isprintable() else "?" for one in _text(fields, name)) or "unknown"
