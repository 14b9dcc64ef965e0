"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from typing import Final

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int | None:
    """The number that ``"10GiB"`` (of 1024s), ``"10GB"`` (of 1000s) or ``"10"`` means.

    None for what is no size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit, is_binary = found.groups()
    return int(
        float(number) * (1024 if is_binary else 1000) ** " KMGT".index((unit or " ").upper())
    )


def show_bytes(number: int) -> str:
    """A number of bytes for people: ``2.31 GiB``, ``512 MiB``, ``20 KiB``."""
    size, unit = number / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
