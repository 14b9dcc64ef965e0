"""Escapes control sequences in foreign text before it reaches a terminal."""

from __future__ import annotations

import re
from typing import Final, TextIO

from tunemq_shared.base.safe_text import STEERING, harmless

#: Colours and styles: the only sequences that trials' output may send to a terminal.
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
#: The sequences that end all of them.
_RESETS: Final = ("\x1b[0m", "\x1b[m")


def harmless_json(text: str) -> str:
    """Return equivalent JSON without characters that control a terminal."""
    return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def harmless_output(text: str) -> str:
    """Return a program's output with only colours, which end with it, and carriage returns."""
    parts = _COLOUR.split(text)
    kept = _COLOUR.findall(text)
    told = [_without_returns(parts[0])]
    for colour, part in zip(kept, parts[1:], strict=True):
        told += [colour, _without_returns(part)]
    if kept and kept[-1] not in _RESETS:
        told.append(_RESETS[0])
    return "".join(told)


def write_output(stream: TextIO, data: bytes) -> None:
    """Write a program's output: unchanged to a file or a pipe, escaped to a terminal."""
    text = data.decode(errors="replace")
    stream.write(harmless_output(text) if stream.isatty() else text)
    stream.flush()


def _without_returns(text: str) -> str:
    return "\r".join(map(harmless, text.split("\r")))
