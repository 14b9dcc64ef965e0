"""`RequestHandler`: the interface for answering each kind of request.

A method returns its answer, or a `DeferredAnswer` if an experiment's process must answer first. The
server sends exceptions to the client: a `UserError` as wrong use, any other `TuneError` as a
rejection.

A request is handled once. It is handled again only if the scheduler died between a change and the
record of it. So repeating a change must not be an error, and `RequestCaller.request` identifies
what a submission has queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from tunemq_scheduler.api import farm_answers as a
from tunemq_scheduler.api.farm_answers import RequestRejection
from tunemq_shared.protocol import farm_requests as r

T = TypeVar("T")
U = TypeVar("U")


class RequestCaller(NamedTuple):
    """The sender of a request, proved if the farm has keys, and the request's unique key."""

    owner: str
    request: str


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


class RequestHandler(Protocol):
    """Answers requests; the thread of the scheduler's loop calls each method."""

    def submit(
        self, request: r.SubmitExperiment, caller: RequestCaller
    ) -> a.ExperimentSubmitted | DeferredAnswer[a.ExperimentSubmitted]:
        """Queue an experiment."""

    def list_experiments(
        self, request: r.ListExperiments, caller: RequestCaller
    ) -> a.ExperimentList | DeferredAnswer[a.ExperimentList]:
        """List experiments."""

    def show(
        self, request: r.ShowExperiment, caller: RequestCaller
    ) -> a.ExperimentDetail | DeferredAnswer[a.ExperimentDetail]:
        """Show an experiment."""

    def read_log(
        self, request: r.ReadLog, caller: RequestCaller
    ) -> a.LogPage | DeferredAnswer[a.LogPage]:
        """Return a page of a log."""

    def stop(
        self, request: r.StopExperiment, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Stop an experiment or a trial."""

    def pause(
        self, request: r.PauseExperiment, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Pause an experiment."""

    def resume(
        self, request: r.ResumeExperiment, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Resume an experiment."""

    def retry(
        self, request: r.RetryTrials, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Continue trials in state ERROR."""

    def remove(
        self, request: r.RemoveExperiment, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Forget an experiment."""

    def why(
        self, request: r.ExplainState, caller: RequestCaller
    ) -> a.Explanation | DeferredAnswer[a.Explanation]:
        """Explain the state of an experiment or a trial."""

    def describe_farm(
        self, request: r.DescribeFarm, caller: RequestCaller
    ) -> a.FarmDescription | DeferredAnswer[a.FarmDescription]:
        """Describe the farm for a submitter."""

    def list_nodes(
        self, request: r.ListNodes, caller: RequestCaller
    ) -> a.NodeList | DeferredAnswer[a.NodeList]:
        """List nodes."""

    def drain(
        self, request: r.DrainNode, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Drain a node."""

    def resume_node(
        self, request: r.ResumeNode, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Use a node again."""

    def retire(
        self, request: r.RetireNode, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Drain a node and end it."""
