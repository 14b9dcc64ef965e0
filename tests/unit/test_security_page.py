"""SECURITY.md names for each threat, S01 to S16, tests that exist and bear its number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tunemq_scheduler.transport import lease_challenge
from tunemq_shared.broker import redis_cves, redis_keys
from tunemq_shared.protocol import rejection_counter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
THREATS = [f"S{number:02d}" for number in range(1, 17)]
#: A row's cells; the last one names files below tests/.
ROWS = {
    cells[0]: cells
    for line in PAGE.splitlines()
    if line.startswith("| S")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
NAMED = re.compile(r"`((?:unit|contracts|integration|faults|security|acceptance)/[\w/.]+)`")


def names_in(path: Path) -> set[str]:
    """Return the names of a file's tests, including those in classes."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def named_after(threat: str, path: Path) -> bool:
    """Return whether a file has a test that is named after a threat."""
    return any(re.search(rf"_{threat.lower()}_", name) for name in names_in(path))


def test_each_threat_has_one_row_and_there_are_no_others() -> None:
    assert list(ROWS) == THREATS
    assert all(len(cells) == 4 and all(cells) for cells in ROWS.values())


@pytest.mark.parametrize("threat", THREATS)
def test_each_threat_has_tests_named_after_it(threat: str) -> None:
    named = NAMED.findall(ROWS[threat][-1])
    assert named
    assert ", ".join(f"`{name}`" for name in named) == ROWS[threat][-1]  # no other file
    files = [ROOT / "tests" / name for name in named]
    assert [str(path) for path in files if not path.exists()] == []
    assert any(named_after(threat, path) for path in files)


def test_tests_named_after_a_threat_are_on_the_page() -> None:
    """This covers tests/security; other such tests may stand beside the code that they test."""
    for path in (ROOT / "tests" / "security").glob("test_*.py"):
        for threat in THREATS:
            if named_after(threat, path):
                assert f"security/{path.name}" in NAMED.findall(ROWS[threat][-1]), path.name


def test_numbers_of_the_page_are_those_of_the_code() -> None:
    # A lease counts while its node has answered the current challenge or the one before.
    assert f"for the time of\n  a lease ({redis_keys.LEASE_TTL_S:g} s), once" in PAGE
    assert f"count for {2 * lease_challenge._REPLACED_EVERY_S:g} s at most" in PAGE
    assert redis_keys.REQUEST_TTL_S == 120
    assert "rejects it when it is older than two minutes" in PAGE
    first, last = redis_cves._WEAK_FROM, redis_cves._WEAK_UP_TO
    assert f"Versions {'.'.join(map(str, first))} to {'.'.join(map(str, last))} let" in PAGE
    assert rejection_counter.TOLD_EVERY_S == 60
    assert "logged at most once a minute" in PAGE


def test_page_has_its_required_sections() -> None:
    headings = [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")]
    assert {"Attackers", "Boundaries", "Not guaranteed"} <= set(headings)
    for name in re.findall(r"`((?:docs|deploy|tests)/[\w/.-]+)`", PAGE):
        assert (ROOT / name).exists(), name
