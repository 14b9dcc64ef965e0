"""The end of what a trial printed: what people look for first when it has failed.

It travels with the news of the failure, because the trial's files may be on another machine than
the person who asks. So it is short.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from tunemq_workers.logs.log_lines import end_of
from tunemq_workers.logs.output_files import STDERR, STDOUT

#: How many lines of each file are shown, and at most how many bytes of them; beside them, how many
#: of the stacks of a trial that hung.
_LINES: Final = 20
_BYTES: Final = 3 * 1024
_STACKS_BYTES: Final = 16 * 1024
#: How far from a file's end is looked.
READ_BYTES: Final = 64 * 1024

#: What stands above each thread that faulthandler writes.
_STACK: Final = "(most recent call first):"
_MORE: Final = (
    *("Thread 0x", "Current thread 0x", "  File ", "  ...", "  <no Python frame>"),
    "Extension modules:",  # behind those of a process that crashed
)
#: Control characters would reach a terminal by way of ``error.txt``.
_SHOWN: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "�")


def read_last(
    folder: str, offsets: tuple[int, int] = (0, 0), most_bytes: int = READ_BYTES
) -> dict[str, bytes]:
    """The end of ``stdout`` and ``stderr`` in a trial's folder; what cannot be read is empty.

    ``offsets``: what lies before them was printed by an earlier attempt.
    """
    names = (STDOUT, STDERR)
    return {
        name: end_of(os.path.join(folder, name), offset, most_bytes)
        for name, offset in zip(names, offsets, strict=True)
    }


def as_text(read: Mapping[str, bytes]) -> str:
    """The last lines of each file for people, with a headline; empty if nothing was printed.

    Stacks that were written at the end of one, because the trial hung, stand below them.
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
    """What was printed, and the stacks behind it."""
    first = len(lines)
    while first and (not lines[first - 1] or lines[first - 1].startswith(_MORE)):
        first -= 1
    if not any(line.endswith(_STACK) for line in lines[first:]):
        return lines, []
    return lines[:first], lines[first:]


def _as_seen(line: str) -> str:
    """Without control characters; of a line that was rewritten, as by progress bars, the end."""
    return line.rstrip("\r").rpartition("\r")[2].translate(_SHOWN)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"[...]{text[-most:]}"
