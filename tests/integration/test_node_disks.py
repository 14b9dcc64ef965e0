"""A node whose working folder accepts no files: its reports, and the farm's reaction."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_farm_metrics import scrape
from tests.support.farms.farm_service import FarmService, Here, Search, farm_service
from tests.support.small_disk import on_small_disk, with_small_disk
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

INODES = 3000


class DiskOfANode:
    """A disk with few inodes, in a mount namespace that exists until `close`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        command = on_small_disk(
            folder, ["sh", "-c", "echo && cat"], options=f"size=600m,nr_inodes={INODES}"
        )
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline()
        #: The path of the disk as seen from outside the namespace.
        self._folder = Path(f"/proc/{self._holder.pid}/root{folder}")

    def machine(self) -> Here:
        """A machine whose processes see the disk."""
        target = ["--target", str(self._holder.pid)]
        return Here(["nsenter", *target, "--user", "--mount", "--preserve-credentials"])

    def fill(self) -> None:
        """Use up all inodes."""
        filler = self._folder / "filler"
        filler.mkdir()
        with contextlib.suppress(OSError):
            for number in range(INODES):
                (filler / str(number)).touch()

    def free(self) -> None:
        """Free inodes again."""
        for path in (self._folder / "filler").iterdir():
            path.unlink()

    def close(self) -> None:
        """End the namespace."""
        self._holder.communicate()


@pytest.mark.parametrize(
    ("options", "inodes", "problem"),
    [
        ("size=1g,nr_inodes=1", "0.0", "No space left on device"),
        ("size=1g,ro", r"[1-9]\d*\.0", "Read-only file system"),
    ],
)
def test_machine_watch_says_why_the_working_folder_takes_no_file(
    tmp_path: Path, options: str, inodes: str, problem: str
) -> None:
    program = (
        "import sys\n"
        "from tunemq_shared.health.node_metrics import decode_node_metrics\n"
        "from tunemq_workers.system.node_metrics_collector import MachineWatch\n"
        "from tests.support.waiting import eventually\n"
        "place = sys.argv[1]\n"
        "watch = MachineWatch('1', place, folders=(place + '/blobs', place + '/cache'))\n"
        "watch.start()\n"
        "eventually(lambda: decode_node_metrics(watch.said()).disk_problem)\n"
        "print(decode_node_metrics(watch.said()))\n"
    )
    disk = tmp_path / "disk"
    done = with_small_disk(disk, [sys.executable, "-c", program, str(disk)], options=options)
    assert f"disk_problem='{problem}: no file can be made in {disk}'" in done.stdout, done
    assert re.search(f"disk_free_inodes={inodes}", done.stdout), done.stdout


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskOfANode]:
    disk = DiskOfANode(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.fixture
def farm(tmp_path: Path, minio: ObjectServer, disk: DiskOfANode) -> Iterator[FarmService]:
    (tmp_path / "farm").mkdir()
    with farm_service(tmp_path / "farm", starts=False) as farm:
        farm.of_home = dict.fromkeys(("head", "laptop", "one"), minio.environ)
        store = minio.address(minio.create_bucket(), "farm")
        farm.start_scheduler("--metrics", "127.0.0.1:0", "--store", store)
        workdir = str(tmp_path / "disk" / "work")
        farm.add_worker("one", 2, "--workdir", workdir, machine=disk.machine())
        farm.has_nodes("one")
        yield farm


def test_f16_a_search_waits_for_a_node_whose_disk_has_no_inodes(
    farm: FarmService, disk: DiskOfANode
) -> None:
    disk.fill()
    # No trial fails, whether it is placed before or after the node notices the full disk.
    farm.submit(Search(name="exp", trials=6, steps=2))

    eventually(lambda: farm.nodes()["one"].state == "set aside", within=60, message=farm.__str__)
    assert "No space left on device" in farm.tunemq("nodes")
    assert "node one is set aside" in farm.tunemq("why", "exp")
    eventually(lambda: scrape(farm).get("tunemq_node_disk_unwritable{node=one}") == 1)
    assert scrape(farm)["tunemq_nodes{state=set aside}"] == 1
    assert scrape(farm)["tunemq_node_disk_free_inodes{node=one}"] == 0
    done = farm.run("doctor")
    assert done.returncode == 1, done
    assert re.search(r"problem +node-disk\s+no trial begins on node one: ", done.stdout), (
        done.stdout
    )
    assert farm.rows()["exp"].state == "RUNNING"
    disk.free()
    farm.wait_for("exp", "FINISHED")
    assert farm.nodes()["one"].state == "ready"
    farm.check_results("exp")
