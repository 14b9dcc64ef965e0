"""The loop of a fuzzer: it keeps input with a new effect, and changes it further.

`Decoder` states the allowed behaviour: return, or raise one of a few exceptions, and soon.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.fuzz.decoder import Decoder
from tests.fuzz.mutations import LONGEST, NASTY, Mutator

#: Seconds of a processor that a reader may take for input of these sizes.
SLOW_S: Final = 5.0
_MOST_KEPT: Final = 300
_DIGITS: Final = re.compile(r"\d+|'[^']*'|\"[^\"]*\"|b'[^']*'|0x[0-9a-f]+|/\S+")


@dataclass
class Tally:
    """Counts of the outcomes of a decoder's input."""

    taken: int = 0
    rejected: int = 0
    kinds: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """How much input there was."""
        return self.taken + self.rejected + len(self.failures)


@dataclass(frozen=True)
class Failure:
    """Input that made a decoder fail."""

    decoder: str
    data: bytes
    problem: str

    @property
    def kind(self) -> str:
        """A key that groups failures with the same probable cause."""
        return f"{self.decoder}: {_DIGITS.sub('#', self.problem)[:200]}"


class Fuzzer:
    """Tries input on one decoder.

    Args:
        seed: the same one tries the same.
        before: is given each input before it is tried, to be known if the process does not survive.
    """

    def __init__(
        self, decoder: Decoder, seed: int, before: Callable[[bytes], object] = len
    ) -> None:
        self.decoder = decoder
        self.tally = Tally()
        self._mutator = Mutator(seed ^ zlib.crc32(decoder.name.encode()))
        self._before = before
        self._kept = [*decoder.seeds]
        self._number = 0

    def begin(self) -> None:
        """Try the seeds, and input on which some decoder once failed."""
        for data in (*self.decoder.seeds, *NASTY):
            self.try_(data)

    def step(self) -> None:
        """Try one more."""
        self._number += 1
        begin = self._kept[self._number % len(self._kept)] if self._kept else b""
        data = self._mutator.mutated(begin, self._kept)[:LONGEST]
        if self.try_(data) and len(self._kept) < _MOST_KEPT and len(data) < 20_000:
            self._kept.append(data)

    def try_(self, data: bytes) -> bool:
        """Try this; whether its effect was new."""
        self._before(data)
        known = len(self.tally.kinds)
        started = time.process_time()
        failure = outcome(self.decoder, data, self.tally)
        took = time.process_time() - started
        if failure is None and took > SLOW_S:
            failure = Failure(self.decoder.name, data, f"it took {took:.1f} s")
        if failure is not None and failure.kind not in {one.kind for one in self.tally.failures}:
            self.tally.failures.append(failure)
        return len(self.tally.kinds) > known


def outcome(decoder: Decoder, data: bytes, tally: Tally) -> Failure | None:
    """Decode once, and count the outcome."""
    try:
        found = decoder.read(data)
    except decoder.refuses as rejection:
        tally.rejected += 1
        tally.kinds.add(_shape(rejection))
        return None
    except Exception as error:  # noqa: BLE001  what this is looking for
        return Failure(decoder.name, data, f"{type(error).__name__}: {error}")
    tally.taken += 1
    tally.kinds.add(type(found).__name__)
    return None


def _shape(rejection: BaseException) -> str:
    return _DIGITS.sub("#", f"{type(rejection).__name__}: {rejection}")[:160]


def in_turns(fuzzers: Sequence[Fuzzer], until: float) -> Iterator[Fuzzer]:
    """Each fuzzer again and again, until that time of a monotonic clock, for equal times."""
    spent = dict.fromkeys(range(len(fuzzers)), 0.0)
    while (now := time.monotonic()) < until:
        number = min(spent, key=spent.__getitem__)
        yield fuzzers[number]
        spent[number] += time.monotonic() - now
