"""`DeferredAnswer`: an answer to a request that an experiment's process must give first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from tunemq_scheduler.api.farm_answer_types import RequestRejection
from tunemq_scheduler.farm.ipc import ipc_messages
from tunemq_scheduler.farm.ipc.supervisor_side import ExperimentConnection, ExperimentReply

T = TypeVar("T")
U = TypeVar("U")


class DeferredAnswer(Generic[T]):
    """An answer that comes later; its holder calls `resolve` or `reject` once."""

    def __init__(self) -> None:
        self.outcome: T | RequestRejection | None = None
        self._listeners: list[Callable[[T | RequestRejection], None]] = []

    def resolve(self, answer: T) -> None:
        """Set the answer."""
        self._settle(answer)

    def reject(self, text: str, *, is_wrong_use: bool = False) -> None:
        """Set the reason why there is no answer."""
        self._settle(RequestRejection(text=text, is_wrong_use=is_wrong_use))

    def then(self, change: Callable[[T], U]) -> DeferredAnswer[U]:
        """Return a deferred answer with the result of ``change``."""
        changed: DeferredAnswer[U] = DeferredAnswer()

        def settle(outcome: T | RequestRejection) -> None:
            if isinstance(outcome, RequestRejection):
                changed.reject(outcome.text, is_wrong_use=outcome.is_wrong_use)
            else:
                changed.resolve(change(outcome))

        if self.outcome is not None:
            settle(self.outcome)
        else:
            self._listeners.append(settle)
        return changed

    def _settle(self, outcome: T | RequestRejection) -> None:
        if self.outcome is not None:
            return  # the process answered after a timeout
        self.outcome = outcome
        for listener in self._listeners:
            listener(outcome)


#: An answer that is there, or one that comes later.
MaybeLater: TypeAlias = T | DeferredAnswer[T]


def ask_process(
    connection: ExperimentConnection,
    request: ipc_messages.SearchRequest,
    at_its_end: Callable[[], Any] | None = None,
) -> DeferredAnswer[Any]:
    """Send a request to an experiment's process; return its answer.

    Args:
        connection: to the process.
        request: the request.
        at_its_end: returns the answer if the process ends first; None if there is none.
    """
    deferred: DeferredAnswer[Any] = DeferredAnswer()

    def take(reply: ExperimentReply) -> None:
        kept = (
            at_its_end() if at_its_end is not None and connection.process_exit is not None else None
        )
        if kept is not None:
            deferred.resolve(kept)
        elif isinstance(reply, RequestRejection):
            deferred.reject(reply.text, is_wrong_use=reply.is_wrong_use)
        else:
            deferred.resolve(reply)

    connection.ask(request, take)
    return deferred
