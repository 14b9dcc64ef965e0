"""What a node orders of the process that reads what trials print, and what that answers.

Payloads of frames. ``id`` is a number that the node gives to each attempt of a trial.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from tunemq_shared.base import message_encoding

#: The kind of frames from the process to the node; those to it are `frames.ORDER`.
ANSWER: Final = ord("A")


class AttemptOutput(msgspec.Struct, frozen=True, array_like=True):
    """What an attempt prints: the two files in ``folder``, from ``printed`` on.

    ``patterns`` are those that its lines are compared with.
    """

    folder: str
    printed: tuple[int, int]
    patterns: tuple[str, ...]


class FollowOutput(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """Read what is printed from now on."""

    id: int
    output: AttemptOutput


class FinishOutput(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """The attempt has failed: read the rest, answer `OutputFinished`, and forget it.

    ``asks_memory``: whether the last that was printed says that a GPU's memory ran out.
    """

    id: int
    output: AttemptOutput
    asks_memory: bool


class ForgetOutput(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Forget it."""

    id: int


class LineMatched(msgspec.Struct, frozen=True, array_like=True, tag="matched"):
    """A line matches a pattern; told once of each."""

    id: int
    pattern: str
    line: str


class PatternDropped(msgspec.Struct, frozen=True, array_like=True, tag="left_out"):
    """A pattern is not looked for any more, and why."""

    id: int
    pattern: str
    reason: str


class OutputFinished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """All was read; ``is_cuda_memory`` as it was asked."""

    id: int
    is_cuda_memory: bool


LogOrder: TypeAlias = FollowOutput | FinishOutput | ForgetOutput
LogAnswer: TypeAlias = LineMatched | PatternDropped | OutputFinished

encode = message_encoding.encode
decode_order = msgspec.msgpack.Decoder(LogOrder).decode
decode_answer = msgspec.msgpack.Decoder(LogAnswer).decode
