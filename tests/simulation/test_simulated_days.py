"""Days of a farm that several owners share, in seconds: each gets its share of the GPUs' hours."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

from tests.simulation.shared_farm import Job, SharedFarm, SharingExperiment, node
from tunemq_scheduler.farm.allocation.members import FairShareSettings

HOUR = 3600.0
#: Seconds between two observations.
LOOK = 60.0
WINDOW = int(6 * HOUR / LOOK)


class Ledgers:
    """Each owner's slots and fair share over time; priority 0 only."""

    def __init__(self, farm: SharedFarm, shares: Mapping[str, float]) -> None:
        self.farm = farm
        self.shares = shares
        self.held: dict[str, list[float]] = {owner: [0.0] for owner in shares}
        self.due: dict[str, list[float]] = {owner: [0.0] for owner in shares}
        self.waits: dict[str, list[bool]] = {owner: [] for owner in shares}
        self.idle = 0.0
        self.all = 0.0

    def run(self, until: float) -> None:
        """Run the farm until then, and record observations."""
        while self.farm.now < until:
            self.farm.run(self.farm.now + LOOK, every=20.0)
            self.farm.check()
            self._look()

    def worst(self) -> dict[str, float]:
        """By owner, how far its hours were from its share in the worst six hours of waiting."""
        found: dict[str, float] = {}
        for owner, waits in self.waits.items():
            held, due = self.held[owner], self.due[owner]
            waiting = list(itertools.accumulate((int(one) for one in waits), initial=0))
            for end in range(WINDOW, len(held)):
                start = end - WINDOW
                if waiting[end] - waiting[start] == WINDOW and due[end] > due[start]:
                    got = (held[end] - held[start]) / (due[end] - due[start])
                    found[owner] = max(found.get(owner, 0.0), abs(got - 1.0))
        return found

    def _look(self) -> None:
        farm = self.farm
        held = {owner: farm.held(owner) for owner in self.shares}
        wanted = Counter(held)
        for one in farm.experiments.values():
            if one.priority == 0 and one.waits:
                missing = sum(
                    wanted.request.get("gpu", 0.0) * wanted.count for wanted in one.usage().wants
                )
                wanted[one.owner] += missing  # type: ignore[assignment]
        due = _shared_out(sum(held.values()), self.shares, wanted)
        for owner in self.shares:
            self.held[owner].append(self.held[owner][-1] + held[owner])
            self.due[owner].append(self.due[owner][-1] + due[owner])
            self.waits[owner].append(wanted[owner] > held[owner] + 1e-6)
        if any(wanted[owner] > held[owner] + 1e-6 for owner in self.shares):
            self.all += farm.gpus()
            self.idle += farm.gpus() - sum(one.gpus() for one in farm.experiments.values())


def _shared_out(
    amount: float, shares: Mapping[str, float], wanted: Mapping[str, float]
) -> dict[str, float]:
    """Max-min fairness: no owner gets more than it wants, and the others share the rest."""
    due = dict.fromkeys(shares, 0.0)
    hungry = {owner for owner in shares if wanted[owner] > 0}
    while hungry and amount > 1e-9:
        weights = sum(shares[owner] for owner in hungry)
        level = min((wanted[one] - due[one]) / shares[one] for one in hungry)
        step = min(level, amount / weights)
        for owner in list(hungry):
            due[owner] += step * shares[owner]
            if due[owner] >= wanted[owner] - 1e-9:
                hungry.discard(owner)
        amount -= step * weights
    return due


def trials(seed: int, gpus: tuple[float, ...], shortest: float, longest: float) -> Iterator[Job]:
    rng = random.Random(seed)
    while True:
        amount = rng.choice(gpus)
        yield {"cpu": max(1.0, amount), "gpu": amount}, rng.uniform(shortest, longest)


def some(count: int, jobs: Iterator[Job]) -> Iterator[Job]:
    return itertools.islice(jobs, count)


def a_farm(seed: int, shares: dict[str, float], nodes: int, gpus: int) -> Ledgers:
    farm = SharedFarm(seed, FairShareSettings(shares=shares))
    for place in range(nodes):
        farm.join(node(f"n{place}", gpus, 8.0 * gpus))
    return Ledgers(farm, shares)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_owner_has_its_share_of_every_six_hours_in_which_it_waits(seed: int) -> None:
    rng = random.Random(seed)
    shares = {"ada": 1.0, "bob": rng.choice([1.0, 2.0]), "eve": rng.choice([1.0, 3.0])}
    days = a_farm(seed, shares, nodes=4, gpus=4)
    farm = days.farm
    hours, minutes = (HOUR, 5 * HOUR), (120.0, 900.0)
    farm.submit(SharingExperiment("a", "ada", trials(seed, (1.0,), *hours)))
    farm.submit(SharingExperiment("b1", "bob", trials(seed + 1, (1.0, 2.0), *minutes)))
    farm.submit(SharingExperiment("b2", "bob", trials(seed + 2, (0.5,), *hours)))
    # One that comes and goes: its waits begin and end at any time.
    for at in (5, 19):
        start = at * HOUR + rng.uniform(0, HOUR)
        for n in range(2):
            jobs = some(60, trials(seed + at + n, (1.0,), 0.25 * HOUR, 2 * HOUR))
            one = SharingExperiment(f"e{at}-{n}", "eve", jobs)
            farm.at(start, lambda one=one: farm.submit(one) and None)
    # Urgent experiments arrive while others wait; a machine dies, another one joins.
    for at in (9, 15, 26):
        jobs = some(8, trials(seed + at, (1.0,), 600.0, 1800.0))
        urgent = SharingExperiment(f"u{at}", "ada", jobs, priority=10)
        farm.at(at * HOUR, lambda one=urgent: farm.submit(one) and None)
    for at in (12, 22):
        farm.at(at * HOUR, lambda at=at: farm.lose(f"n{at % 4}"))
        back = node(f"again{at}", 4, 32.0)
        farm.at(at * HOUR + rng.uniform(600, 5400), lambda back=back: farm.join(back))
    days.run(30 * HOUR)

    worst = days.worst()
    assert set(worst) >= {"ada", "bob"}
    assert max(worst.values()) < 0.10, worst
    assert days.idle < 0.02 * days.all
    # Fair sharing moves each GPU at most once in two hours.
    assert 0 < sum(farm.preempted.values()) < 0.5 * 16 * 30


def test_short_trials_move_between_owners_without_preemption() -> None:
    shares = {"ada": 1.0, "bob": 2.0}
    days = a_farm(7, shares, nodes=2, gpus=4)
    days.farm.submit(SharingExperiment("a", "ada", trials(7, (1.0,), 60.0, 240.0)))
    days.run(HOUR)
    days.farm.submit(SharingExperiment("b", "bob", trials(8, (1.0,), 60.0, 240.0)))
    days.run(13 * HOUR)
    assert max(days.worst().values()) < 0.05
    assert days.idle < 0.02 * days.all
    assert not days.farm.preempted


def test_five_owners_share_two_gpus() -> None:
    shares = {f"o{place}": 1.0 for place in range(5)}
    days = a_farm(9, shares, nodes=1, gpus=2)
    for place, owner in enumerate(shares):
        jobs = trials(place, (1.0,), 2 * HOUR, 9 * HOUR)
        days.farm.submit(SharingExperiment(owner, owner, jobs))
    days.run(24 * HOUR)
    assert max(days.worst().values()) < 0.10
    assert days.idle < 0.03 * days.all
