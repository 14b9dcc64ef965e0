"""docs/reliability.md and the table of defences name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import defences as run_defences
from tunemq_shared import defences

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


def names_in(path: Path) -> set[str]:
    """The names of a file's tests; those of a class, inherited ones too, behind ``::``."""
    found: set[str] = set()
    methods: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            methods[node.name] = own.union(*(methods.get(base, set()) for base in bases))
            found |= {f"{node.name}::{name}" for name in methods[node.name]}
    return found


def named_after(fault: str, path: Path) -> bool:
    """Whether a file has a test that is named after a fault."""
    return any(re.search(rf"_{fault.lower()}_", name) for name in names_in(path))


def test_every_file_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 50
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_tests_that_are_named_after_it(fault: str) -> None:
    files = [ROOT / "tests" / name for name in NAMED.findall(ROWS[fault][-1])]
    assert any(named_after(fault, path) for path in files)
    real = [
        path
        for folder in ("faults", "simulation")
        for path in (ROOT / "tests" / folder).glob("*.py")
    ]
    assert any(named_after(fault, path) for path in real)


def test_each_defence_is_on_the_page_and_has_tests() -> None:
    constants = {name.lower() for name in vars(defences) if name.isupper() and name[0] != "_"}
    constants -= {"variable"}
    assert set(run_defences.TESTS) == constants
    for name in constants:
        files = {f"tests/{file}" for file in NAMED.findall(ROWS[name][-1])}
        assert files
        assert files <= set(run_defences.TESTS[name])


def test_the_tests_of_defences_exist() -> None:
    for files in run_defences.TESTS.values():
        for file, names in files.items():
            there = names_in(ROOT / file)
            assert {name.partition("[")[0] for name in names} <= there, file


def test_each_defence_is_wired() -> None:
    used = {
        name
        for package in ("shared", "scheduler", "workers")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"defences\.([A-Z_]+)", path.read_text(encoding="utf-8"))
    }
    assert {name.lower() for name in used} >= set(run_defences.TESTS)
