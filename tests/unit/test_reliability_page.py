"""docs/reliability.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
FAULTS = [f"F{number:02d}" for number in range(1, 26)]
#: A row's cells; the last one names files below tests/.
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.splitlines()
    if line.startswith("| ")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
NAMED = re.compile(r"`((?:unit|contracts|simulation|integration|faults|acceptance)/[\w/.]+)`")


def named_after(fault: str, path: Path) -> bool:
    """Return whether a file has a test that is named after a fault."""
    text = path.read_text(encoding="utf-8")
    return re.search(rf"\bdef test_\w*{fault.lower()}_", text) is not None


def test_every_file_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 50
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_tests_named_after_it(fault: str) -> None:
    files = [ROOT / "tests" / name for name in NAMED.findall(ROWS[fault][-1])]
    assert any(named_after(fault, path) for path in files)
    real = [
        path
        for folder in ("faults", "simulation")
        for path in (ROOT / "tests" / folder).glob("*.py")
    ]
    assert any(named_after(fault, path) for path in real)
