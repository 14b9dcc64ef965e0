"""Thousands of trials wait at once: the cost of a turn grows with the trials it places.

The tests use no clock: they count function calls.
"""

from __future__ import annotations

import pytest

from tests.simulation.test_scale import counted_calls
from tests.unit.scheduler.scripted_loop import Loop
from tunemq_shared.protocol import messages as m

CPUS = 10
#: Trials that wait, in two searches of which one is so much larger.
FEW, MANY = 200, 4_000
#: Each of them gets one trial that may be poison, which is looked up node by node.
NODES = 20


def node(name: str, cpus: int) -> m.NodeJoined:
    return m.NodeJoined(f"{name}.1", name, "host", "127.0.0.1", {"cpu": float(cpus)})


def started(trials: int, nodes: int) -> Loop:
    """A search whose trials all run, spread evenly over `nodes` nodes."""
    loop = Loop(trials=trials)
    loop.turn(*(node(f"n{place}", trials // nodes) for place in range(nodes)))
    assert loop.runner.counts["RUNNING"] == trials
    return loop


def lose_all(loop: Loop, *, is_dead: bool) -> None:
    lost = [m.NodeLost(one, "a cut", is_dead) for one in loop.runner.nodes]
    loop.turn(*lost)
    assert loop.runner.counts["RUNNING"] == 0


def calls_of_turn(loop: Loop, *events: m.Event) -> int:
    with counted_calls() as calls:
        loop.turn(*events)
    return calls[0]


@pytest.mark.parametrize("is_dead", [False, True])
def test_f01_after_a_mass_loss_a_turn_costs_what_it_places(is_dead: bool) -> None:
    costs: list[tuple[int, int, int]] = []
    for trials in (FEW, MANY):
        loop = started(trials, trials // CPUS)
        lose_all(loop, is_dead=is_dead)
        loop.turn(node("a", CPUS))
        assert loop.runner.counts["PENDING"] == trials - CPUS
        placing = calls_of_turn(loop, node("b", CPUS))
        assert loop.runner.counts["PENDING"] == trials - 2 * CPUS
        full = calls_of_turn(loop)
        loop.turn(m.TrialPaused("t_00000", 2))
        freed = calls_of_turn(loop, m.SlotFreed("t_00000", 2))
        assert loop.runner.counts["PENDING"] == trials - 2 * CPUS, "another one took the slot"
        costs.append((placing, full, freed))
    for few, many in zip(*costs, strict=True):
        # A heap of twenty times as many is a few levels higher.
        assert many < 1.3 * few + 20


def test_f22_suspect_trials_cost_a_turn_no_more_than_the_number_of_nodes() -> None:
    costs: list[tuple[int, int]] = []
    for trials in (FEW, MANY):
        loop = started(trials, NODES)
        for times in range(2):
            lose_all(loop, is_dead=True)
            loop.now += 100.0
            names = [f"again{times}{place}" for place in range(NODES)]
            loop.turn(*(node(name, trials // NODES) for name in names))
        # Lost with two nodes, each is alone on a node now, and most wait for one.
        assert loop.runner.counts["RUNNING"] == NODES
        waiting = calls_of_turn(loop)
        lose_all(loop, is_dead=True)  # the first evidence against running trials
        assert loop.runner.counts["ERROR"] == 0
        placing = calls_of_turn(loop, node("one", CPUS))
        assert loop.runner.counts["RUNNING"] == 1
        costs.append((waiting, placing))
    for few, many in zip(*costs, strict=True):
        assert many < 1.3 * few + 20


def test_trials_that_wait_for_their_retry_cost_a_turn_nothing() -> None:
    costs: list[tuple[int, int]] = []
    for trials in (FEW, MANY):
        loop = started(trials, NODES)
        lose_all(loop, is_dead=True)  # they are tried again at once, and the next time later
        loop.turn(*(node(f"again{place}", trials // NODES) for place in range(NODES)))
        lose_all(loop, is_dead=True)
        resting = calls_of_turn(loop, node("one", CPUS))
        assert loop.runner.counts["PENDING"] == trials
        assert loop.runner.next_wake() == 1.0
        loop.now = 0.999
        costs.append((resting, calls_of_turn(loop)))
        loop.now = 1.0
        loop.turn()
        assert loop.runner.counts["RUNNING"] == 1, "the others may be poison, too"
    for few, many in zip(*costs, strict=True):
        assert many < 1.3 * few + 20
