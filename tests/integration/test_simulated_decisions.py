"""`simulate` decides what a real search decides whose results arrive in the same order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.journal_records import read_records
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of
from tunemq.schedulers import (
    ASHAScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from tunemq.testing import simulate
from tunemq_scheduler.embedded.command_lines import default_cpus
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_shared.protocol import messages as m

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration

#: (trial, step, decision, reason)
Decisions = list[tuple[int, int, str, str]]


def curve(config: dict[str, Any], step: int) -> dict[str, Any]:
    noise = random.Random(f"{config['x']} {step}").random()
    return {"loss": config["x"] + 1 / step + noise / 4}


class Follows(tune.Trainable):
    """Reports the curve of its configuration, from the step of its checkpoint."""

    def setup(self, config: dict[str, Any]) -> None:
        self.done = 0

    def step(self) -> dict[str, Any]:
        self.done += 1
        return curve(self.config, self.done)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "done").write_text(json.dumps(self.done))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.done = json.loads(Path(checkpoint_dir, "done").read_text())


SCHEDULERS: dict[str, TrialScheduler] = {
    "asha": ASHAScheduler(max_t=9, reduction_factor=3),
    "hyperband": HyperBandScheduler(max_t=9, reduction_factor=3),
    "pbt": PopulationBasedTraining(
        "training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"x": tune.uniform(0, 1)},
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_simulate_and_a_real_search_on_one_worker_decide_the_same(
    name: str, ended_searches: Any
) -> None:
    options: dict[str, Any] = {
        "metric": "loss",
        "mode": "min",
        "num_samples": 12,
        "stop": {"training_iteration": 9},
        "seed": 5,
    }
    space = {"x": tune.uniform(0, 1)}
    one_at_a_time = tune.with_resources(Follows, {"cpu": default_cpus()})

    grid = fit(one_at_a_time, space, scheduler=SCHEDULERS[name], **options)
    found = simulate(SCHEDULERS[name], None, curve, param_space=space, workers=1, **options)

    (ended,) = ended_searches
    real, names = _decisions(Path(ended.experiment.folder, FILE_NAME))
    simulated = [(one.trial, one.step, one.action, one.reason) for one in found.decisions]
    assert simulated == [(*one[:3], _renamed(one[3], names)) for one in real]
    assert len(simulated) > 8
    assert [trial.config for trial in found.trials] == [result.config for result in grid]
    for trial, result in zip(found.trials, grid, strict=True):
        losses = [one.metrics["loss"] for one in found.results if one.trial == trial.number]
        assert losses == [row["loss"] for row in results_of(result)]


def _decisions(journal: Path) -> tuple[Decisions, dict[str, int]]:
    """Read the decisions of a journal, and the number of each trial."""
    decisions: Decisions = []
    numbers: dict[str, int] = {}
    steps: dict[str, int] = {}
    for record in read_records(journal):
        event = record.event
        match event:
            case m.ConfigSuggested():
                numbers[event.trial] = event.n
            case m.ResultReported():
                steps[event.trial] = event.step
            case m.ActionTaken():
                step = steps.get(event.trial, 0)
                decisions.append((numbers[event.trial], step, event.action, event.reason))
        for answer in record.answers:
            if isinstance(answer, m.DecisionMade):
                found = (numbers[answer.trial], answer.step, answer.decision, answer.reason)
                decisions.append(found)
    return decisions, numbers


def _renamed(reason: str, numbers: dict[str, int]) -> str:
    """Replace the ids of real trials by those of simulated ones."""
    for trial, number in numbers.items():
        reason = reason.replace(trial, f"trial_{number:05d}")
    return reason
