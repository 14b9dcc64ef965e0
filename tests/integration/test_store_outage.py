"""A lost store shows in the metrics of a running farm, and in `tunemq why`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_farm_metrics import scrape
from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.stores.object_servers import ObjectServer, running_minio
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[tuple[FarmService, ObjectServer]]:
    (tmp_path / "farm").mkdir()
    with (
        running_minio(tmp_path / "minio") as server,
        farm_service(tmp_path / "farm", starts=False) as farm,
    ):
        farm.of_home = dict.fromkeys(("head", "laptop", "one"), server.environ)
        address = server.address(server.create_bucket(), "farm")
        farm.start_scheduler("--metrics", "127.0.0.1:0", "--store", address)
        farm.add_worker("one")
        farm.has_nodes("one")
        yield farm, server


def test_store_away_shows_in_metrics_and_why_until_it_is_back(
    farm: tuple[FarmService, ObjectServer],
):
    service, server = farm
    service.submit(
        Search(
            name="first",
            trials=1,
            steps=8,
            has_gate=True,
            run="checkpoint_config=tune.CheckpointConfig(num_to_keep=2),",
        )
    )
    service.open_gate("first", 2)
    newest: dict[str, float] = {}

    def is_said(**least: float) -> bool:
        newest.clear()
        newest.update(scrape(service))
        return all(newest.get(names[name], -1.0) >= value for name, value in least.items())

    names = {
        "requests": "tunemq_store_requests_total{node=one}",
        "ours": "tunemq_store_requests_total{node=}",
        "failures": "tunemq_store_failures_total{node=one}",
        "failing": "tunemq_store_failing_seconds{node=one}",
        "queue": "tunemq_store_queue_bytes{node=one}",
        "waiting": "tunemq_trials_waiting_for_store{experiment=first}",
        "behind": "tunemq_journal_copy_behind_seconds{experiment=first}",
        "disk": "tunemq_head_disk_free_bytes{disk=results}",
    }
    eventually(
        lambda: is_said(requests=4.0, ours=4.0, disk=1.0, failures=0.0, waiting=0.0),
        within=120,
        message=lambda: f"{newest}{service}",
    )
    assert newest[names["failures"]] == 0.0

    server.kill()
    service.open_gate("first", 8)
    eventually(
        lambda: is_said(failures=1.0, failing=1.0, queue=1.0, waiting=1.0, behind=1.0),
        within=120,
        message=lambda: f"{newest}{service}",
    )
    said = service.tunemq("why", "first")
    assert "1 of its trials wait for the store" in said
    assert "store requests of node one have been failing for" in said
    assert server.url in said
    trial = newest_trial(service)
    assert "waits for the store" in service.tunemq("why", f"first/{trial}")

    server.start()
    service.wait_for("first", "FINISHED")
    eventually(
        lambda: is_said() and newest.get(names["failing"]) == 0.0 == newest.get(names["queue"]),
        within=120,
        message=lambda: f"{newest}{service}",
    )


def test_submit_says_that_the_store_is_away_and_continues_when_it_is_back(
    farm: tuple[FarmService, ObjectServer],
):
    service, server = farm
    script = str(service.write(Search(name="late", trials=1, steps=1)))
    server.kill()
    submit = subprocess.Popen(
        service.command("submit", script, "--name", "late", "--detach"),
        env=service.environ("laptop"),
        cwd=service.folder / "laptop",
        stderr=subprocess.PIPE,
        text=True,
    )
    with submit:
        assert submit.stderr is not None
        said = submit.stderr.readline()
        assert server.url in said
        assert "Retrying for up to 120 s." in said
        server.start()
        submit.stderr.read()
    assert submit.returncode == 0
    service.wait_for("late", "FINISHED")


def newest_trial(service: FarmService) -> str:
    """Return the id of the only trial."""
    found = json.loads(service.tunemq("show", "first", "--json"))
    return str(found["trials"][0]["trial"])
