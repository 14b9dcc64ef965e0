"""Orders of a node to the log scanner, and its answers; payloads of frames.

``id`` is a number that the node gives to each attempt of a trial.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tunemq_shared.base import message_encoding


class AttemptOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of an attempt: the two files in ``folder``, from offsets ``printed`` on.

    ``search`` names its search, and ``patterns`` are the patterns to look for.
    """

    search: str
    folder: str
    printed: tuple[int, int]
    patterns: tuple[str, ...]


class FollowOutput(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """Order: search the attempt's output periodically."""

    id: int
    output: AttemptOutput


class FinishOutput(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """Order: search the rest of a failed attempt's output, answer `OutputFinished`, and forget it.

    ``asks_memory``: whether to check if its end reports that a GPU ran out of memory.
    """

    id: int
    output: AttemptOutput
    asks_memory: bool


class ForgetOutput(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Order: forget the attempt."""

    id: int


class LineMatched(msgspec.Struct, frozen=True, array_like=True, tag="matched"):
    """Answer: a line matches a pattern; sent once for each pattern."""

    id: int
    pattern: str
    line: str


class PatternDropped(msgspec.Struct, frozen=True, array_like=True, tag="left_out"):
    """Answer: a pattern is not searched for any more, and why."""

    id: int
    pattern: str
    reason: str


class OutputFinished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Answer: all output was searched; ``is_cuda_memory`` if asked for."""

    id: int
    is_cuda_memory: bool


LogOrder: TypeAlias = FollowOutput | FinishOutput | ForgetOutput
LogAnswer: TypeAlias = LineMatched | PatternDropped | OutputFinished

encode = message_encoding.encode
decode_order = msgspec.msgpack.Decoder(LogOrder).decode
decode_answer = msgspec.msgpack.Decoder(LogAnswer).decode
