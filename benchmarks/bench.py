"""The options of a benchmark run: which programs to measure, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.peers import Peer


@dataclass(frozen=True)
class Bench:
    """How to measure.

    Attributes:
        peers: TuneMQ first.
        runs: how often each thing is measured; peers that take minutes are measured once.
    """

    peers: list[Peer]
    runs: int

    @property
    def ours(self) -> Peer:
        """TuneMQ."""
        return self.peers[0]

    def repeat(self) -> Iterator[Peer]:
        """Whom to measure, one after another; ours as often as was asked for."""
        for run in range(self.runs):
            for peer in self.peers:
                if peer is self.ours or run == 0:
                    yield peer
