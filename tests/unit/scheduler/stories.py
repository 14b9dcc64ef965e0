"""A runner, and all that it was told."""

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
    """A runner, and all that it was told, so that it can be replayed."""

    def __init__(self, *, cpus: float = 2.0, **settings: Any) -> None:
        self.settings = RunnerSettings(**settings)
        self.runner = TrialRunner(self.settings)
        self.entries: list[m.JournalRecord] = []
        self.join(NODE, cpus)

    def tell(self, event: m.Event, *answers: m.AlgorithmAnswer) -> list[c.Command]:
        self.entries.append(m.JournalRecord(event, answers))
        return self.runner.handle(event, answers)

    def join(self, incarnation: str, cpus: float = 2.0) -> None:
        self.tell(m.NodeJoined(incarnation, "node", "host", "127.0.0.1", {"cpu": cpus}))

    def lose(self, incarnation: str = NODE, *, is_dead: bool = False) -> list[c.Command]:
        return self.tell(m.NodeLost(incarnation, "its lease ran out", is_dead))

    def hear_again(self, incarnation: str = NODE) -> list[c.Command]:
        return self.tell(m.NodeReturned(incarnation))

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
        epoch: int = 1,
        done: bool = False,
        **metrics: Any,
    ) -> list[c.Command]:
        return self.tell(result(trial, step, epoch=epoch, done=done, **metrics), *answers)

    def die(self, trial: str, epoch: int = 1) -> list[c.Command]:
        return self.tell(m.TrialProcessDied(trial, epoch, 1, 9, None, 0.0))

    def finish(self, trial: str, epoch: int = 1) -> list[c.Command]:
        return self.tell(m.TrialFinished(trial, epoch))

    def fail(self, trial: str, epoch: int = 1) -> list[c.Command]:
        return self.tell(m.TrialFailed(trial, epoch, "storage", "StoreError: full", "", 0.0))

    def write(self, trial: str, step: int, epoch: int = 1) -> list[c.Command]:
        key = f"{trial}/{epoch}-{step}"
        return self.tell(m.CheckpointWritten(trial, epoch, step, step, key, "disk", 10))

    def commit(
        self, trial: str, step: int, *shared: str, epoch: int = 1, size: int = 10
    ) -> list[c.Command]:
        key = f"{trial}/{epoch}-{step}"
        fields = (trial, epoch, step, step, key, "hash", size)
        return self.tell(m.CheckpointCommitted(*fields, shared))

    def give_up(self, trial: str, step: int, epoch: int = 1) -> list[c.Command]:
        key = f"{trial}/{epoch}-{step}"
        return self.tell(m.CheckpointLost(trial, epoch, key, "the store is away", 0.0))

    def pause(self, trial: str, step: int, epoch: int = 1) -> list[c.Command]:
        """Report a result about which PAUSE is decided."""
        return self.report(
            trial, step, m.DecisionMade(trial, step, m.PAUSE, "others first"), epoch=epoch
        )

    def paused(self, trial: str, epoch: int = 1) -> list[c.Command]:
        return self.tell(m.TrialPaused(trial, epoch))

    def free(self, trial: str, epoch: int = 1) -> list[c.Command]:
        return self.tell(m.SlotFreed(trial, epoch))


def result(
    trial: str, step: int, *, epoch: int = 1, done: bool = False, **metrics: Any
) -> m.ResultReported:
    seconds = float(step)
    return m.ResultReported(
        trial, epoch, step, metrics, 0.0, 1.0, seconds, seconds, step, done=done
    )


def kinds(commands: Sequence[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]
