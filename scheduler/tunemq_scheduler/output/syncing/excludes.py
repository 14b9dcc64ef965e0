"""Patterns of files that are not copied."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Final

from tunemq_shared.checkpoints.checkpoint_markers import NEVER_COPIED_CHECKPOINTS

#: Name prefix of files that are being copied, at the destination and here.
PART_PREFIX: Final = ".tunemq-part-"
#: Incomplete files, which the default syncer always leaves out.
UNFINISHED: Final = (f"{PART_PREFIX}*", f"*/{PART_PREFIX}*")
#: Files of a trial or experiment that are never copied: work in progress, caches, and temporary
#: checkpoints.
NEVER_COPIED: Final = (
    ".staging",
    "*/.staging",
    ".cache",
    *NEVER_COPIED_CHECKPOINTS,
)
#: The folders of a trial's checkpoints: ``checkpoint_<attempt>-<n>``.
CHECKPOINTS: Final = "checkpoint_[0-9]*-[0-9]*"


def in_folders_but(name: str) -> tuple[str, ...]:
    """Return patterns for everything in the subfolders of a folder, except one of them.

    Patterns cannot express "not this name", so there is one for each letter at which a name may
    differ.
    """
    return (
        *(f"{name[:n]}[!{name[n]}]*/*" for n in range(len(name))),
        *(f"{name[:n]}/*" for n in range(1, len(name))),
        f"{name}?*/*",
    )


def excluding(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a relative path, or a folder above it, matches a pattern.

    ``*`` also matches slashes, as in `fnmatch`; a leading ``./`` and a trailing ``/`` of a pattern
    are ignored.
    """
    cleaned = [pattern.removeprefix("./").rstrip("/") for pattern in patterns]
    if not cleaned:
        return lambda _: False
    fits = re.compile("|".join(fnmatch.translate(pattern) for pattern in cleaned)).match

    def is_excluded(name: str) -> bool:
        end = name.find("/")
        while end >= 0:
            if fits(name[:end]):
                return True
            end = name.find("/", end + 1)
        return fits(name) is not None

    return is_excluded
