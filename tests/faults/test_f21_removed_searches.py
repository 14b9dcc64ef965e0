"""`tunemq rm --files` while the store is away names the remaining files and how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.stores.object_servers import ObjectServer, running_minio

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectServer]:
    with running_minio(tmp_path / "minio") as server:
        yield server


@pytest.fixture
def farm(tmp_path: Path, store: ObjectServer) -> Iterator[FarmService]:
    with farm_service(tmp_path, starts=False) as farm:
        farm.of_home = dict.fromkeys(("head", "laptop", "one"), store.environ)
        yield farm


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_f21_rm_while_the_store_is_away_names_remaining_files_and_can_be_repeated(
    farm, store, is_silent
):
    bucket = store.create_bucket()
    farm.start_scheduler("--store", f"s3://{bucket}/searches")
    farm.add_worker("one")
    farm.submit(Search(name="search", trials=1, steps=3))
    farm.wait_for("search", "FINISHED")
    (store.freeze if is_silent else store.kill)()
    refused = farm.run("rm", "--files", "--yes", "search")
    assert refused.returncode == 1, refused
    assert "tunemq rm --files search" in refused.stderr
    if is_silent:
        assert "still being removed" in refused.stderr
        assert "is being removed" in farm.run("resume", "search").stderr
        store.thaw()
    else:
        assert f"s3://{bucket}/searches/search is not removed" in refused.stderr
        store.start()
    assert farm.rows()["search"].state == "FINISHED"
    done = farm.tunemq("rm", "--files", "--yes", "search")  # as it says
    assert done.startswith("search is removed with its results and checkpoints; if a node still")
    assert done.endswith(f"they stay in s3://{bucket}/searches/search\n")
    assert farm.rows() == {}
    assert not (farm.results / "search").exists()
    with store.objects(bucket, "searches/search") as objects:
        assert list(objects.list()) == []


def test_f21_search_at_a_place_below_another_one_outlives_that_ones_end_and_removal(farm, store):
    place = f"s3://{store.create_bucket()}/searches"
    farm.start_scheduler("--store", place)
    farm.add_worker("one")
    inner = Search(name="inner", trials=1, steps=3, run=f"storage_path={place + '/outer'!r},")
    farm.submit(inner)
    farm.wait_for("inner", "FINISHED")
    whole = farm.tunemq("checkpoints", "verify", f"{place}/outer/inner")
    farm.submit(Search(name="outer", trials=1, steps=3, failures=9, has_gate=True))
    farm.open_gate("outer", 1)
    farm.wait_for_steps("outer", 1, 1)
    farm.kill_scheduler()  # so that its end looks for what that left in the store
    farm.start_scheduler("--store", place)
    farm.open_gate("outer", 3)
    farm.wait_for("outer", "FINISHED")
    assert farm.tunemq("checkpoints", "verify", f"{place}/outer/inner") == whole

    farm.tunemq("rm", "--files", "--yes", "outer")

    assert farm.tunemq("checkpoints", "verify", f"{place}/outer/inner") == whole
    farm.check_results("inner")


@pytest.mark.slow
def test_f21_search_whose_checkpoints_cannot_be_removed_can_be_forgotten(farm, store):
    farm.start_scheduler("--store", f"s3://{store.create_bucket()}/searches")
    farm.add_worker("one")
    farm.submit(Search(name="search", trials=1, steps=3))
    farm.wait_for("search", "FINISHED")
    store.freeze()
    assert farm.run("rm", "--files", "--yes", "search").returncode == 1
    assert "its files remain" in farm.tunemq("rm", "search")
    assert farm.rows() == {}
    store.thaw()
