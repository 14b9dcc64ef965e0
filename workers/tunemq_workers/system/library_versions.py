"""Which versions of libraries are installed, without importing any of them.

Only the names of folders are read: ``importlib.metadata`` costs a node megabytes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

#: Those of which another version may give a trial other results, or not read its checkpoints.
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
    """By name as pip writes it, the version of each library of `OF_TRIALS`.

    Args:
        paths: the folders to look in, of which the first with a library counts; default: those
            that this process imports from.
    """
    found: dict[str, str] = {}
    for path in sys.path if paths is None else paths:
        with suppress(OSError):  # archives, and folders that are not there
            for entry in os.listdir(path or "."):
                match = _FOLDER.fullmatch(entry)
                if match and (name := match[1].lower()) in OF_TRIALS:
                    found.setdefault(name.replace("_", "-"), match[2])
    return dict(sorted(found.items()))
