"""A BOHB search that continues where it was killed: ``bohb_search.py FOLDER OPTIONS``.

OPTIONS is a JSON dict of ``trials``, ``step_s`` and ``seed``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tunemq as tune
from tunemq.schedulers import HyperBandForBOHB
from tunemq.search.bohb import TuneBOHB

MAX_T = 9
SPACE = {
    "x": tune.uniform(0, 1),
    "kind": tune.choice([{"name": "deep", "y": tune.uniform(0, 1)}, {"name": "flat"}]),
}


def curve(config: dict[str, Any], step: int) -> dict[str, Any]:
    return {"loss": abs(config["x"] - 0.3) + config["kind"].get("y", 0.5) + 1 / step}


def make_scheduler() -> HyperBandForBOHB:
    return HyperBandForBOHB(max_t=MAX_T, reduction_factor=3)


class Follows(tune.Trainable):
    """Reports the curve of its configuration, from the step of its checkpoint."""

    def setup(self, config: dict[str, Any]) -> None:
        self.done = 0

    def step(self) -> dict[str, Any]:
        time.sleep(OPTIONS["step_s"])
        self.done += 1
        return curve(self.config, self.done)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "done").write_text(json.dumps(self.done), encoding="ascii")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.done = json.loads(Path(checkpoint_dir, "done").read_text(encoding="ascii"))


def main() -> None:
    saved = FOLDER / "search"
    if tune.Tuner.can_restore(saved):
        tuner = tune.Tuner.restore(str(saved), Follows)
    else:
        tuner = tune.Tuner(
            Follows,
            param_space=SPACE,
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                search_alg=TuneBOHB(),
                scheduler=make_scheduler(),
                num_samples=OPTIONS["trials"],
                seed=OPTIONS["seed"],
            ),
            run_config=tune.RunConfig(
                name="search",
                storage_path=str(FOLDER),
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            ),
        )
    tuner.fit()


if __name__ == "__main__":
    FOLDER, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
    main()
