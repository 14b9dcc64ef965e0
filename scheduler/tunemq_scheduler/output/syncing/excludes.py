"""Which files are left out of what is copied."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Final

from tunemq_shared.checkpoints.checkpoint_folders import NEVER_COPIED_CHECKPOINTS

#: The begin of the names of files that are being copied, at the destination and here.
PART_PREFIX: Final = ".tunemq-part-"
#: What the default syncer leaves out by itself: files of which only a part is there.
UNFINISHED: Final = (f"{PART_PREFIX}*", f"*/{PART_PREFIX}*")
#: What is never copied of a trial's folder or the experiment's: work in progress, caches, and
#: checkpoints that only pass through.
NEVER_COPIED: Final = (
    ".staging",
    "*/.staging",
    ".cache",
    *NEVER_COPIED_CHECKPOINTS,
)
#: The folders of a trial's checkpoints: ``checkpoint_<epoch>-<n>``.
CHECKPOINTS: Final = "checkpoint_[0-9]*-[0-9]*"


def in_folders_but(name: str) -> tuple[str, ...]:
    """Patterns for what is in the folders of a folder, those of one of them and its own left out.

    Patterns cannot say "not this name", so they say at which letter it is another one.
    """
    return (
        *(f"{name[:n]}[!{name[n]}]*/*" for n in range(len(name))),
        *(f"{name[:n]}/*" for n in range(1, len(name))),
        f"{name}?*/*",
    )


def excluding(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a relative path, or a folder that it is in, fits one of the patterns.

    In a pattern ``*`` also stands for slashes, as it does in `fnmatch`; ``./`` before one and ``/``
    behind it mean nothing.
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
