"""`RequestServer`: takes users' requests from Redis, has each done once, and answers."""

from __future__ import annotations

import importlib.metadata
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_scheduler.api.farm_answers import FarmAnswer, FarmReply, RequestRejection
from tunemq_scheduler.api.request_signing import close_answer
from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_scheduler.farm.service.request_entry import (
    InvalidRequest,
    ReceivedRequest,
    decode_entry,
)
from tunemq_scheduler.farm.service.request_handler import (
    DeferredAnswer,
    RequestCaller,
    RequestHandler,
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
from tunemq_shared.base.message_encoding import encode
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.system.standard_streams import tell

#: Who is asked about a request has so long to answer.
_TIMEOUT_S: Final = 30.0
#: Redis is looked for so often while it is away.
_RETRY_S: Final = 0.5
#: Answers that Redis has no room for; who asked asks again.
_MOST_UNSENT: Final = 256

_Outcome = FarmAnswer | RequestRejection
#: Told of a request that is refused: the kind of message, the reason in a word, and for people;
#: also of one that was done before, of which there is nothing to tell.
OnRejected = Callable[[str, str, str], None]


class _Pending(NamedTuple):
    """A request that somebody was asked about."""

    asked: ReceivedRequest
    deferred: DeferredAnswer[Any]
    is_change: bool
    until: float


class RequestServer:
    """Answers the requests of a farm's users.

    Args:
        url: where Redis is.
        handler: does them.
        done: those that were done by schedulers before, too.
        term: of this scheduler.
        keys: of those who may ask.
        refused: is told of each request that is of nobody who may ask, or cannot be read.
    """

    def __init__(
        self,
        url: str,
        handler: RequestHandler,
        done: DoneRequests,
        term: Callable[[], int],
        keys: LiveKeys,
        rejected: OnRejected = lambda _kind, _reason, _text: None,
    ) -> None:
        self._stream = RequestStream(url, rejected)
        self._handlers = _methods(handler)
        self._done, self._term = done, term
        self._keys, self._rejected = keys, rejected
        self._pending: dict[str, _Pending] = {}
        #: Ids of requests, and their answers as they travel, by what the requests are known by.
        self._unsent: dict[str, tuple[str, bytes]] = {}
        self._not_before = 0.0
        self._has_told = False
        self._tunemq = importlib.metadata.version("tunemq")

    def fileno(self) -> int | None:
        """The socket that is readable when there is something to do; None while Redis is away."""
        return self._stream.fileno()

    def turn(self) -> int:
        """Do what was asked for since the last turn; waits for nobody. How many it were.

        Raises:
            WireUnavailable: Redis cannot be reached, or refuses; the next turns try again.
            SchedulerSuperseded: there is a scheduler with a greater term.
            JournalError: what was done cannot be remembered.
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
        self._has_told = False
        return len(entries)

    def save(self) -> None:
        """About once a second: write what was done that the disk had no room for.

        Raises:
            JournalFull: it still has none.
            JournalError: it refuses it.
        """
        self._done.save()

    def close(self) -> None:
        """Close the connections; who waits for an answer asks the next scheduler."""
        self._stream.close()

    def _tell(self, problem: TransportError) -> None:
        """Say once what Redis refuses: an operator has to mend it, and nothing else may say so."""
        if not self._has_told:
            self._has_told = True
            tell(f"tunemq scheduler: requests wait: {harmless(str(problem))}")

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
        # Its own version reads what is common to all versions, and finds no seal before it.
        signed_message = (
            reply
            if problem.message_signer is None
            else close_answer(problem.message_signer, reply, request)
        )
        self._unsent[request] = (request, signed_message)

    def _do(self, asked: ReceivedRequest) -> _Outcome | DeferredAnswer[Any]:
        try:
            outcome: _Outcome | DeferredAnswer[Any] = self._handlers[type(asked.request)](
                asked.request, RequestCaller(asked.owner, asked.key)
            )
        except UserError as problem:
            return RequestRejection(text=str(problem), is_wrong_use=True)
        except JournalFull as full:
            return RequestRejection(text=f"nothing was changed: {full}")
        except JournalError:
            raise  # the farm's own disk: nobody's request can be done
        except TuneError as problem:
            return RequestRejection(text=str(problem))
        except Exception as error:  # noqa: BLE001  ours, recorded here: one bad request must not end all searches
            return _failed(error)
        return outcome

    def _settle(self) -> None:
        """Answer requests whose answers have come, or are overdue."""
        now = time.monotonic()
        for key, pending in list(self._pending.items()):
            outcome: _Outcome | None = pending.deferred.outcome
            if outcome is None and now > pending.until:
                outcome = RequestRejection(
                    text="the experiment's own process does not answer; its code may be busy. Try"
                    " again later."
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
        try:
            if not isinstance(outcome, RequestRejection):
                answer = msgspec.Raw(encode(outcome))
                return encode(FarmReply(tunemq=self._tunemq, answer=answer))
        except (TypeError, ValueError, OverflowError) as error:
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
    """What whoever asked is told of a mistake of ours, which the log tells in full."""
    tell("".join(traceback.format_exception(error)))
    return RequestRejection(
        text=f"the scheduler failed to do it ({type(error).__name__}: {error}); its log has more."
        " Please report it."
    )


def _methods(
    handler: RequestHandler,
) -> dict[type[r.FarmRequest], Callable[[Any, RequestCaller], Any]]:
    return {
        r.SubmitExperiment: handler.submit,
        r.ListExperiments: handler.list_experiments,
        r.ShowExperiment: handler.show,
        r.ReadLog: handler.read_log,
        r.StopExperiment: handler.stop,
        r.PauseExperiment: handler.pause,
        r.ResumeExperiment: handler.resume,
        r.RetryTrials: handler.retry,
        r.RemoveExperiment: handler.remove,
        r.ExplainState: handler.why,
        r.DescribeFarm: handler.describe_farm,
        r.ListNodes: handler.list_nodes,
        r.DrainNode: handler.drain,
        r.ResumeNode: handler.resume_node,
        r.RetireNode: handler.retire,
    }
