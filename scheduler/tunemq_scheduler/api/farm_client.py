"""`FarmClient`: sends requests to a farm's scheduler through Redis and waits for the answers."""

from __future__ import annotations

import importlib.metadata
import os
import time
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import msgspec

from tunemq_scheduler.api.farm_answer_types import (
    FarmAnswer,
    FarmDescription,
    FarmReply,
    RequestRejection,
)
from tunemq_scheduler.api.login_name import login_name
from tunemq_scheduler.api.request_signing import close_request, open_answer
from tunemq_scheduler.transport.redis.redis_connection import (
    RedisCommand,
    RedisConnection,
    RedisRefusesWrites,
)
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import (
    ConfigError,
    NoScheduler,
    RedisUnavailable,
    RequestRejected,
    TransportError,
)
from tunemq_shared.broker import redis_keys
from tunemq_shared.code.farm_secrets import own_secrets
from tunemq_shared.protocol.farm_requests import (
    MAX_REQUEST_BYTES,
    REQUESTS_VERSION,
    DescribeFarm,
    FarmRequest,
)
from tunemq_shared.signing.key_files import KEYS_VARIABLE, OPERATOR
from tunemq_shared.signing.live_keys import KeyRole, find_keys
from tunemq_shared.signing.message_signing import InvalidSignature, MessageSigner

_A = TypeVar("_A", bound=FarmAnswer)
_E = TypeVar("_E", bound=msgspec.Struct)

#: Default time limit for an answer.
TIMEOUT_S: Final = 40.0
#: A running scheduler announces itself within this time, even if Redis has just been wiped.
_SEEN_WITHIN_S: Final = 2.5
#: How long to wait for an ended scheduler, since it may be restarting.
_BACK_WITHIN_S: Final = 5.0
#: Time between two sends of a request: Redis may have been wiped, or the scheduler restarted.
_AGAIN_S: Final = 2.0
#: How long to wait for a valid answer after one with an invalid signature.
_MENDED_WITHIN_S: Final = 3.0
#: The first and the longest pause between two reads of an answer.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_RETRY_S: Final = 0.2
#: The most digits of a term, which is roughly the Unix time.
_TERM_DIGITS: Final = 18
#: The most requests in the stream; Redis drops older ones.
_MOST_REQUESTS: Final = 10_000


class _Envelope(msgspec.Struct):
    """The fields of a `FarmReply` that every version has."""

    version: int
    tunemq: str


class _Announced(msgspec.Struct):
    """The fields of a `FarmAnnouncement` that every version has."""

    term: int


class FarmClient:
    """A client of a farm's scheduler.

    Args:
        url: the URL of the farm's Redis.
        owner: the owner in whose name to ask. Default: the owner in the key file; of a file with
            several owners the login name, else `OPERATOR`; without a file the login name.
        timeout_s: seconds that an answer may take.
        keys: the path of the owner's key file. Default: `TUNEMQ_KEYS`; without it, requests are not
            signed.

    Raises:
        ConfigError: the URL or the key file cannot be used.
    """

    def __init__(
        self, url: str, *, owner: str = "", timeout_s: float = TIMEOUT_S, keys: str | None = None
    ) -> None:
        self._keys = find_keys(keys, KeyRole.SUBMITTER)
        self._is_named = bool(owner)
        self.owner = owner or self._own_name()
        self._check_owner()
        try:
            self._connection = RedisConnection(url)
        except ValueError as error:
            raise ConfigError(
                f"the address of Redis is invalid: {error} Write it like "
                "redis://:password@host:6379/0."
            ) from error
        self._timeout_s = timeout_s
        self._tunemq = importlib.metadata.version("tunemq")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def farm(self) -> FarmDescription:
        """Return the farm's description.

        Raises:
            TuneError: see `ask`.
        """
        return self.ask(DescribeFarm(), FarmDescription)

    def secrets(self, store: str) -> frozenset[bytes]:
        """Return the passwords and keys that this process uses, with this store of the farm."""
        password = self._connection.address.password
        return own_secrets(os.environ, password=password, keys=self._keys.path, store=store)

    def ask(self, request: FarmRequest, answer: type[_A]) -> _A:
        """Send a request and wait for the answer.

        Args:
            request: the request.
            answer: the type of the answer to this type of request.

        Returns:
            The answer.

        Raises:
            ConfigError: the request is invalid; the message says why.
            RequestRejected: the request is impossible now, the scheduler has another version of
                TuneMQ, or the answer is not signed with the farm's keys.
            NoScheduler: the farm has no scheduler, or it does not answer. The request was not
                executed, unless the message says that it may have been.
            RedisUnavailable: Redis cannot be reached, or rejects writes.
        """
        self._check_version(_decoded(self._find_scheduler(), _Envelope, is_json=True))
        if self._keys.look():
            self._check_owner()  # the key file has other owners now
        asked = _SentRequest(request, self.owner, self._tunemq, self._keys.submitter(self.owner))
        try:
            data = self._answer_to(asked)
        except KeyboardInterrupt:
            with suppress(TransportError):
                self._withdraw(asked)
            raise
        self._check_version(_decoded(data, _Envelope))
        reply = _decoded(data, FarmReply)
        if reply.rejection is not None:
            raise _rejected(reply.rejection)
        return _decoded(bytes(reply.answer), answer)

    # --- sending and receiving --------------------------------------------------------------------

    def _answer_to(self, asked: _SentRequest) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        again, pause = 0.0, _FIRST_PAUSE_S
        trouble: RedisUnavailable | None = None  # the newest one
        broken: InvalidSignature | None = None
        seen = time.monotonic()
        while (now := time.monotonic()) < deadline:
            try:
                if now >= again:
                    (entry,) = self._ask([asked.command()])
                    asked.entries.append(entry)
                    again = now + _AGAIN_S
                found, lease = self._ask([("GET", asked.key), ("GET", redis_keys.SCHEDULER)])
                trouble = None
                seen = seen if lease is None else now
            except RedisUnavailable as error:
                trouble, found, seen = error, None, now
                time.sleep(_RETRY_S)
            except RedisRefusesWrites as error:
                trouble, found, seen = RedisUnavailable(str(error)), None, now
                if not asked.entries:
                    break
                time.sleep(_RETRY_S)
            if found is not None:
                opened = self._opened(asked, bytes(found))
                if isinstance(opened, bytes):
                    return opened
                deadline = deadline if broken else min(deadline, now + _MENDED_WITHIN_S)
                broken = opened
            if now > seen + _BACK_WITHIN_S:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if trouble is not None:
            raise trouble
        if broken is not None:
            raise self._distrusted(broken) from broken
        raise self._unanswered(asked, has_ended=now < deadline)

    def _opened(self, asked: _SentRequest, found: bytes) -> bytes | InvalidSignature:
        """Return the content of an answer; the error if the farm's scheduler did not sign it."""
        try:
            data = open_answer(asked.message_signer, found, asked.id)
        except InvalidSignature as error:
            return error
        self._connection.post([("DEL", asked.key)])  # a page of a log is large
        return data

    def _unanswered(self, asked: _SentRequest, *, has_ended: bool) -> NoScheduler:
        """Withdraw the request if possible; return an error that says whether it may run."""
        at = f"the scheduler of the farm at {self._connection.address}"
        what = "has ended" if has_ended else f"did not answer within {self._timeout_s:g} s"
        if self._withdraw(asked):
            return NoScheduler(f"{at} {what}; the request was withdrawn, so nothing changed.")
        return NoScheduler(
            f"{at} received the request, and {what}; the request may have been executed: run "
            "`tunemq ls`."
        )

    def _withdraw(self, asked: _SentRequest) -> bool:
        """Withdraw the request; return whether the scheduler had not begun it and never will."""
        if not asked.entries:
            return True
        (removed,) = self._ask([("XDEL", redis_keys.REQUESTS, *asked.entries)])
        return bool(removed == len(asked.entries))

    def _find_scheduler(self) -> bytes:
        """Return the announcement of the farm's scheduler.

        Raises:
            NoScheduler: the farm has none.
            RedisUnavailable: Redis cannot be reached, or rejects writes.
        """
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while True:
            lease, found = self._ask([("GET", redis_keys.SCHEDULER), ("GET", redis_keys.FARM)])
            if lease is not None and found is not None and _term_in(found) == _term_of(lease):
                return bytes(found)
            if time.monotonic() > deadline:
                break
            time.sleep(_RETRY_S)
        self._try_to_write()
        raise NoScheduler(
            f"no scheduler runs on the farm at {self._connection.address}. Start one on the "
            "head: tunemq scheduler --redis URL"
        )

    def _try_to_write(self) -> None:
        """Return if Redis accepts a request; if it does not, no scheduler can renew its lease.

        Raises:
            RedisUnavailable: it does not; the message says why.
        """
        asked = _SentRequest(
            DescribeFarm(), self.owner, self._tunemq, self._keys.submitter(self.owner)
        )
        try:
            asked.entries += self._ask([asked.command()])
            self._withdraw(asked)
        except RedisRefusesWrites as error:
            raise RedisUnavailable(str(error)) from error

    def _own_name(self) -> str:
        name, known = login_name(), self._keys.submitters
        if len(known) == 1:
            return known[0]
        return OPERATOR if name not in known and OPERATOR in known else name

    def _check_owner(self) -> None:
        known = self._keys.submitters
        if not self._keys.is_signed or self.owner in known:
            return
        text = (
            f"the key file {self._keys.path} has no keys of {self.owner!r}, but of"
            f" {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}"
        )
        if self._is_named or len(known) == 1:
            raise ConfigError(
                f"{text}: use the key file of one of these; to make keys for another owner, "
                "run: tunemq keys add FOLDER NAME"
            )
        raise ConfigError(
            f"{text}. To run commands with the scheduler's key file, make keys for its operator and"
            f" copy scheduler.toml again: tunemq keys add FOLDER {OPERATOR}"
        )

    def _distrusted(self, broken: InvalidSignature) -> RequestRejected:
        """Return the error for an answer with an invalid signature, without that answer's text."""
        if not self._keys.is_signed:
            return RequestRejected(
                f"the answer {broken}: this farm has keys. Ask its administrator for yours "
                f"(tunemq keys add FOLDER {self.owner}), and pass the file with "
                f"${KEYS_VARIABLE}."
            )
        return RequestRejected(
            f"the scheduler at {self._connection.address} lacks the keys of {self.owner} in "
            f"{self._keys.path}: the answer {broken}. The scheduler may run without keys or "
            "with other keys; its log says which: start it with --keys scheduler.toml, and "
            "copy the files again if the keys changed. If the scheduler has these keys, "
            "another program answers in its place. The request may have been executed: run "
            "`tunemq ls`."
        )

    def _ask(self, commands: list[RedisCommand]) -> list[Any]:
        self._connection.connect()
        return self._connection.ask(commands)

    def _check_version(self, found: _Envelope) -> None:
        if found.version != REQUESTS_VERSION:
            raise RequestRejected(
                f"this farm's scheduler (TuneMQ {found.tunemq}) speaks version {found.version} of"
                f" requests, and this is TuneMQ {self._tunemq} with version {REQUESTS_VERSION}; use"
                " the same TuneMQ on both sides."
            )


class _SentRequest:
    """A request in transit: its stream entry and the IDs under which it was sent."""

    def __init__(
        self, request: FarmRequest, owner: str, tunemq: str, message_signer: MessageSigner
    ) -> None:
        self.id, self.message_signer = os.urandom(16).hex(), message_signer
        self._body = msgspec.msgpack.encode(request)
        if len(self._body) > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"this request has {len(self._body)} bytes, and {MAX_REQUEST_BYTES} is the "
                "most; shorten its environment variables and names."
            )
        self._owner, self._tunemq = owner, tunemq
        self._kind = str(type(request).__struct_config__.tag)
        self.key = redis_keys.answer(self.id)
        #: Its entry ID for each time it was sent.
        self.entries: list[bytes] = []

    def command(self) -> RedisCommand:
        """Return the Redis command that sends the request now."""
        sent = str(int(time.time() * 1000))
        fields: dict[str, str | bytes] = {
            "v": str(REQUESTS_VERSION),
            "tunemq": self._tunemq,
            "id": self.id,
            "owner": self._owner,
            "kind": self._kind,
            "sent": sent,
            "body": close_request(
                self.message_signer, self._body, request=self.id, kind=self._kind, sent=sent
            ),
        }
        limit = ("MAXLEN", "~", str(_MOST_REQUESTS))
        flat = [part for field in fields.items() for part in field]
        return ("XADD", redis_keys.REQUESTS, *limit, "*", *flat)


def _decoded(data: bytes, kind: type[_E], *, is_json: bool = False) -> _E:
    try:
        if is_json:
            return msgspec.json.decode(data, type=kind)
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise RequestRejected(
            f"the answer of the farm's scheduler cannot be read: {error}."
        ) from error


def _term_of(lease: bytes) -> int:
    """Return the term at the beginning of a scheduler's lease; 0 if the bytes are not a lease."""
    term = lease.partition(b":")[0]
    return int(term) if term.isdigit() and len(term) <= _TERM_DIGITS else 0


def _term_in(announced: bytes) -> int:
    with suppress(*UNDECODABLE):
        return msgspec.json.decode(announced, type=_Announced).term
    return -1


def _rejected(rejection: RequestRejection) -> ConfigError | RequestRejected:
    return (
        ConfigError(rejection.text) if rejection.is_wrong_use else RequestRejected(rejection.text)
    )
