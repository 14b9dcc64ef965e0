"""What goes wrong in a simulated farm, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec


class FaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often what goes wrong; without arguments nothing does.

    Attributes:
        latency_s: the longest time that a message takes; each takes a random part of it.
        lost, doubled, late: the share of messages, in both directions, that do not arrive, arrive
            twice (the second time ``late_s`` later at most), or take up to ``late_s`` more. What is
            lost is sent again, as by a real node and a real scheduler; a node's batches are never
            in another order than that in which it sent them, its orders are.
        node_deaths, host_deaths, cut_offs, outages, wipes, bad_devices: how many of each happen at
            random times before ``until_s``. A node that dies comes back as a new instance. One
            that is cut off comes back as it is, its hosts having gone on. In an outage all nodes
            are cut off. A wipe takes away all that is under way. On a bad device its node begins
            nothing; what has it goes on.
        downtime_s, cut_off_s, outage_s, bad_device_s: the longest time that each lasts.
        lease_s: how long a node is silent before it is taken for lost.
        cleanup_s: how long a host takes to end behind its last result.
        linger_s: how long something of a host is left after its end.
        skew_s: by how much nodes' clocks are wrong, this way or that.
        until_s: nothing goes wrong any more from then on.
    """

    latency_s: float = 0.05
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 2.0
    node_deaths: int = 0
    process_deaths: int = 0
    cut_offs: int = 0
    outages: int = 0
    wipes: int = 0
    bad_devices: int = 0
    downtime_s: float = 10.0
    cut_off_s: float = 15.0
    outage_s: float = 10.0
    bad_device_s: float = 15.0
    lease_s: float = 6.0
    cleanup_s: float = 0.0
    linger_s: float = 0.1
    skew_s: float = 0.0
    until_s: float = 60.0


class SimulatedFaults:
    """Draws what becomes of each message, and when what happens."""

    def __init__(self, settings: FaultSettings, seed: int) -> None:
        self.settings = settings
        self.rng = random.Random(f"{seed}/faults")
        #: Whether anything may still go wrong.
        self.are_on = True

    def delay(self) -> float:
        """How long a message is under way."""
        settings, rng = self.settings, self.rng
        seconds = settings.latency_s * rng.random()
        if self.are_on and settings.late and rng.random() < settings.late:
            seconds += settings.late_s * rng.random()
        return seconds

    def is_lost(self) -> bool:
        """Whether a message does not arrive."""
        return self.are_on and self.rng.random() < self.settings.lost

    def doubled_after(self) -> float | None:
        """When a message arrives a second time; None when it does not."""
        if self.are_on and self.rng.random() < self.settings.doubled:
            return self.settings.late_s * self.rng.random()
        return None

    def skew(self) -> float:
        """By how much a node's clock is wrong."""
        return self.settings.skew_s * (2 * self.rng.random() - 1)

    def moments(self, count: int) -> Iterator[float]:
        """When so many things go wrong."""
        return (self.settings.until_s * self.rng.random() for _ in range(count))
