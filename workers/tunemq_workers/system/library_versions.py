"""Find the versions of installed libraries without importing them.

Only folder names are read, because ``importlib.metadata`` costs a node megabytes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

#: Libraries whose version may change a trial's results or make its checkpoints unreadable.
OF_TRIALS: Final = frozenset({
    "jax",
    "keras",
    "lightgbm",
    "lightning",
    "numpy",
    "pandas",
    "scikit_learn",
    "scipy",
    "tensorflow",
    "torch",
    "transformers",
    "xgboost",
})  # fmt: skip

_FOLDER: Final = re.compile(r"([\w.]+)-([\w.!+]+)\.(?:dist|egg)-info")


def installed_versions(paths: Iterable[str] | None = None) -> dict[str, str]:
    """Return the version of each installed library of `OF_TRIALS`, by its name on PyPI.

    Args:
        paths: the folders to search, first match first; default: ``sys.path``.
    """
    found: dict[str, str] = {}
    for path in sys.path if paths is None else paths:
        with suppress(OSError):  # archives and missing folders
            for entry in os.listdir(path or "."):
                match = _FOLDER.fullmatch(entry)
                if match and (name := match[1].lower()) in OF_TRIALS:
                    found.setdefault(name.replace("_", "-"), match[2])
    return dict(sorted(found.items()))
