"""Faults of a simulated farm, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec


class FaultSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often each fault happens; by default there are none.

    Attributes:
        latency_s: the longest time that a message takes; each takes a random part of it.
        lost, doubled, late: the fraction of messages, in both directions, that do not arrive,
            arrive twice (the second time at most ``late_s`` later), or take up to ``late_s``
            longer. Lost messages are resent, as by a real node and scheduler. A node's batches
            never change their order; its orders may.
        node_deaths, host_deaths, cut_offs, outages, wipes, bad_devices: how many of each happen at
            random times before ``until_s``. A dead node comes back as a new node instance. A
            separated node comes back unchanged, and its trial processes ran meanwhile. An outage
            separates all nodes. A wipe removes all messages in transit. On a bad device its node
            starts nothing; trials that run there continue.
        downtime_s, cut_off_s, outage_s, bad_device_s: the longest time that each lasts.
        lease_s: seconds of silence after which a node counts as lost.
        cleanup_s: seconds from a trial process's last result to its end.
        linger_s: seconds for which remains of an ended trial process hold its slot.
        skew_s: the largest error of nodes' clocks, in either direction.
        until_s: the time after which no fault happens.
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
    """Draw the fate of each message, and the times of faults."""

    def __init__(self, settings: FaultSettings, seed: int) -> None:
        self.settings = settings
        self.rng = random.Random(f"{seed}/faults")
        #: Whether faults can still happen.
        self.are_on = True

    def delay(self) -> float:
        """Return the transit time of a message, in seconds."""
        settings, rng = self.settings, self.rng
        seconds = settings.latency_s * rng.random()
        if self.are_on and settings.late and rng.random() < settings.late:
            seconds += settings.late_s * rng.random()
        return seconds

    def is_lost(self) -> bool:
        """Return whether a message is lost."""
        return self.are_on and self.rng.random() < self.settings.lost

    def doubled_after(self) -> float | None:
        """Return the seconds until a message arrives a second time; None if it does not."""
        if self.are_on and self.rng.random() < self.settings.doubled:
            return self.settings.late_s * self.rng.random()
        return None

    def skew(self) -> float:
        """Return the clock error of a node, in seconds."""
        return self.settings.skew_s * (2 * self.rng.random() - 1)

    def moments(self, count: int) -> Iterator[float]:
        """Yield the times of this many faults."""
        return (self.settings.until_s * self.rng.random() for _ in range(count))
