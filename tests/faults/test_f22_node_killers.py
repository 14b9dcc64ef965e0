"""F22 and F01: trials that kill nodes of a farm, together with other searches' trials there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.farms.farm_service import Search, farm_service
from tests.support.searches.node_killers import kill_nodes

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.slow]


def test_f01_farm_search_whose_only_trial_dies_with_its_node_ends(tmp_path: Path) -> None:
    with farm_service(tmp_path) as farm:
        farm.add_worker("one")
        farm.has_nodes("one")
        farm.submit(Search(name="s", trials=1, steps=9, has_gate=True, policy="max_node_losses=0"))
        farm.open_gate("s", 3)
        farm.wait_for_steps("s", 1, 3)
        farm.workers["one"].kill()
        row = farm.wait_for("s", "FINISHED", within=120)
        assert row.trials["ERROR"] == 1, f"{row}{farm}"
        detail = farm.json("show", "s")
        assert detail["trials"][0]["status"] == "ERROR", f"{detail}{farm}"


def test_f22_killers_of_three_searches_end_and_their_neighbours_finish(tmp_path: Path) -> None:
    print(kill_nodes(tmp_path, limit=0, nodes=2, trials=3, killers=1, steps=15))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("limit", "nodes"), [(0, 1), (1, 3), (2, 3)])
def test_f22_soak_of_killers_on_few_nodes_harms_no_innocent_trial(
    tmp_path: Path, limit: int, nodes: int
) -> None:
    told = kill_nodes(
        tmp_path, limit=limit, nodes=nodes, trials=6, killers=2, steps=40, seed=limit, within=1500.0
    )
    print(told)
