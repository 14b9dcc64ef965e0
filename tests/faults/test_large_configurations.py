"""Large configurations of one search cost the other searches of a farm nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.farms.farm_service import Search, farm_service

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: Nine of these are more than one assignment to a node may have.
LARGE = 'OPTIONS["data"] = "y" * 1_000_000'


def test_node_gets_large_configurations_in_parts_and_after_a_restart_again(tmp_path: Path):
    with farm_service(tmp_path) as farm:
        farm.add_worker("one", 10)
        farm.has_nodes("one")
        farm.submit(Search(name="large", trials=9, steps=2, code=LARGE, has_gate=True))
        farm.submit(Search(name="small", trials=2, steps=2))
        farm.wait_for("small", "FINISHED")
        farm.open_gate("large", 1)
        farm.wait_for_steps("large", 9, 1)

        farm.kill_scheduler()
        farm.start_scheduler()
        farm.submit(Search(name="later", trials=2, steps=2))
        farm.wait_for("later", "FINISHED")
        farm.open_gate("large", 2)
        farm.wait_for("large", "FINISHED")
        farm.check_steps("large")
        assert "refused" not in (farm.folder / "one" / "worker.log").read_text()


def test_search_with_a_configuration_that_no_node_can_take_fails_alone(tmp_path: Path):
    with farm_service(tmp_path) as farm:
        farm.add_worker("one", 2)
        farm.has_nodes("one")
        farm.submit(Search(name="huge", code='OPTIONS["data"] = "y" * (30 * 2**20)'))
        huge = farm.wait_for("huge", "FAILED", within=60)
        assert "tune.with_parameters()" in huge.reason
        farm.submit(Search(name="small", trials=2, steps=2))
        farm.wait_for("small", "FINISHED")
