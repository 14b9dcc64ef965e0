"""`SlotSearch`: a scripted search on some slots, for trial schedulers that pause and resume."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tunemq_scheduler.schedulers import TrialScheduler, read_answer


class SlotSearch:
    """A search on some slots: its trials follow the scheduler's answers, as in the loop.

    Args:
        slots: the number of trials that may run at once.
        make: creates the trial scheduler.
    """

    def __init__(self, slots: int, make: Callable[[], TrialScheduler]) -> None:
        self.make = make
        self.scheduler = self.new_scheduler()
        self.slots = slots
        self.trials: list[Any] = []
        self.reasons: dict[str, str] = {}

    def new_scheduler(self) -> TrialScheduler:
        scheduler = self.make()
        scheduler.set_search_properties(None, None, seed=0)
        return scheduler

    def call(self, method: str, *args: Any, about: Any = None) -> str:
        told = getattr(self.scheduler, method)(self, *args)
        decision, actions = read_answer(
            self.scheduler, method, told, about.trial_id if about else ""
        )
        if about is not None and decision != "CONTINUE":
            self._apply(about, decision, decision.reason)
        for action in actions:
            (trial,) = [one for one in self.trials if one.trial_id == action.trial_id]
            self._apply(trial, action.word, action.reason)
        return str(decision)

    def _apply(self, trial: Any, word: str, reason: str) -> None:
        trial.status = {"STOP": "TERMINATED", "PAUSE": "PAUSED", "RESUME": "PENDING"}[word]
        self.reasons[trial.trial_id] = reason

    def waiting(self) -> list[Any]:
        return [one for one in self.trials if one.status in ("PENDING", "PAUSED")]

    def running(self) -> list[Any]:
        return [one for one in self.trials if one.status == "RUNNING"]

    def fill(self, most: int) -> None:
        """Fill the free slots with waiting trials, else with new ones."""
        while len(self.running()) < self.slots:
            chosen = self.scheduler.choose_trial_to_run(self)
            if chosen is None:
                if len(self.trials) >= most:
                    return
                chosen = self.add()
            chosen.status = "RUNNING"

    def add(self) -> Any:
        number = len(self.trials)
        trial = SimpleNamespace(
            trial_id=f"t{number}", number=number, status="PENDING", last_result={}
        )
        self.trials.append(trial)
        self.call("on_trial_add", trial)
        return trial

    def report(self, trial: Any, time: float, score: Any) -> str:
        trial.status = "RUNNING"
        trial.last_result = {"training_iteration": time, "score": score}
        return self.call("on_trial_result", trial, trial.last_result, about=trial)

    def statuses(self) -> str:
        letters = {"PAUSED": "p", "PENDING": "P", "RUNNING": "R", "TERMINATED": "T"}
        return "".join(letters[one.status] for one in self.trials)
