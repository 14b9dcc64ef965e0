"""F22: a trial on a farm with a results folder writes files with the names of its result files."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path) as farm:
        yield farm


def test_f22_search_with_a_foreign_table_continues_after_a_restart_of_the_scheduler(
    farm: FarmService,
) -> None:
    farm.add_worker("one", 2)
    farm.submit(Search(name="tables", has_gate=True))
    farm.open_gate("tables", 4)
    farm.wait_for_steps("tables", 2, 4)
    farm.kill_scheduler()
    empty, foreign = sorted(farm.results.glob("tables/*/progress.csv"))
    empty.write_text("")
    foreign.write_text("fps,reward\n1,2\n")
    farm.start_scheduler()
    farm.open_gate("tables", 10)

    farm.wait_for("tables", "FINISHED")

    farm.check_results("tables")
    for path in (empty, foreign):
        with path.open(newline="") as file:
            steps = [int(row["training_iteration"]) for row in csv.DictReader(file)]
        assert steps == list(range(1, 11))
    assert f"changed {foreign}. They were rebuilt" in farm.said()
    assert foreign.with_name("progress.foreign.csv").read_text() == "fps,reward\n1,2\n"
