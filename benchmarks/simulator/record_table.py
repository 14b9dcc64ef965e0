"""Records `recorded_curves("digits_mlp")`: 1,024 networks on scikit-learn's digits, 27 epochs each.

    python -m benchmarks.simulator.record_table [--processes 2]

It writes `tunemq/testing/curves/digits_mlp.json.gz`, the same bytes each time with the same
versions of scikit-learn, numpy and BLAS on the same kind of processor; it needs scikit-learn and
about ten minutes of two cores.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

OUTPUT: Final = Path(__file__).parents[2] / "tunemq/testing/curves/digits_mlp.json.gz"
SPACE: Final[dict[str, list[Any]]] = {
    "solver": ["adam", "sgd"],
    "lr": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0],
    "alpha": [1e-05, 0.001, 0.1, 1.0],
    "batch_size": [32, 64, 128, 256],
    "hidden": [8, 16, 32, 64],
}
EPOCHS: Final = 27
TRAINING: Final = 897
#: Losses are whole thousandths up to this.
MOST_LOSS: Final = 9_999


def main() -> None:
    """Train all configurations, and write their curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    configs = [dict(zip(SPACE, one, strict=True)) for one in itertools.product(*SPACE.values())]
    # Sums depend on the number of threads.
    with multiprocessing.Pool(options.processes, threadpool_limits, (1,)) as pool:
        curves = pool.map(train, configs, chunksize=8)
    write(curves)


def write(curves: list[tuple[list[int], list[int], int]]) -> None:
    """Write the table; its order is that of the space's product."""
    validation = len(_data()[2])
    table = {
        "about": f"MLPClassifier on load_digits: {TRAINING} images to train, {validation} to "
        "validate; made by benchmarks/simulator/record_table.py",
        "space": SPACE,
        "steps": EPOCHS,
        "metrics": {
            "error": {"unit": 1 / validation, "curves": [errors for errors, _, _ in curves]},
            "loss": {"unit": 0.001, "curves": [losses for _, losses, _ in curves]},
        },
        "seconds": {"unit": 0.1, "values": [seconds for _, _, seconds in curves]},
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    OUTPUT.write_bytes(gzip.compress(text, 9, mtime=0))
    print(f"{OUTPUT}: {len(curves)} curves, {OUTPUT.stat().st_size:,} bytes")


def _data() -> tuple[Any, Any, Any, Any]:
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    images, digits = images[order] / 16.0, digits[order]
    return images[:TRAINING], digits[:TRAINING], images[TRAINING:], digits[TRAINING:]


def train(config: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """Return the wrong images and the loss of each epoch, and the tenths of seconds of one."""
    images, digits, unseen, truth = _data()
    network = MLPClassifier(
        hidden_layer_sizes=(config["hidden"],),
        solver=config["solver"],
        learning_rate_init=config["lr"],
        alpha=config["alpha"],
        batch_size=config["batch_size"],
        momentum=0.9,
        random_state=0,
    )
    errors, losses = list[int](), list[int]()
    for _ in range(EPOCHS):
        if losses and losses[-1] == MOST_LOSS:  # it has diverged
            errors.append(errors[-1])
            losses.append(MOST_LOSS)
            continue
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                network.partial_fit(images, digits, classes=np.arange(10))
                likely = network.predict_proba(unseen)
            except ValueError as error:
                if "finite" not in str(error):
                    raise
                likely = np.full((len(truth), 10), np.nan)
        right = likely[np.arange(len(truth)), truth]
        loss = float(-np.log(np.maximum(right, 1e-10)).mean())
        is_finite = np.isfinite(loss)
        errors.append(int((likely.argmax(axis=1) != truth).sum()) if is_finite else len(truth))
        losses.append(min(MOST_LOSS, round(loss * 1000)) if is_finite else MOST_LOSS)
    return errors, losses, _tenths(config)


def _tenths(config: dict[str, Any]) -> int:
    """Return how long an epoch takes, by its operations, so that no machine's load is recorded.

    It is that of a data set a thousand times as large: 6 operations for each weight and image at
    2 billion in a second, and 20 microseconds for each batch.
    """
    weights = config["hidden"] * (64 + 10)
    images = 1000 * TRAINING
    return round(10 * (6 * weights * images / 2e9 + images / config["batch_size"] * 20e-6 * 10))


if __name__ == "__main__":
    main()
