"""Let a population find a schedule of the learning rate, and compare it with fixed configurations.

    python examples/pbt_digits.py --seeds 10 --plot schedule.svg

Each of 8 trials trains the classifier of `digits.py` for 40 passes. First with the configuration
that it was given; then as a population: every 4 passes one of the worst quarter continues from the
state of one of the best, with a configuration near that one's. Both begin with the same 8
configurations. A small learning rate is slow in the beginning, and a large one is inexact in the
end: no fixed one is as good as one that falls.

The script chooses trials by the loss on validation images, and compares their losses on test images
that no trial saw. A trial's state contains the learning rates of all of its passes, also of those
that other trials did before it took over their state; so the best state has the whole schedule.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import joblib
from digits import (  # type: ignore[import-not-found, unused-ignore]  # beside this script
    MODEL,
    features,
    measure,
    new_model,
    one_pass,
    split_digits,
)

import tunemq as tune
from tunemq.schedulers import PopulationBasedTraining

TRIALS, PASSES, INTERVAL = 8, 40, 4

SPACE = {
    "gamma": 0.05,
    "features": 500,
    "alpha": tune.loguniform(1e-7, 1e-2),  # weight of the penalty
    "learning_rate": tune.loguniform(0.01, 100.0),
}


class Digits(tune.Trainable):
    """Trains one pass a step; its process may run one trial after the other."""

    def setup(self, config: dict[str, Any], images: Any = None) -> None:
        """Begin without training."""
        sampler = features(config)
        self.images = {name: (sampler.transform(x), y) for name, (x, y) in images.items()}
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin with another configuration; a checkpoint may follow."""
        self.model, self.rates = new_model(new_config), list[float]()
        self.model.set_params(learning_rate="constant")
        return True

    def step(self) -> dict[str, Any]:
        """Train one pass, and measure the model."""
        self.rates.append(self.model.eta0)
        one_pass(self.model, len(self.rates), *self.images["train"])
        test = measure(self.model, *self.images["test"])
        return {**measure(self.model, *self.images["valid"]), "test_loss": test["loss"]}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the model, and the learning rates that led to it."""
        joblib.dump((self.model, self.rates), os.path.join(checkpoint_dir, MODEL))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from a model, with this trial's configuration."""
        self.model, self.rates = joblib.load(os.path.join(checkpoint, MODEL))
        self.model.set_params(eta0=self.config["learning_rate"], alpha=self.config["alpha"])


def best_of(seed: int, scheduler: PopulationBasedTraining | None) -> tune.Result:
    """Run a search, and return the trial with the smallest loss at its end."""
    tuner = tune.Tuner(
        tune.with_parameters(Digits, images=split_digits()),
        param_space=SPACE,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=TRIALS,
            seed=seed,
            scheduler=scheduler,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            stop={"training_iteration": PASSES},
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2, checkpoint_at_end=True),
        ),
    )
    return tuner.fit().get_best_result()


def compare(seed: int) -> tuple[tune.Result, tune.Result]:
    """Return the best of the fixed configurations, and the best of the population."""
    population = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=INTERVAL,
        hyperparam_mutations={name: SPACE[name] for name in ("alpha", "learning_rate")},
    )
    return best_of(seed, None), best_of(seed, population)


def schedule(result: tune.Result) -> list[float]:
    """The learning rates of all passes that led to a trial's last state."""
    if result.checkpoint is None:
        raise SystemExit("The best trial has no checkpoint: run the search again.")
    with result.checkpoint.as_directory() as folder:
        rates: list[float] = joblib.load(os.path.join(folder, MODEL))[1]
    return rates


def draw(schedules: list[list[float]], path: str) -> None:
    """Draw the schedules as a plot."""
    try:
        import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for number, rates in enumerate(schedules):
        axis.step(range(1, len(rates) + 1), rates, where="mid", label=f"search {number}")
    axis.set(yscale="log", xlabel="pass", ylabel="learning rate of the best state")
    figure.savefig(path)
    print(f"Drew {path}.")


def main() -> None:
    """Compare both ways, and print the margin."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="number of searches of each kind")
    parser.add_argument("--plot", metavar="FILE", help="draw the schedules; needs matplotlib")
    options = parser.parse_args()
    schedules, margins = [], []
    print("Loss on test images of the best of 8 trials, chosen by validation images:")
    for seed in range(options.seeds):
        fixed, population = compare(seed)
        before, after = fixed.metrics["test_loss"], population.metrics["test_loss"]
        margins.append(1 - after / before)
        schedules.append(schedule(population))
        rates = ", ".join(f"{rate:.2g}" for rate in schedules[-1][::INTERVAL])
        print(f"  search {seed}: fixed {before:.4f}, population {after:.4f}; learning rate {rates}")
    print(f"The population's loss is lower by {statistics.median(margins):.1%} (median).")
    if options.plot:
        draw(schedules, options.plot)


if __name__ == "__main__":
    main()
