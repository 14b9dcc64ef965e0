"""The scheduler of docs/extending.md runs as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.searches.searches import fit

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def train(config: dict[str, Any]) -> None:
    checkpoint = tune.get_checkpoint()
    done = checkpoint.to_dict()["done"] if checkpoint is not None else 0
    for step in range(done + 1, 41):
        kept = tune.Checkpoint.from_dict({"done": step}) if step % 10 == 0 else None
        tune.report({"loss": config["x"] / step}, checkpoint=kept)


def names_of_the_page(blocks: int) -> dict[str, Any]:
    """Run the page's first blocks of code."""
    names: dict[str, Any] = {}
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for code in found[:blocks]:
        exec(code, names)
    return names


def test_scheduler_of_the_page_passes_its_check() -> None:
    assert "check_trial_scheduler" in names_of_the_page(2)


@pytest.mark.parametrize(("mode", "steps"), [("min", [40, 20, 10, 10]), ("max", [10, 10, 20, 40])])
def test_scheduler_of_the_page_halves_the_trials(mode: str, steps: list[int]) -> None:
    names = names_of_the_page(1)
    results = fit(
        train,
        {"x": tune.grid_search([1.0, 2.0, 3.0, 4.0])},
        metric="loss",
        mode=mode,
        scheduler=names["HalveEveryTen"](),
    )
    assert [result.metrics["training_iteration"] for result in results] == steps
