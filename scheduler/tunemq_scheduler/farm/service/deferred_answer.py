"""`DeferredAnswer`: an answer to a request that an experiment's process must give first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from tunemq_scheduler.api.farm_answers import RequestRejection

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
