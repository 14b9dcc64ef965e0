"""Text of others for a terminal: what would steer that is shown, and does nothing."""

from __future__ import annotations

import re
from typing import Final, TextIO

#: Colours and the like: the only sequences that trials' output may have at a terminal.
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
#: Control characters, and what turns the direction of text round.
_STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def harmless(text: str) -> str:
    """The text, in however many lines, with escapes in the place of control characters."""
    return _STEERING.sub(_shown, text)


def harmless_json(text: str) -> str:
    """Return JSON with the same content in which no character steers a terminal."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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


def _shown(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
