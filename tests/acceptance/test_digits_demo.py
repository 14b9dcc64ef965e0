"""The demo chooses well, chooses the same again, and leaves its folder complete."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

#: It computes for half a minute on a machine that does nothing else.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
RUNGS = (3, 9, 27)


class Demo(NamedTuple):
    printed: str
    folder: Path

    @property
    def chosen(self) -> str:
        """The printed best configuration and its quality."""
        return self.printed[self.printed.index("Best of") : self.printed.index("This trial")]

    @property
    def trials(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("*/params.json"))


def run_demo(results: Path) -> Demo:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TUNEMQ_RESULTS": str(results)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"^Everything +(.+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return Demo(done.stdout, Path(found[1]))


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    return run_demo(tmp_path_factory.mktemp("first"))


def test_the_chosen_configuration_is_right_about_at_least_96_of_100_unseen_images(demo):
    accuracy = re.search(r"^Test accuracy +([\d.]+)", demo.printed, re.MULTILINE)

    assert accuracy
    assert float(accuracy[1]) >= 0.96


def test_each_of_the_24_trials_leaves_its_files(demo):
    assert len(demo.trials) == 24
    for trial in demo.trials:
        left = {path.name for path in trial.iterdir()}
        assert {"params.json", "result.json", "progress.csv"} <= left
        results = [json.loads(line) for line in (trial / "result.json").read_text().splitlines()]
        assert [result["training_iteration"] for result in results] == list(
            range(1, len(results) + 1)
        )
        assert len(results) in RUNGS


@pytest.mark.soak
def test_a_second_run_chooses_the_same_configuration(demo, tmp_path):
    assert run_demo(tmp_path).chosen == demo.chosen


@pytest.mark.soak
def test_in_no_order_of_arrival_would_asha_stop_the_chosen_configuration(demo):
    """ASHA stops the trials that are worse at a rung; the best one is never worse."""
    digits = runpy.run_path(str(SCRIPT))
    images = digits["split_digits"]()
    (x_train, y_train), (x_valid, y_valid) = images["train"], images["valid"]
    losses = []
    for trial in demo.trials:
        config = json.loads((trial / "params.json").read_text())
        sampler, model = digits["features"](config), digits["new_model"](config)
        train, valid = sampler.transform(x_train), sampler.transform(x_valid)
        curve = {}
        for number in range(1, RUNGS[-1] + 1):
            digits["one_pass"](model, number, train, y_train)
            curve[number] = digits["measure"](model, valid, y_valid)["loss"]
        losses.append([curve[rung] for rung in RUNGS])
    best = min(losses, key=lambda at_rungs: at_rungs[-1])
    others = [at_rungs for at_rungs in losses if at_rungs is not best]

    # The margin is far above arithmetic differences between machines. ASHA compares a trial that it
    # stopped early by its last loss, so no rung's loss may be below the best trial's final one
    # either.
    for place in range(len(RUNGS)):
        assert best[place] < 0.9 * min(at_rungs[place] for at_rungs in others)
    assert best[-1] < 0.9 * min(min(at_rungs) for at_rungs in others)
