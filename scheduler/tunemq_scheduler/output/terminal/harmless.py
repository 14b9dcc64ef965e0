"""Text of others for a terminal: what would steer that is shown, and does nothing."""

from __future__ import annotations

import re
from typing import Final, TextIO

from tunemq_shared.base.safe_text import STEERING, harmless

#: Colours and the like: the only sequences that trials' output may have at a terminal.
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")


def harmless_json(text: str) -> str:
    """Return JSON with the same content in which no character steers a terminal."""
    return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def harmless_output(text: str) -> str:
    """What a program printed: it may colour and go back to a line's begin, and nothing else."""
    parts = _COLOUR.split(text)
    kept = _COLOUR.findall(text)
    told = [_without_returns(parts[0])]
    for colour, part in zip(kept, parts[1:], strict=True):
        told += [colour, _without_returns(part)]
    return "".join(told)


def write_output(stream: TextIO, data: bytes) -> None:
    """Write what a program printed: as it is to a file or a pipe, harmless to a terminal."""
    text = data.decode(errors="replace")
    stream.write(harmless_output(text) if stream.isatty() else text)
    stream.flush()


def _without_returns(text: str) -> str:
    return "\r".join(map(harmless, text.split("\r")))
