"""`RequestServer`: takes users' requests from Redis, runs each once, and answers."""

from __future__ import annotations

import importlib.metadata
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_scheduler.api.farm_answer_types import (
    FarmAnswer,
    FarmReply,
    RequestDone,
    RequestRejection,
)
from tunemq_scheduler.api.request_signing import close_answer
from tunemq_scheduler.farm.service.deferred_answer import DeferredAnswer
from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_scheduler.farm.service.farm_api import FarmApi, RequestCaller
from tunemq_scheduler.farm.service.request_entry import (
    InvalidRequest,
    ReceivedRequest,
    decode_entry,
)
from tunemq_scheduler.farm.service.request_stream import RequestStream
from tunemq_scheduler.transport.redis.redis_connection import RedisFull
from tunemq_shared.base.errors import (
    JournalError,
    JournalFull,
    RedisUnavailable,
    TransportError,
    TuneError,
    UserError,
)
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.base.message_encoding import encode
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.system.standard_streams import tell

#: How long an experiment's process has to answer.
_TIMEOUT_S: Final = 30.0
#: The interval of attempts to reach a Redis that is away.
_RETRY_S: Final = 0.5
#: The most answers to keep while Redis is full; other clients repeat their requests.
_MOST_UNSENT: Final = 256

_Outcome = FarmAnswer | RequestRejection
#: Receives a rejected request: the kind of message, the reason in a word, and a text for people,
#: which is empty for a repeated request.
OnRejected = Callable[[str, str, str], None]


class _Pending(NamedTuple):
    """A request that waits for the answer of an experiment's process."""

    asked: ReceivedRequest
    deferred: DeferredAnswer[Any]
    is_change: bool
    until: float


class RequestServer:
    """Answers the requests of a farm's users.

    Args:
        url: the Redis address.
        api: runs the requests.
        done: completed requests, including those of earlier schedulers.
        term: returns the term of this scheduler.
        keys: the keys of the users.
        rejected: receives each request that is not from an authorised user or cannot be decoded.
    """

    def __init__(
        self,
        url: str,
        api: FarmApi,
        done: DoneRequests,
        term: Callable[[], int],
        keys: LiveKeys,
        rejected: OnRejected = lambda _kind, _reason, _text: None,
    ) -> None:
        self._stream = RequestStream(url, rejected)
        self._methods = api.methods
        self._done, self._term = done, term
        self._keys, self._rejected = keys, rejected
        self._pending: dict[str, _Pending] = {}
        #: Request ids and their encoded answers, by request key.
        self._unsent: dict[str, tuple[str, bytes]] = {}
        self._not_before = 0.0
        self._has_told = False
        self._tunemq = importlib.metadata.version("tunemq")

    def fileno(self) -> int | None:
        """Return the socket that is readable when there is work; None while Redis is away."""
        return self._stream.fileno()

    def turn(self) -> int:
        """Run the requests since the last turn, without waiting; return their number.

        Raises:
            RedisUnavailable: Redis cannot be reached or rejects commands; the next turns try again.
            SchedulerSuperseded: there is a scheduler with a greater term.
            JournalError: a completed request cannot be recorded.
        """
        if time.monotonic() < self._not_before:
            return 0
        try:
            entries = self._stream.take(self._term())
            for fields in entries:
                self._take(fields)
            self._settle()
            self._send()
        except TransportError as problem:
            self._stream.close()
            self._not_before = time.monotonic() + _RETRY_S
            if isinstance(problem, RedisUnavailable):
                raise
            self._tell(problem)
            raise RedisUnavailable(str(problem)) from problem
        if entries:
            self._has_told = False
        return len(entries)

    def save(self) -> None:
        """Write completed requests for which the disk had no space; called about once a second.

        Raises:
            JournalFull: it still has none.
            JournalError: the disk rejects the write.
        """
        self._done.save()

    def close(self) -> None:
        """Close the connections; waiting clients repeat their requests to the next scheduler."""
        self._stream.close()

    def _tell(self, problem: TransportError) -> None:
        """Report once what Redis rejects: only an operator can fix it."""
        if not self._has_told:
            self._has_told = True
            tell(f"tunemq scheduler: requests wait: {problem}")

    # --- one request ------------------------------------------------------------------------------

    def _take(self, fields: dict[bytes, bytes]) -> None:
        try:
            asked = decode_entry(fields, self._keys, self._tunemq, time.time())
        except InvalidRequest as problem:
            self._reject(problem)
            return
        if asked.key in self._pending:
            self._rejected("request", "repeated", "")
            return
        if (reply := self._done.get(asked.key)) is not None:
            self._rejected("request", "repeated", "")
            self._put(asked, reply)
            return
        failpoint("requests.after_taken")
        outcome = self._do(asked)
        is_change = isinstance(asked.request, r.ChangeRequest)
        if isinstance(outcome, DeferredAnswer):
            until = time.monotonic() + _TIMEOUT_S
            self._pending[asked.key] = _Pending(asked, outcome, is_change, until)
        else:
            self._answer(asked, outcome, is_change=is_change)

    def _reject(self, problem: InvalidRequest) -> None:
        self._rejected("request", problem.reason, f"A request was refused: {problem}")
        if not problem.request:
            return
        reply, request = self._reply(RequestRejection(text=str(problem))), problem.request
        # The client's version can decode what all versions have in common, but no signature.
        signed_message = (
            reply
            if problem.message_signer is None
            else close_answer(problem.message_signer, reply, request)
        )
        self._unsent[request] = (request, signed_message)

    def _do(self, asked: ReceivedRequest) -> _Outcome | DeferredAnswer[Any]:
        try:
            outcome: _Outcome | DeferredAnswer[Any] = self._methods[type(asked.request)](
                asked.request, RequestCaller(asked.owner, asked.key)
            )
        except UserError as problem:
            return RequestRejection(text=str(problem), is_wrong_use=True)
        except JournalFull as full:
            return RequestRejection(text=f"nothing was changed: {full}")
        except JournalError:
            raise  # the farm's own disk failed: no request can be done
        except TuneError as problem:
            return RequestRejection(text=str(problem))
        except Exception as error:  # noqa: BLE001  recorded here: one bad request must not end all searches
            return _failed(error)
        return outcome

    def _settle(self) -> None:
        """Send answers that have arrived, or report a timeout."""
        now = time.monotonic()
        for key, pending in list(self._pending.items()):
            outcome: _Outcome | None = pending.deferred.outcome
            if outcome is None and now > pending.until:
                outcome = RequestRejection(
                    text=(
                        "the experiment's process does not answer; its code may be busy. Try "
                        "again later."
                    )
                )
            if outcome is not None:
                del self._pending[key]
                self._answer(pending.asked, outcome, is_change=pending.is_change)

    def _answer(self, asked: ReceivedRequest, outcome: _Outcome, *, is_change: bool) -> None:
        reply = self._reply(outcome)
        if is_change:
            failpoint("requests.after_done")
            self._done.add(asked.key, reply)
        failpoint("requests.after_record")
        self._put(asked, reply)

    def _put(self, asked: ReceivedRequest, reply: bytes) -> None:
        self._unsent[asked.key] = (asked.id, close_answer(asked.message_signer, reply, asked.id))

    def _reply(self, outcome: _Outcome) -> bytes:
        # It may quote what the sender or its search wrote, and thousands are kept.
        if isinstance(outcome, RequestDone | RequestRejection):
            outcome = msgspec.structs.replace(
                outcome, text=shortened(outcome.text, LINE_CHARACTERS)
            )
        try:
            if not isinstance(outcome, RequestRejection):
                answer = msgspec.Raw(encode(outcome))
                return encode(FarmReply(tunemq=self._tunemq, answer=answer))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            outcome = _failed(error)
        return encode(FarmReply(tunemq=self._tunemq, rejection=outcome))

    def _send(self) -> None:
        if not self._unsent:
            return
        ttl = str(redis_keys.ANSWER_TTL_S)
        try:
            self._stream.send(
                [
                    ("SET", redis_keys.answer(one), data, "EX", ttl)
                    for one, data in self._unsent.values()
                ]
            )
        except RedisFull:
            while len(self._unsent) > _MOST_UNSENT:
                del self._unsent[next(iter(self._unsent))]
            return
        self._unsent.clear()


def _failed(error: Exception) -> RequestRejection:
    """Log a defect in full; return the text for the client."""
    tell("".join(traceback.format_exception(error)))
    return RequestRejection(
        text=(
            f"the scheduler failed to execute it ({type(error).__name__}: {error}); its log has "
            "details. Please report it."
        )
    )
