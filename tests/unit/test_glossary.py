"""``docs/glossary.md`` and the code use the same names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("tunemq", "scheduler", "workers", "shared")
ROW = re.compile(r"^\| (?P<cells>.+) \|$", re.MULTILINE)
FEWER_THAN = 10


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    cells = [found["cells"].split(" | ") for found in ROW.finditer(text)]
    return [row for row in cells if row[0] not in {"term", "where"} and set(row[0]) != {"-", "|"}]


def names_in_code() -> set[str]:
    names: set[str] = set()
    for top in SOURCE_ROOTS:
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Assign):
                    names.update(one.id for one in node.targets if isinstance(one, ast.Name))
    return names


def test_glossary_names_classes_that_are_in_the_code() -> None:
    named = {name for row in rows() for name in re.findall(r"`([A-Z]\w+)`", row[-1])}
    assert len(named) > 50
    assert named - names_in_code() == set()


def test_glossary_has_fewer_than_ten_terms_of_our_own() -> None:
    assert 0 < sum(row[2] == "ours" for row in rows() if len(row) == 4) < FEWER_THAN
