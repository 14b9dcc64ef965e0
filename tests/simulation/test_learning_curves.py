"""Tables of learning curves, and synthetic ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import tunemq.testing
from tunemq.testing import CurveTable, SyntheticCurves, recorded_curves, simulate
from tunemq_shared.base.errors import ConfigError

GRID = {"solver": ["adam", "sgd"], "lr": [0.01, 0.1, 1.0]}
CURVES = [[10.0 * row + step for step in range(1, 4)] for row in range(6)]


def table(**change: Any) -> CurveTable:
    given: dict[str, Any] = {
        "grid": GRID,
        "metrics": {"loss": CURVES},
        "seconds": [1, 2, 3, 4, 5, 6],
        **change,
    }
    return CurveTable(**given)


def test_curve_table_finds_each_configuration_in_the_order_of_the_product() -> None:
    found = [table()(config, 2) for config in table().configs()]

    assert [one["loss"] for one in found] == [2, 12, 22, 32, 42, 52]
    assert [one["time_this_iter_s"] for one in found] == [1, 2, 3, 4, 5, 6]
    assert len(table()) == 6


def test_curve_table_takes_the_nearest_number_in_proportion() -> None:
    assert table()({"solver": "adam", "lr": 0.04}, 1)["loss"] == 11
    assert table()({"solver": "sgd", "lr": 50}, 1)["loss"] == 51
    assert table()({"solver": "adam", "lr": -3}, 1)["loss"] == 1


def test_curve_table_ends_trials_at_the_last_step() -> None:
    found = simulate("fifo", None, table(), num_samples=4)

    assert [trial.step for trial in found.trials] == [3] * 4
    assert {trial.reason for trial in found.trials} == {"it reached its end"}
    assert table()({"solver": "adam", "lr": 0.01}, 9)["loss"] == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seconds": [1]}, "seconds has 1 entries, and the grid has 6 configurations"),
        ({"metrics": {"loss": CURVES[1:]}}, "loss has 5 entries"),
        ({"metrics": {"loss": [*CURVES[1:], [1.0]]}}, "the curves have [1, 3] steps"),
        ({"metrics": {}}, "the curves have [] steps"),
    ],
    ids=["seconds", "curves", "lengths", "none"],
)
def test_curve_table_that_does_not_fit_its_grid_is_refused(
    change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        table(**change)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"lr": 1}, "has no 'solver'; the table needs solver, lr."),
        ({"solver": "lbfgs", "lr": 1}, "solver='lbfgs' is not in the table; use one of ['adam'"),
    ],
    ids=["missing", "unknown"],
)
def test_curve_table_with_an_unknown_configuration_says_what_it_has(
    config: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        table()(config, 1)
    assert told in str(raised.value)


def test_recorded_curves_are_as_documented_and_small() -> None:
    found = recorded_curves("digits_mlp")
    ends = [found(config, found.steps)["error"] for config in found.configs()]
    begins = [found(config, 1)["error"] for config in found.configs()]

    assert (len(found), found.steps) == (1024, 27)
    assert min(ends) < 0.03
    assert max(ends) > 0.8
    assert sum(ends) < sum(begins)
    seconds = {found(config, 1)["time_this_iter_s"] for config in found.configs()}
    assert (min(seconds), max(seconds)) == pytest.approx((2.3, 18.4))
    file = Path(tunemq.testing.__file__).parent / "curves" / "digits_mlp.json.gz"
    assert file.stat().st_size < 500_000


def test_recorded_curves_of_an_unknown_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="no recorded curves 'mnist'; use digits_mlp"):
        recorded_curves("mnist")


@pytest.mark.parametrize(
    ("function", "best"),
    [
        ("branin", [(math.pi + 5) / 15, 2.275 / 15]),
        ("hartmann6", [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573]),
    ],
)
def test_synthetic_curves_approach_0_at_the_minimum_of_their_function(
    function: str, best: list[float]
) -> None:
    curves = SyntheticCurves(function, steps=50, noise=0.0)
    config = {f"x{place}": value for place, value in enumerate(best)}

    assert list(config) == list(curves.param_space)
    assert curves(config, 50)["loss"] == pytest.approx(0, abs=0.01)
    losses = [curves(config, step)["loss"] for step in range(1, 51)]
    assert losses == sorted(losses, reverse=True)
    assert curves(config, 50)["done"]
    assert "done" not in curves(config, 49)


def test_synthetic_curves_with_noise_are_the_same_for_a_seed() -> None:
    config = {"x0": 0.3, "x1": 0.6}

    def losses(seed: int, noise: float = 0.1) -> list[float]:
        curves = SyntheticCurves("branin", noise=noise, seed=seed)
        return [curves(config, step)["loss"] for step in range(1, 20)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)
    assert losses(1) != losses(1, noise=0.0)


def test_synthetic_curves_of_an_unknown_function_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such function; use 'branin' or 'hartmann6'"):
        SyntheticCurves("sphere")
