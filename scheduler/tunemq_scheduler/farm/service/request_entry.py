"""What an entry of the stream of requests says, checked: anybody whom Redis lets in can append."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final, NamedTuple, get_args

import msgspec

from tunemq_scheduler.api.request_signing import open_request
from tunemq_shared.base.undecodable import UNDECODABLE
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.signing.key_files import KEYS_VARIABLE, SUBMITTER_NAME
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.signing.message_signing import HEAD_BYTES, InvalidSignature, MessageSigner

_ID: Final = re.compile(rb"[0-9a-f]{32}")
_SENT: Final = re.compile(r"[0-9]{1,15}")
#: Each kind of request by its name on the wire.
KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(r.AnyRequest)}

#: How somebody is answered who has proved nothing.
UNSIGNED: Final = MessageSigner("")


class ReceivedRequest(NamedTuple):
    """A request, by whom, its id, and how it is answered."""

    id: str
    owner: str
    request: r.AnyRequest
    message_signer: MessageSigner

    @property
    def key(self) -> str:
        """What it is known by: an id is seen by others, who may send requests with it, too."""
        return f"{self.id} {self.owner}"


class InvalidRequest(Exception):
    """An entry that is no request of somebody who may ask, or of no kind that is known here.

    Attributes:
        reason: in a word, for counting.
        request: its id; empty where it has none, so that nobody can be told.
        seal: how that is told; None for another version of requests, whose seals may be others.
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
    """The request in an entry.

    Args:
        keys: of those who may ask; where there are none, everybody may, in any name.
        tunemq: the version of this TuneMQ.
        now: the time here; Unix time in seconds.

    Raises:
        Unanswerable: it cannot be read, or nobody who may ask asks this now; says why.
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
            f"the owner {owner!r} cannot be used: give letters, digits and .@+=-, 64 at most.",
            "unreadable",
            request,
        )
    size = len(signed_message) - (HEAD_BYTES if keys.is_signed else 1)
    if size > r.MAX_REQUEST_BYTES:
        raise InvalidRequest(
            f"the request has more than {r.MAX_REQUEST_BYTES} bytes, which are the most.",
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
    """Why a request is nobody's, and what its sender can do."""
    if error.reason in {"unsigned", "unknown_submitter"}:
        known = "" if error.reason == "unsigned" else f", and has no keys of {owner!r}"
        return (
            f"this farm takes signed requests only{known}: have who runs it make keys for you"
            f" (tunemq keys add FOLDER {owner}), and name the file {owner}.toml by --keys or"
            f" ${KEYS_VARIABLE}."
        )
    if error.reason == "signed_without_keys":
        return (
            "this farm has no keys, and this request is signed: start the scheduler with --keys"
            f" scheduler.toml, or ask without --keys and without ${KEYS_VARIABLE}."
        )
    return f"the request {error}."


def _check_time(sent: str, now: float, request: str, message_signer: MessageSigner) -> None:
    """Refuse what was sent long ago, or is yet to be: somebody may have kept it.

    Raises:
        Unanswerable: it is.
    """
    if not _SENT.fullmatch(sent):
        raise InvalidRequest(
            "the request does not say when it was sent.", "unreadable", request, message_signer
        )
    at = int(sent) / 1000
    behind = now - at
    if -redis_keys.CLOCK_TOLERANCE_S <= behind <= redis_keys.REQUEST_TTL_S:
        return
    is_late = behind > 0
    most = redis_keys.REQUEST_TTL_S if is_late else redis_keys.CLOCK_TOLERANCE_S
    raise InvalidRequest(
        f"the request was sent at {_clock(at)} by the clock of who sent it, and the scheduler's"
        f" says {_clock(now)}: that is {abs(behind):.0f} s {'behind' if is_late else 'ahead'}, and"
        f" {most} s are the most. Set the clock of the one machine or the other (with NTP).",
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
    """The same for people: nothing that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in _text(fields, name)) or "unknown"
