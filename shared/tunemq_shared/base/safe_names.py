"""Check that a relative name stays below the folder that it is joined to."""

from __future__ import annotations

from pathlib import PurePosixPath


def is_safe_name(name: str) -> bool:
    """Whether ``name``, joined to a folder, stays below it: no ``..``, no root, no NUL."""
    return (
        bool(name)
        and "\0" not in name
        and str(PurePosixPath(name)) == name
        and not name.startswith("/")
        and not {"..", "."} & set(name.split("/"))
    )
