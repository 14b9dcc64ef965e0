"""Parse and format byte counts as people write them."""

from __future__ import annotations

import re
from typing import Final

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGTPE])(i?))?B?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int | None:
    """Parse ``"10GiB"`` (units of 1024), ``"10GB"`` (units of 1000) or ``"10"`` into bytes.

    Returns None for a text that is not a size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit, is_binary = found.groups()
    return int(
        float(number) * (1024 if is_binary else 1000) ** " KMGTPE".index((unit or " ").upper())
    )


def show_bytes(number: int) -> str:
    """Format a number of bytes for people: ``2.31 GiB``, ``512 MiB``, ``20 KiB``."""
    size, unit = number / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
