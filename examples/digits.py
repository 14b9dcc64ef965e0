"""Tune a classifier of handwritten digits: 24 configurations that train step by step.

    make demo

Each trial turns the images into random Fourier features (an approximation of a Gaussian kernel) and
fits a linear classifier to them by stochastic gradient descent, one pass a step. ASHA stops two
thirds of the trials after 3 passes and two thirds of the rest after 9. The script chooses the
configuration with the smallest loss on the validation images, and measures its last checkpoint on
test images that no trial saw.

A second run chooses the same configuration, although trials run side by side and ASHA decides as
their results come in. Sampling and training are seeded, so each configuration has one learning
curve; and the chosen one is the best of all 24 after 3 passes, after 9 and at the end. ASHA stops
only trials that are worse than another after as many passes, so in no order of arrival does it stop
that one. (`tests/acceptance/test_digits_demo.py` computes all the curves and checks this.)
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

import tunemq as tune
from tunemq.schedulers import ASHAScheduler

SEED = 0  # of the splits, the features and the order of training
SEARCH_SEED = 7  # of the configurations; with this one the winner is far ahead
PASSES = 27
MODEL = "model.joblib"

SPACE = {
    "gamma": tune.loguniform(0.01, 3.0),  # width of the kernel
    "features": tune.choice([250, 500, 1000, 2000]),
    "alpha": tune.loguniform(1e-7, 1e-3),  # weight of the penalty
    "learning_rate": tune.loguniform(0.3, 30.0),
}


def split_digits() -> dict[str, Any]:
    """The 1,797 images: 1,077 to train on, 360 to choose by, and 360 held out; alike in digits."""
    x, y = load_digits(return_X_y=True)
    x_rest, x_test, y_rest, y_test = train_test_split(
        x / 16, y, test_size=360, stratify=y, random_state=SEED
    )
    x_train, x_valid, y_train, y_valid = train_test_split(
        x_rest, y_rest, test_size=360, stratify=y_rest, random_state=SEED
    )
    return {
        "train": (x_train, y_train),
        "valid": (x_valid, y_valid),
        "test": (x_test, y_test),
    }


def features(config: dict[str, Any]) -> RBFSampler:
    """The map from images to features; it is drawn from a seed and needs no images to fit."""
    sampler = RBFSampler(gamma=config["gamma"], n_components=config["features"], random_state=SEED)
    return sampler.fit(np.zeros((1, 64)))


def new_model(config: dict[str, Any]) -> SGDClassifier:
    """A linear classifier without training."""
    return SGDClassifier(
        loss="log_loss",
        alpha=config["alpha"],
        learning_rate="invscaling",
        eta0=config["learning_rate"],
        power_t=0.25,
        random_state=SEED,
    )


def one_pass(model: SGDClassifier, number: int, x: Any, y: Any) -> None:
    """Train on all images once, in an order that depends on the number of the pass."""
    order = np.random.default_rng([SEED, number]).permutation(len(y))
    model.partial_fit(x[order], y[order], classes=np.arange(10))


def measure(model: SGDClassifier, x: Any, y: Any) -> dict[str, float]:
    """The quality of the model; the loss distinguishes models with equal accuracy, a count."""
    return {"loss": log_loss(y, model.predict_proba(x)), "accuracy": model.score(x, y)}


def train_digits(config: dict[str, Any], train: Any, valid: Any) -> None:
    """Train one configuration, reporting after each pass; resume from a checkpoint if given."""
    sampler = features(config)
    x_train, x_valid = sampler.transform(train[0]), sampler.transform(valid[0])
    done, model = 0, new_model(config)
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            done, model = joblib.load(os.path.join(folder, MODEL))
    for number in range(done + 1, PASSES + 1):
        one_pass(model, number, x_train, train[1])
        with tempfile.TemporaryDirectory() as folder:
            joblib.dump((number, model), os.path.join(folder, MODEL))
            tune.report(
                measure(model, x_valid, valid[1]),
                checkpoint=tune.Checkpoint.from_directory(folder),
            )


def search() -> tune.ResultGrid:
    """Run the search."""
    digits = split_digits()
    tuner = tune.Tuner(
        tune.with_parameters(train_digits, train=digits["train"], valid=digits["valid"]),
        param_space=SPACE,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=24,
            seed=SEARCH_SEED,
            scheduler=ASHAScheduler(max_t=PASSES, grace_period=3, reduction_factor=3),
        ),
        run_config=tune.RunConfig(
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            failure_config=tune.FailureConfig(max_failures=1),
        ),
    )
    return tuner.fit()


def held_out_accuracy(result: tune.Result) -> float:
    """The share of held-out images that the trial's last checkpoint classifies correctly."""
    if result.checkpoint is None:
        raise SystemExit("The best trial has no checkpoint: run the search again.")
    with result.checkpoint.as_directory() as folder:
        _, model = joblib.load(os.path.join(folder, MODEL))
    x, y = split_digits()["test"]
    return float(model.score(features(result.config).transform(x), y))


def main() -> None:
    """Run the search, and print its result and location."""
    results = search()
    best = results.get_best_result()
    print(f"\nBest of {len(results)} configurations, by loss on the validation images:")
    for name, value in best.config.items():
        print(f"  {name:<14} {value:.4g}")
    print(
        f"Validation accuracy  {best.metrics['accuracy']:.4f}   (loss {best.metrics['loss']:.4f})"
    )
    print(f"Test accuracy        {held_out_accuracy(best):.4f}   on images that no trial saw")
    print(f"This trial           {best.path}")
    print(f"Everything           {results.experiment_path}")


if __name__ == "__main__":
    main()
