"""Check that a relative name stays below the folder that it is joined to."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

#: The longest name, and the longest part of one, that Linux accepts, in bytes; counted here in
#: characters.
_LONGEST: Final = 4096
_LONGEST_PART: Final = 255


def is_safe_name(name: str) -> bool:
    """Whether ``name``, joined to a folder, stays below it: no ``..``, no root, no NUL."""
    return (
        0 < len(name) <= _LONGEST
        and max(map(len, name.split("/"))) <= _LONGEST_PART
        and "\0" not in name
        and str(PurePosixPath(name)) == name
        and not name.startswith("/")
        and not {"..", "."} & set(name.split("/"))
    )
