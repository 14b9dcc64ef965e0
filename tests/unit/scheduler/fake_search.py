"""A fake search for tests of displays."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.unit.scheduler.fake_trials import FakeTrial
from tunemq_scheduler.results.trial_failures import FailureLog, TrialFailure


class FakeSearch:
    """Has the attributes of a `SearchView`, which a test may change."""

    def __init__(self, trials: int = 3) -> None:
        self.name = "train_mnist"
        self.path = "/results/train_mnist"
        self.store = ""
        self.elapsed_s = 0.0
        self.trials = [FakeTrial(n, self.path, lr=0.1 * n) for n in range(trials)]
        self.num_trials: int | None = trials
        self.resources_used = {"cpu": 1.0}
        self.resources_total = {"cpu": 2.0, "gpu": 0.0, "memory": 1e9}
        self.metric: str | None = "loss"
        self.mode: str | None = "min"
        self.best: tuple[str, float, dict[str, Any]] | None = None
        self.notes: list[str] = []
        self.outcome = "finished"
        self.log = FailureLog()

    @property
    def live(self) -> list[FakeTrial]:
        return [trial for trial in self.trials if trial.status not in {"ERROR", "TERMINATED"}]

    @property
    def counts(self) -> Counter[str]:
        return Counter(trial.status for trial in self.trials)

    @property
    def failures(self) -> list[Any]:
        return self.log.groups()


def failure(trial: FakeTrial, **changes: Any) -> TrialFailure:
    """Return a failure of a trial's own code."""
    told = {
        "kind": "user",
        "error": "ValueError: too small",
        "hostname": "node-a",
        "file": f"{trial.local_path}/error.txt",
        **changes,
    }
    return TrialFailure(trial=trial.trial_name, **told)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
