"""Fails where the map of the code gets harder to read.

    python tools/check_structure.py

A folder of the product has at most 15 modules.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE_ROOTS: Final = ("tunemq", "scheduler", "workers", "shared")
MOST_MODULES: Final = 15


def main() -> None:
    """Print what is wrong, and exit with 1 if anything is."""
    problems = crowded_folders()
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


def _modules() -> list[Path]:
    return sorted(path for top in SOURCE_ROOTS for path in (ROOT / top).rglob("*.py"))


if __name__ == "__main__":
    main()
