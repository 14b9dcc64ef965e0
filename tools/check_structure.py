"""Fails where the map of the code gets harder to read.

    python tools/check_structure.py

A folder of the product has at most 15 modules, and no two public classes of different packages have
the same name, `SAME_NAME` apart.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE_ROOTS: Final = ("tunemq", "scheduler", "workers", "shared")
MOST_MODULES: Final = 15

#: Names that two packages share on purpose, each with the reason.
SAME_NAME: Final[dict[str, str]] = {}


def main() -> None:
    """Print all problems, and exit with 1 if there are any."""
    problems = [*crowded_folders(), *shared_names()]
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


def crowded_folders() -> list[str]:
    """A line for each folder with more than `MOST_MODULES` modules."""
    counts: defaultdict[Path, int] = defaultdict(int)
    for path in _modules():
        counts[path.parent] += path.name != "__init__.py"
    return [
        f"{folder.relative_to(ROOT)} has {count} modules, more than {MOST_MODULES}: split it"
        for folder, count in sorted(counts.items())
        if count > MOST_MODULES
    ]


def shared_names() -> list[str]:
    """A line for each public class name that occurs in more than one module."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in _modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    return [
        f"class {name} is in {' and '.join(found)}: rename one of them"
        for name, found in sorted(places.items())
        if len(found) > 1 and name not in SAME_NAME
    ]


def _modules() -> list[Path]:
    return sorted(path for top in SOURCE_ROOTS for path in (ROOT / top).rglob("*.py"))


if __name__ == "__main__":
    main()
