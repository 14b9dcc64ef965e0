"""S07: a farm whose roles have only the shipped rights works completely over TLS."""

from __future__ import annotations

import pytest

from tests.support.farms.farm_service import Search, farm_service
from tests.support.stores.object_servers import Certificate, minio_program, running_minio
from tests.support.stores.store_roles import make_roles
from tests.support.waiting import eventually, need

pytestmark = [
    pytest.mark.integration,
    pytest.mark.security,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def test_s07_farm_with_the_shipped_policies_and_tls_works(tmp_path):
    need("minio (`make minio` builds it)", minio_program())
    certificate = Certificate(tmp_path / "certificate")
    (tmp_path / "farm").mkdir()
    with (
        running_minio(tmp_path / "minio", certificate=certificate) as server,
        farm_service(tmp_path / "farm", starts=False) as farm,
    ):
        bucket = server.create_bucket()
        roles = make_roles(server, bucket)
        farm.of_home = {
            "head": roles["scheduler"],
            "laptop": roles["submitter"],
            "one": roles["worker"],
        }
        address = server.address(bucket, "farm")
        farm.start_scheduler("--store", address)
        farm.add_worker("one")
        farm.has_nodes("one")
        assert "problem" not in farm.said()
        farm.submit(
            Search(
                name="first",
                steps=12,
                save_every=3,
                run="checkpoint_config=tune.CheckpointConfig(num_to_keep=2),",
            )
        )
        farm.wait_for("first", "FINISHED")
        farm.check_results("first")
        place = server.address(bucket, "farm/first")
        assert "4 checkpoints" in farm.tunemq("checkpoints", "list", place)
        assert "4 of 4 checkpoints are whole" in farm.tunemq("checkpoints", "verify", place)
        rejected = farm.run("checkpoints", "rm", "--yes", place, "chain")
        assert rejected.returncode != 0
        client = server.client()
        kept = {one.object_name for one in client.list_objects(bucket, recursive=True)}
        # The scheduler has deleted all but the two checkpoints that each trial keeps.
        assert len([name for name in kept if name.endswith("manifest.json")]) == 4, kept
        farm.tunemq("rm", "--files", "--yes", "first")
        # Removal follows the answer: first the folder, then the objects in the bucket.
        eventually(lambda: not list(client.list_objects(bucket, "farm/first/", recursive=True)))
        for log in farm.folder.glob("*/**/*.log"):
            assert "not allowed to do that" not in log.read_text(errors="replace"), log
