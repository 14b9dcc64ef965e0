"""A runner and all events that it received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m

NODE = "node.1"
TO_THE_END = m.HorizonSet("a", ())


class Story:
    """A runner and all events that it received, for replay."""

    def __init__(self, *, cpus: float = 2.0, **settings: Any) -> None:
        self.settings = RunnerSettings(**settings)
        self.runner = TrialRunner(self.settings)
        self.journal_records: list[m.JournalRecord] = []
        self.join(NODE, cpus)

    def tell(self, event: m.Event, *answers: m.AlgorithmAnswer) -> list[c.Command]:
        self.journal_records.append(m.JournalRecord(event, answers))
        return self.runner.handle(event, answers)

    def join(self, instance_id: str, cpus: float = 2.0) -> None:
        self.tell(m.NodeJoined(instance_id, "node", "host", "127.0.0.1", {"cpu": cpus}))

    def lose(self, instance_id: str = NODE, *, is_dead: bool = False) -> list[c.Command]:
        return self.tell(m.NodeLost(instance_id, "its lease ran out", is_dead))

    def hear_again(self, instance_id: str = NODE) -> list[c.Command]:
        return self.tell(m.NodeReturned(instance_id))

    def add(self, trial: str, *answers: m.AlgorithmAnswer, cpus: float = 1.0) -> list[c.Command]:
        n = self.runner.suggested
        return self.tell(m.ConfigSuggested(n, trial, b"", "", {"cpu": cpus}), *answers)

    def start(self, trial: str, *answers: m.AlgorithmAnswer) -> c.StartTrial:
        self.add(trial, *answers)
        return self.choose(trial)

    def choose(self, trial: str) -> c.StartTrial:
        (order,) = self.tell(m.TrialChosen(trial))
        assert isinstance(order, c.StartTrial)
        return order

    def report(
        self,
        trial: str,
        step: int,
        *answers: m.AlgorithmAnswer,
        attempt: int = 1,
        done: bool = False,
        **metrics: Any,
    ) -> list[c.Command]:
        return self.tell(result(trial, step, attempt=attempt, done=done, **metrics), *answers)

    def die(self, trial: str, attempt: int = 1) -> list[c.Command]:
        return self.tell(m.TrialProcessDied(trial, attempt, 1, 9, None, 0.0))

    def finish(self, trial: str, attempt: int = 1) -> list[c.Command]:
        return self.tell(m.TrialFinished(trial, attempt))

    def fail(self, trial: str, attempt: int = 1) -> list[c.Command]:
        return self.tell(m.TrialFailed(trial, attempt, "storage", "StoreError: full", "", 0.0))

    def write(self, trial: str, step: int, attempt: int = 1) -> list[c.Command]:
        key = f"{trial}/{attempt}-{step}"
        return self.tell(m.CheckpointWritten(trial, attempt, step, step, key, "disk", 10))

    def commit(
        self, trial: str, step: int, *shared: str, attempt: int = 1, size: int = 10
    ) -> list[c.Command]:
        key = f"{trial}/{attempt}-{step}"
        fields = (trial, attempt, step, step, key, "hash", size)
        return self.tell(m.CheckpointCommitted(*fields, shared))

    def give_up(self, trial: str, step: int, attempt: int = 1) -> list[c.Command]:
        key = f"{trial}/{attempt}-{step}"
        return self.tell(m.CheckpointLost(trial, attempt, key, "the store is away", 0.0))

    def pause(self, trial: str, step: int, attempt: int = 1) -> list[c.Command]:
        """Report a result for which the scheduler decides PAUSE."""
        return self.report(
            trial, step, m.DecisionMade(trial, step, m.PAUSE, "others first"), attempt=attempt
        )

    def paused(self, trial: str, attempt: int = 1) -> list[c.Command]:
        return self.tell(m.TrialPaused(trial, attempt))

    def free(self, trial: str, attempt: int = 1) -> list[c.Command]:
        return self.tell(m.SlotFreed(trial, attempt))


def result(
    trial: str,
    step: int,
    *,
    attempt: int = 1,
    done: bool = False,
    is_saved: bool = False,
    **metrics: Any,
) -> m.ResultReported:
    seconds = float(step)
    fields = (trial, attempt, step, metrics, 0.0, 1.0, seconds, seconds, step)
    return m.ResultReported(*fields, done=done, is_saved=is_saved)


def kinds(commands: Sequence[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]
