"""F22: trials that kill their node, among three searches that share a farm's nodes."""

from __future__ import annotations

import pytest

from tests.simulation.node_killers import KillerFarm


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_f22_killers_end_and_innocent_trials_of_all_searches_finish(nodes: int, limit: int) -> None:
    deaths = 0
    for seed in range(12):
        farm = KillerFarm(1000 * nodes + 100 * limit + seed, nodes=nodes, limit=limit)
        farm.run()
        farm.check()
        deaths += farm.deaths
    assert deaths > 12


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_forkserver_killers_end_and_innocent_trials_of_all_searches_finish(
    nodes: int, limit: int
) -> None:
    deaths = 0
    for seed in range(12):
        farm = KillerFarm(
            1000 * nodes + 100 * limit + seed, nodes=nodes, limit=limit, spares_nodes=True
        )
        farm.run()
        farm.check()
        deaths += farm.deaths
    assert deaths > 12


@pytest.mark.parametrize("nodes", [1, 3])
def test_f22_single_accident_beside_node_killers_ends_no_innocent_trial(nodes: int) -> None:
    for seed in range(12):
        farm = KillerFarm(seed, nodes=nodes, limit=1, accidents=1)
        farm.run()
        farm.check()
