"""`FarmClient`: asks a farm's scheduler, through Redis, and waits for the answer."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import re
import time
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import msgspec

from tunemq_scheduler.executors.redis_line import Command, RedisLine
from tunemq_shared import wire
from tunemq_shared.answers import Answer, FarmAnnouncement, Refusal, Reply
from tunemq_shared.errors import (
    ConfigError,
    NoScheduler,
    RequestRefused,
    WireError,
    WireUnavailable,
)
from tunemq_shared.requests import MAX_REQUEST_BYTES, REQUESTS_VERSION, Request

_A = TypeVar("_A", bound=Answer)
_E = TypeVar("_E", bound=msgspec.Struct)

#: How long an answer may take to come.
TIMEOUT_S: Final = 40.0
#: A scheduler that lives is seen within this time, even if Redis has just been wiped.
_SEEN_WITHIN_S: Final = 2.5
#: One that has ended is waited for so long, since it may be started again just now.
_BACK_WITHIN_S: Final = 5.0
#: A request is sent again so often: Redis may have been wiped, or the scheduler started again.
_AGAIN_S: Final = 2.0
#: Between two looks for an answer: the first pause, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_RETRY_S: Final = 0.2
#: Requests that nobody took are thrown away beyond this number.
_MOST_REQUESTS: Final = 10_000
_UNSAFE: Final = re.compile(r"[^\w.@+=-]+")


class _Envelope(msgspec.Struct):
    """The part of a `Reply` that every version has."""

    version: int
    tunemq: str


class _Announced(msgspec.Struct):
    """Likewise of a `FarmAnnouncement`."""

    term: int


class FarmClient:
    """Somebody who uses a farm.

    Args:
        url: where the farm's Redis is.
        owner: in whose name; by default the name of who is logged in.
        timeout_s: how long an answer may take.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, url: str, *, owner: str = "", timeout_s: float = TIMEOUT_S) -> None:
        try:
            self._line = RedisLine(url)
        except ValueError as error:
            raise ConfigError(
                f"the address of Redis cannot be used: {error} Give it like"
                " redis://:password@host:6379/0."
            ) from error
        self.owner = owner or login_name()
        self._timeout_s = timeout_s
        self._tunemq = importlib.metadata.version("tunemq")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def farm(self) -> FarmAnnouncement:
        """What there is to know of the farm.

        Raises:
            NoScheduler: it has none.
            WireUnavailable: Redis cannot be reached.
            RequestRefused: another version of TuneMQ runs there; says which.
        """
        found = self._find_scheduler()
        self._check_version(_decoded(found, _Envelope, is_json=True))
        return _decoded(found, FarmAnnouncement, is_json=True)

    def ask(self, request: Request, answer: type[_A]) -> _A:
        """Ask, and wait for the answer.

        Args:
            answer: the kind of answer that there is to this kind of request.

        Raises:
            ConfigError: what was asked for is of no use; says why.
            RequestRefused: it is not possible now.
            NoScheduler: the farm has none, or it does not answer; nothing was done, unless the
                message says that it may have been.
            WireUnavailable: Redis cannot be reached.
        """
        self._find_scheduler()
        asked = _Asked(request, self.owner, self._tunemq)
        try:
            data = self._answer_to(asked)
        except KeyboardInterrupt:
            with suppress(WireError):
                self._withdraw(asked)
            raise
        self._check_version(_decoded(data, _Envelope))
        reply = _decoded(data, Reply)
        if reply.refusal is not None:
            raise _refused(reply.refusal)
        return _decoded(bytes(reply.answer), answer)

    # --- the two ways -----------------------------------------------------------------------------

    def _answer_to(self, asked: _Asked) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        again, pause = 0.0, _FIRST_PAUSE_S
        trouble: WireUnavailable | None = None
        seen = time.monotonic()
        while (now := time.monotonic()) < deadline:
            try:
                if now >= again:
                    (entry,) = self._ask([asked.command])
                    asked.entries.append(entry)
                    again = now + _AGAIN_S
                found, lease = self._ask([("GET", asked.key), ("GET", wire.SCHEDULER)])
                trouble = None
                seen = seen if lease is None else now
            except WireUnavailable as error:
                trouble, found, seen = error, None, now
                time.sleep(_RETRY_S)
            if found is not None:
                self._line.post([("DEL", asked.key)])  # a page of a log is large
                return bytes(found)
            if now > seen + _BACK_WITHIN_S:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if trouble is not None:
            raise trouble
        at = f"the scheduler of the farm at {self._line.address}"
        what = "has ended" if now < deadline else f"did not answer within {self._timeout_s:g} s"
        if self._withdraw(asked):
            raise NoScheduler(f"{at} {what}; the request was withdrawn, nothing was done.")
        raise NoScheduler(
            f"{at} has taken the request, and {what}; it may have been done: look with `tunemq ls`."
        )

    def _withdraw(self, asked: _Asked) -> bool:
        """Take the request back; whether nobody had begun it, so that it is never done."""
        if not asked.entries:
            return True
        (removed,) = self._ask([("XDEL", wire.REQUESTS, *asked.entries)])
        return bool(removed == len(asked.entries))

    def _find_scheduler(self) -> bytes:
        """What the farm's scheduler announces.

        Raises:
            NoScheduler: it has none, or one that runs a script's search and takes no requests.
            WireUnavailable: Redis cannot be reached.
        """
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while True:
            lease, found = self._ask([("GET", wire.SCHEDULER), ("GET", wire.FARM)])
            if lease is not None and found is not None and _term_in(found) == _term_of(lease):
                return bytes(found)
            if time.monotonic() > deadline:
                break
            time.sleep(_RETRY_S)
        at = f"the farm at {self._line.address}"
        if lease is None:
            raise NoScheduler(
                f"no scheduler runs on {at}. Start one on the farm's head: tunemq scheduler"
                " --redis URL"
            )
        raise NoScheduler(
            f"the scheduler of {at} runs a script's search and takes no requests. When that is"
            " over, start one without a script: tunemq scheduler --redis URL"
        )

    def _ask(self, commands: list[Command]) -> list[Any]:
        self._line.connect()
        return self._line.ask(commands)

    def _check_version(self, found: _Envelope) -> None:
        if found.version != REQUESTS_VERSION:
            raise RequestRefused(
                f"this farm's scheduler (TuneMQ {found.tunemq}) speaks version {found.version} of"
                f" requests, and this is TuneMQ {self._tunemq} with version {REQUESTS_VERSION}; use"
                " the same TuneMQ on both sides."
            )


class _Asked:
    """A request on its way: its entry for the stream, and what is known of it there."""

    def __init__(self, request: Request, owner: str, tunemq: str) -> None:
        identity = os.urandom(16).hex()
        body = msgspec.msgpack.encode(request)
        if len(body) > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"this request has {len(body)} bytes, and {MAX_REQUEST_BYTES} are the most; shorten"
                " its environment variables and names."
            )
        self.key = wire.answer(identity)
        #: Where it stands in the stream, each time that it was sent.
        self.entries: list[bytes] = []
        fields: dict[str, str | bytes] = {
            "v": str(REQUESTS_VERSION),
            "tunemq": tunemq,
            "id": identity,
            "owner": owner,
            "kind": str(type(request).__struct_config__.tag),
            "body": body,
        }
        limit = ("MAXLEN", "~", str(_MOST_REQUESTS))
        flat = [part for field in fields.items() for part in field]
        self.command: Command = ("XADD", wire.REQUESTS, *limit, "*", *flat)


def login_name() -> str:
    """Who is logged in, as the owner of what is asked for."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # nobody of that number is known, as in many containers
        name = f"uid-{os.getuid()}"
    return _UNSAFE.sub("_", name)[:64] or f"uid-{os.getuid()}"


def _decoded(data: bytes, kind: type[_E], *, is_json: bool = False) -> _E:
    try:
        if is_json:
            return msgspec.json.decode(data, type=kind)
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestRefused(f"what the farm's scheduler says cannot be read: {error}.") from error


def _term_of(lease: bytes) -> int:
    """The term in a scheduler's lease, which begins with it; 0 in what is no lease."""
    term = lease.partition(b":")[0]
    return int(term) if term.isdigit() else 0


def _term_in(announced: bytes) -> int:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(announced, type=_Announced).term
    return -1


def _refused(refusal: Refusal) -> ConfigError | RequestRefused:
    return ConfigError(refusal.text) if refusal.is_wrong_use else RequestRefused(refusal.text)
