"""A scheduler that is restarted with another store does not end the searches of the first one."""

from __future__ import annotations

import pytest

from tests.support.farms.farm_service import Search, farm_service
from tests.support.stores.object_servers import running_minio
from tests.support.waiting import eventually

pytestmark = pytest.mark.faults


def test_search_of_another_store_waits_and_continues_when_that_store_is_back(tmp_path):
    with (
        running_minio(tmp_path / "minio") as server,
        farm_service(tmp_path, starts=False) as farm,
    ):
        farm.of_home = dict.fromkeys(("head", "laptop", "one"), server.environ)
        theirs, ours = (f"s3://{server.create_bucket(name)}/farm" for name in ("theirs", "ours"))
        farm.start_scheduler("--store", ours)
        farm.add_worker("one")
        farm.submit(Search(name="exp", trials=2, steps=30, save_every=10, has_gate=True))
        farm.open_gate("exp", 10)
        farm.wait_for_steps("exp", 2, 10)

        farm.kill_scheduler()
        farm.start_scheduler("--store", theirs)

        eventually(
            lambda: (row := farm.rows().get("exp")) is not None and "may not use" in row.reason,
            within=60,
            message=lambda: str(farm),
        )
        assert farm.rows()["exp"].state == "RUNNING"
        why = farm.tunemq("why", "exp")
        assert "waits: " in why
        assert "start the scheduler with that --store again" in " ".join(why.split())
        farm.open_gate("exp", 20)
        farm.wait_for_steps("exp", 2, 20)  # trials run on

        farm.kill_scheduler()
        farm.start_scheduler("--store", ours)
        farm.open_gate("exp", 30)
        assert "may not use" not in farm.wait_for("exp", "FINISHED").reason
        farm.check_results("exp")
        farm.check_steps("exp")
