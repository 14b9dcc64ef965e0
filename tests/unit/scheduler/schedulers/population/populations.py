"""A population of trials, and the runner that a scheduler sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tunemq_scheduler.schedulers import (
    Exploit,
    PopulationBasedTraining,
    SchedulerDecision,
    read_answer,
)

VALUES = [1, 2, 4, 8]


class Population:
    """Trials, and the runner that the scheduler sees."""

    def __init__(self, scheduler: PopulationBasedTraining, size: int, seed: int = 7) -> None:
        scheduler.set_search_properties("score", "max", seed=seed)
        self.scheduler, self.may_add = scheduler, False
        self.trials = {
            f"t{number}": SimpleNamespace(
                trial_id=f"t{number}",
                number=number,
                config={"lr": 0.1 * (number + 1), "width": VALUES[number % 4]},
                status="RUNNING",
                last_result={},
            )
            for number in range(size)
        }
        for trial in self.trials.values():
            scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[Any]:
        return list(self.trials.values())

    def get_trial(self, name: str) -> Any:
        return self.trials.get(name)

    def has_waiting(self) -> bool:
        return self.may_add or any(one.status != "RUNNING" for one in self.trials.values())

    def expects_trials(self) -> bool:
        return self.may_add

    def waiting(self) -> list[Any]:
        return [one for one in self.trials.values() if one.status != "RUNNING"]

    def report(self, name: str, step: int, score: Any) -> tuple[SchedulerDecision, list[Any]]:
        trial = self.trials[name]
        trial.last_result = {"training_iteration": step, "score": score}
        answer = self.scheduler.on_trial_result(self, trial, trial.last_result)
        decision, actions = read_answer(self.scheduler, "on_trial_result", answer, name)
        for action in actions:
            if isinstance(action, Exploit):
                self.trials[action.trial_id].config = action.config
        return decision, actions
