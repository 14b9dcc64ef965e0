"""The table of mutants fits the code: each edit applies, and its tests exist."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tests.mutants.table import ROOT, Mutant, all_mutants

MUTANTS = all_mutants()


def names_in(path: Path) -> set[str]:
    """Return the names of a file's tests; those of a class, inherited ones too, follow ``::``."""
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


def test_table_has_at_least_thirty_mutants() -> None:
    assert len(MUTANTS) >= 30


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_edits_the_file_once_and_leaves_it_valid(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.mutated(text)
    if mutant.file.endswith(".sh"):
        subprocess.run(["sh", "-n"], input=changed.encode(), check=True)
    else:
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_tests_of_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in names_in(ROOT / file)


def test_text_that_does_not_occur_exactly_once_is_an_error() -> None:
    mutant = Mutant(why="", file="a.py", old="x", new="y", tests=())
    for text in ("", "x x"):
        with pytest.raises(ValueError, match=r"a\.py has \d times"):
            mutant.mutated(text)


@pytest.mark.parametrize(
    ("message", "is_noticed"),
    [
        ("assert 1 == 2", True),
        ("AssertionError: assert [] == [1]", True),
        ("Failed: DID NOT RAISE StoreError", True),
        ("Failed: Timeout (>300.0s) from pytest-timeout.", False),
        ("ImportError: cannot import name 'x'", False),
        ("NameError: name 'x' is not defined", False),
    ],
)
def test_only_an_expected_error_counts_as_detection(message: str, is_noticed: bool) -> None:
    mutant = Mutant(why="", file="", old="", new="", tests=())
    assert mutant.is_noticed_by(message) == is_noticed
