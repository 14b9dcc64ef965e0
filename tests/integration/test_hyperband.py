"""HyperBand on real trial processes, which it pauses, resumes and stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of
from tunemq.schedulers import HyperBandScheduler

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration

#: The trials of a band's three brackets for ``max_t=9``, and where successive halving leaves those
#: of each bracket whose slopes grow with their numbers.
BRACKETS = {3: [9, 9, 9], 5: [3, 3, 3, 9, 9], 9: [1, 1, 1, 1, 1, 1, 3, 3, 9]}
ENDS = [end for ends in BRACKETS.values() for end in ends]


def sums(config: dict[str, Any]) -> None:
    """Report the sum of all steps, which a trial knows only from its checkpoints."""
    done, total = 0, 0.0
    if (checkpoint := tune.get_checkpoint()) is not None:
        state = checkpoint.to_dict()
        done, total = state["done"], state["total"]
    for step in range(done + 1, 100):
        total += step * config["slope"]
        kept = tune.Checkpoint.from_dict({"done": step, "total": total})
        tune.report({"score": total}, checkpoint=kept)


class Sums(tune.Trainable):
    """The same as a class, which saves when it is paused."""

    def setup(self, config: dict[str, Any]) -> None:
        self.done, self.total, self.slope = 0, 0.0, config["slope"]

    def step(self) -> dict[str, Any]:
        self.done += 1
        self.total += self.done * self.slope
        return {"score": self.total}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "state").write_text(json.dumps([self.done, self.total]))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.done, self.total = json.loads(Path(checkpoint_dir, "state").read_text())


@pytest.mark.parametrize("trainable", [sums, Sums])
def test_hyperband_pauses_and_continues_trials_and_leaves_the_best(trainable, ended_searches):
    results = fit(
        trainable,
        {"slope": tune.grid_search([float(number) for number in range(1, len(ENDS) + 1)])},
        metric="score",
        mode="max",
        scheduler=HyperBandScheduler(max_t=9, reduction_factor=3),
    )

    assert results.num_errors == 0
    assert [result.metrics["training_iteration"] for result in results] == ENDS
    for result in results:
        rows = results_of(result)
        last = len(rows)
        assert [row["training_iteration"] for row in rows] == [*range(1, last + 1)]
        slope = result.config["slope"]
        assert [row["score"] for row in rows] == [
            slope * step * (step + 1) / 2 for step in range(1, last + 1)
        ]
    assert results.get_best_result().config["slope"] == len(ENDS)
    assert ended_searches[0].make_algorithms is None or ended_searches[0].loop.runner.is_finished


def test_hyperband_with_a_limit_on_unfinished_trials_ends():
    """A bracket of nine can never be full: it continues when nothing else can run."""
    results = fit(
        sums,
        {"slope": tune.grid_search([float(number) for number in range(1, len(ENDS) + 1)])},
        metric="score",
        mode="max",
        scheduler="hyperband",
        max_concurrent_trials=3,
        stop={"training_iteration": 9},
    )

    assert results.num_errors == 0
    assert {result.status for result in results} == {"TERMINATED"}
