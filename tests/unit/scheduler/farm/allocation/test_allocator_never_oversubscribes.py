"""In any order of events, no GPU is held twice and no node holds more than it has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.shared_farm import SharedFarm, SharingExperiment, node
from tunemq_scheduler.farm.allocation.members import FairShareSettings

REQUESTS = (
    {"cpu": 1.0, "gpu": 1.0},
    {"cpu": 1.0, "gpu": 0.5},
    {"cpu": 2.0, "gpu": 0.3},
    {"cpu": 1.0, "gpu": 2.0},
    {"cpu": 3.0},
    {"cpu": 1.0, "gpu_memory": 20e9},
)

submits = st.tuples(
    st.just("submit"),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.sampled_from(REQUESTS),
    st.integers(1, 6),
    st.sampled_from([5.0, 300.0, 20_000.0]),
)
others = st.tuples(
    st.sampled_from(
        [
            "wait",
            "wait long",
            "lose",
            "silence",
            "hear",
            "join",
            "pause",
            "drain",
            "restart",
            "withhold",
            "use again",
        ]
    ),
    st.integers(0, 5),
)


@pytest.mark.parity(53, 60)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 99), actions=st.lists(submits | others, max_size=25))
def test_no_resource_is_ever_held_twice(seed: int, actions: list[tuple[Any, ...]]) -> None:
    farm = SharedFarm(seed, FairShareSettings(quotas={"b": {"gpu": 3.0}}, preempt_grace_s=10.0))
    farm.join(node("n0", 2, 6.0))
    farm.join(node("n1", 1, 4.0))
    numbers = itertools.count(2)
    for kind, *rest in actions:
        _act(farm, kind, rest, numbers)
        _continue(farm, 1.0)
    _continue(farm, 1500.0)


def _continue(farm: SharedFarm, seconds: float) -> None:
    until = farm.now + seconds
    while farm.now < until:
        farm.run(min(until, farm.now + max(0.5, seconds / 40)))
        farm.check()
        used = sum(one.gpus() for one in farm.experiments.values() if one.owner == "b")
        assert used <= 3.0 + 1e-6 or farm.was_silent


def _act(farm: SharedFarm, kind: str, rest: list[Any], numbers: itertools.count[int]) -> None:
    if kind == "submit":
        owner, priority, request, count, length = rest
        name = f"e{next(numbers)}"
        jobs = itertools.repeat((dict(request), length), count)
        farm.submit(SharingExperiment(name, owner, jobs, priority))
        return
    place = rest[0]
    known, silent = sorted(farm.nodes), sorted(farm.silent)
    names = sorted(farm.experiments)
    if kind == "wait":
        _continue(farm, 1.0 + place)
    elif kind == "wait long":
        _continue(farm, 300.0 * place)
    elif kind == "join":
        farm.join(node(f"n{next(numbers)}", place % 3, 4.0))
    elif kind == "lose" and known:
        farm.lose(known[place % len(known)])
    elif kind == "silence" and known:
        farm.silence(known[place % len(known)])
    elif kind == "hear" and silent:
        farm.hear_again(silent[place % len(silent)])
    elif kind == "pause" and names:
        name = names[place % len(names)]
        farm.allocator.experiment_paused(name, 5.0 if place % 2 else None)
        _continue(farm, 30.0)
        farm.allocator.experiment_resumed(name)
    elif kind == "drain" and known:
        farm.allocator.node_drained(known[place % len(known)], 5.0 if place % 2 else None)
        _continue(farm, 30.0)
        farm.allocator.node_resumed(known[place % len(known)])
    elif kind in {"withhold", "use again"} and known:
        name = known[place % len(known)]
        gpus = [gpu.uuid for gpu in farm.nodes[name].gpus][: 1 + place // 2]
        farm.withhold(name, dict.fromkeys(gpus, "XID 79") if kind == "withhold" else {})
    elif kind == "restart":
        farm.restart()
