"""`RequestHandler`: what a farm's scheduler does about each kind of request.

A method returns its answer, or a `DeferredAnswer` where somebody else has to be asked first. What
it raises is told to whoever asked: a `UserError` as wrong use, any other `TuneError` as a refusal.

A request is handed over once. Only where the scheduler died between a change and the record of it
comes the same one again: so a change that was made is to be no error, and what a submission has
queued is known by `RequestCaller.request`.
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
    """Who asks, which he has proved if the farm has keys; and what his request is known by."""

    owner: str
    request: str


class DeferredAnswer(Generic[T]):
    """An answer that comes later: whoever has it calls `resolve` or `reject`, once."""

    def __init__(self) -> None:
        self.outcome: T | RequestRejection | None = None
        self._listeners: list[Callable[[T | RequestRejection], None]] = []

    def resolve(self, answer: T) -> None:
        """This is the answer."""
        self._settle(answer)

    def reject(self, text: str, *, is_wrong_use: bool = False) -> None:
        """There is none, for this reason."""
        self._settle(RequestRejection(text=text, is_wrong_use=is_wrong_use))

    def then(self, change: Callable[[T], U]) -> DeferredAnswer[U]:
        """What ``change`` makes of the answer."""
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
            return  # who was asked answers although nobody waits any more
        self.outcome = outcome
        for listener in self._listeners:
            listener(outcome)


class RequestHandler(Protocol):
    """Answers requests; each method is called in the thread of the scheduler's loop."""

    def submit(
        self, request: r.SubmitExperiment, caller: RequestCaller
    ) -> a.ExperimentSubmitted | DeferredAnswer[a.ExperimentSubmitted]:
        """Queue an experiment."""

    def list_experiments(
        self, request: r.ListExperiments, caller: RequestCaller
    ) -> a.ExperimentList | DeferredAnswer[a.ExperimentList]:
        """Which experiments are there?"""

    def show(
        self, request: r.ShowExperiment, caller: RequestCaller
    ) -> a.ExperimentDetail | DeferredAnswer[a.ExperimentDetail]:
        """How is an experiment?"""

    def read_log(
        self, request: r.ReadLog, caller: RequestCaller
    ) -> a.LogPage | DeferredAnswer[a.LogPage]:
        """A page of a log."""

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
        """Go on with an experiment."""

    def retry(
        self, request: r.RetryTrials, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Run trials in ERROR again."""

    def remove(
        self, request: r.RemoveExperiment, caller: RequestCaller
    ) -> a.RequestDone | DeferredAnswer[a.RequestDone]:
        """Forget an experiment."""

    def why(
        self, request: r.ExplainState, caller: RequestCaller
    ) -> a.Explanation | DeferredAnswer[a.Explanation]:
        """Why is it as it is?"""

    def describe_farm(
        self, request: r.DescribeFarm, caller: RequestCaller
    ) -> a.FarmDescription | DeferredAnswer[a.FarmDescription]:
        """What does a submitter have to know?"""

    def list_nodes(
        self, request: r.ListNodes, caller: RequestCaller
    ) -> a.NodeList | DeferredAnswer[a.NodeList]:
        """Which nodes are there?"""

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
