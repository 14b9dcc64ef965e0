"""`RequestHandler`: what a farm's scheduler does about each kind of request.

A method returns its answer, or a `Deferred` where somebody else has to be asked first. What it
raises is told to whoever asked: a `UserError` as wrong use, any other `TuneError` as a refusal.

A request is handed over once. Only where the scheduler died between a change and the record of it
comes the same one again: so a change that was made is to be no error, and what a submission has
queued is known by `Caller.request`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from tunemq_scheduler.api import farm_answers as a
from tunemq_scheduler.api.farm_answers import Refusal
from tunemq_shared.protocol import farm_requests as r

T = TypeVar("T")
U = TypeVar("U")


class Caller(NamedTuple):
    """Who asks, which he has proved if the farm has keys; and what his request is known by."""

    owner: str
    request: str


class Deferred(Generic[T]):
    """An answer that comes later: whoever has it calls `resolve` or `refuse`, once."""

    def __init__(self) -> None:
        self.outcome: T | Refusal | None = None
        self._listeners: list[Callable[[T | Refusal], None]] = []

    def resolve(self, answer: T) -> None:
        """This is the answer."""
        self._settle(answer)

    def refuse(self, text: str, *, is_wrong_use: bool = False) -> None:
        """There is none, for this reason."""
        self._settle(Refusal(text=text, is_wrong_use=is_wrong_use))

    def then(self, change: Callable[[T], U]) -> Deferred[U]:
        """What ``change`` makes of the answer."""
        changed: Deferred[U] = Deferred()

        def settle(outcome: T | Refusal) -> None:
            if isinstance(outcome, Refusal):
                changed.refuse(outcome.text, is_wrong_use=outcome.is_wrong_use)
            else:
                changed.resolve(change(outcome))

        if self.outcome is not None:
            settle(self.outcome)
        else:
            self._listeners.append(settle)
        return changed

    def _settle(self, outcome: T | Refusal) -> None:
        if self.outcome is not None:
            return  # who was asked answers although nobody waits any more
        self.outcome = outcome
        for listener in self._listeners:
            listener(outcome)


class RequestHandler(Protocol):
    """Answers requests; each method is called in the thread of the scheduler's loop."""

    def submit(self, request: r.Submit, caller: Caller) -> a.Submitted | Deferred[a.Submitted]:
        """Queue an experiment."""

    def list_experiments(
        self, request: r.ListExperiments, caller: Caller
    ) -> a.ExperimentList | Deferred[a.ExperimentList]:
        """Which experiments are there?"""

    def show(
        self, request: r.ShowExperiment, caller: Caller
    ) -> a.ExperimentDetail | Deferred[a.ExperimentDetail]:
        """How is an experiment?"""

    def read_log(self, request: r.ReadLog, caller: Caller) -> a.LogPage | Deferred[a.LogPage]:
        """A page of a log."""

    def stop(self, request: r.Stop, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Stop an experiment or a trial."""

    def pause(self, request: r.Pause, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Pause an experiment."""

    def resume(self, request: r.Resume, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Go on with an experiment."""

    def retry(self, request: r.Retry, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Run trials in ERROR again."""

    def remove(self, request: r.Remove, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Forget an experiment."""

    def why(self, request: r.AskWhy, caller: Caller) -> a.Why | Deferred[a.Why]:
        """Why is it as it is?"""

    def describe_farm(
        self, request: r.DescribeFarm, caller: Caller
    ) -> a.FarmDescription | Deferred[a.FarmDescription]:
        """What does a submitter have to know?"""

    def list_nodes(self, request: r.ListNodes, caller: Caller) -> a.NodeList | Deferred[a.NodeList]:
        """Which nodes are there?"""

    def drain(self, request: r.Drain, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Drain a node."""

    def resume_node(self, request: r.ResumeNode, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Use a node again."""

    def retire(self, request: r.Retire, caller: Caller) -> a.Done | Deferred[a.Done]:
        """Drain a node and end it."""
