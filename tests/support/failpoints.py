"""The names of all failpoints in the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_NAME: Final = re.compile(r"\"([a-z]+\.(?:before|within|after)_[a-z_]+)\"")

FAILPOINTS: Final = sorted(
    {
        name
        for package in ("shared", "scheduler", "workers")
        for file in (_ROOT / package).rglob("*.py")
        for name in _NAME.findall(file.read_text(encoding="utf-8"))
    }
)
