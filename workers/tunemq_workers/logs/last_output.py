"""The last lines of a trial's output, which the report of its failure contains.

The trial's files may be on another machine than the user, so the excerpt travels with the event of
the failure and is short.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from tunemq_workers.logs.log_lines import end_of
from tunemq_workers.logs.output_files import STDERR, STDOUT

#: Limits of the excerpt: lines of each file, characters of these, and characters of the stacks of a
#: trial that hung.
_LINES: Final = 20
_BYTES: Final = 3 * 1024
_STACKS_BYTES: Final = 16 * 1024
#: Bytes at the end of a file that are read.
READ_BYTES: Final = 64 * 1024

#: Ends the line that faulthandler writes above each thread.
_STACK: Final = "(most recent call first):"
_MORE: Final = (
    *("Thread 0x", "Current thread 0x", "  File ", "  ...", "  <no Python frame>"),
    "Extension modules:",  # follows the stacks of a process that crashed
)
#: Control characters would reach a terminal through ``error.txt``.
_SHOWN: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "�")


def read_last(
    folder: str, offsets: tuple[int, int] = (0, 0), most_bytes: int = READ_BYTES
) -> dict[str, bytes]:
    """Return the end of ``stdout`` and ``stderr`` in a trial's folder; b"" if unreadable.

    Args:
        folder: the trial's folder.
        offsets: the sizes of the files when the attempt began; earlier output is skipped.
        most_bytes: bytes to read of each file.
    """
    names = (STDOUT, STDERR)
    return {
        name: end_of(os.path.join(folder, name), offset, most_bytes)
        for name, offset in zip(names, offsets, strict=True)
    }


def as_text(read: Mapping[str, bytes]) -> str:
    """Return the last lines of each file with a headline; "" if nothing was printed.

    Stacks at the end of a file, which the node requested because the trial hung, follow below.
    """
    parts = []
    for name, data in read.items():
        lines, stacks = _parted(data.decode(errors="replace").rstrip().split("\n"))
        shown = "\n".join(map(_as_seen, lines[-_LINES:])).strip("\n")
        if shown:
            parts.append(f"The last lines of {name}:\n{_cut(shown, _BYTES)}\n")
        if stacks:
            text = "\n".join(map(_as_seen, stacks))
            parts.append(f"What its threads were doing:\n{text[:_STACKS_BYTES]}\n")
    return "\n".join(parts)


def _parted(lines: list[str]) -> tuple[list[str], list[str]]:
    """Split lines into the output and the stacks at its end."""
    first = len(lines)
    while first and (not lines[first - 1] or lines[first - 1].startswith(_MORE)):
        first -= 1
    if not any(line.endswith(_STACK) for line in lines[first:]):
        return lines, []
    return lines[:first], lines[first:]


def _as_seen(line: str) -> str:
    """Remove control characters, and versions of the line that a progress bar replaced."""
    return line.rstrip("\r").rpartition("\r")[2].translate(_SHOWN)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"[...]{text[-most:]}"
