"""The example of docs/simulator.md runs as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_example_of_the_page_prints_better_and_better_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    values = [float(line.split(": ")[1].split()[0]) for line in lines]
    assert len(values) > 5
    assert values == sorted(values, reverse=True)
