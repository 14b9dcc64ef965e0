"""Which names of files and objects stay below the folder that they are joined to."""

from __future__ import annotations

from pathlib import PurePosixPath


def is_safe_name(name: str) -> bool:
    """Whether the relative path, joined to a folder, stays below it: no ``..``, root, or NUL."""
    return (
        bool(name)
        and "\0" not in name
        and str(PurePosixPath(name)) == name
        and not name.startswith("/")
        and not {"..", "."} & set(name.split("/"))
    )
