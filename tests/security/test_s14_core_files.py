"""S14: a process that crashes leaves none of the farm's keys on the disk.

Where the system writes core files, the test makes every process of a farm crash and searches the
files. A process that holds keys leaves no core file; a trial's core file contains no keys.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.farm_support import process_tree_of
from tests.security.canaries import Canaries, files_below
from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.farm_service import FarmService, Here, Search
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.integration,
    pytest.mark.security,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

#: The command prefix that allows core files, as far as the machine does.
LEAVING = ("sh", "-c", 'ulimit -c "$(ulimit -Hc)"; exec "$@"', "sh")


class CrashingFarm:
    """A farm whose processes may all leave core files in their working folders."""

    def __init__(self, folder: Path, store: ObjectServer, bucket: str) -> None:
        password = secrets.token_hex(20)
        (folder / "redis").mkdir()
        self.redis = TcpRedis(folder / "redis", password)
        (folder / "farm").mkdir()
        self.farm = FarmService(folder / "farm", self.redis.url, Here(LEAVING), Here(LEAVING))
        self.farm.add_machine = lambda _name: Here(LEAVING)
        self.farm.of_home = dict.fromkeys(("head", "laptop", "one"), store.environ)
        self.farm.start_scheduler("--store", store.address(bucket, "farm"))
        self.farm.add_worker("one")
        self.canaries = Canaries({"password": password, "store's key": store.secret_key})

    def close(self) -> None:
        """End it."""
        self.farm.close()
        self.redis.end()


@pytest.fixture
def crashing(tmp_path: Path, minio: ObjectServer, bucket: str) -> Iterator[CrashingFarm]:
    crashes(tmp_path / "control")
    farm = CrashingFarm(tmp_path, minio, bucket)
    yield farm
    farm.close()


def crashes(folder: Path) -> None:
    """Check that a crash leaves a core file here that contains a key; else skip the test."""
    folder.mkdir()
    key = secrets.token_hex(20)
    done = subprocess.run(
        [*LEAVING, sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"],
        cwd=folder,
        env={**os.environ, "KEY": key},
        check=False,
    )
    assert done.returncode == -signal.SIGSEGV
    found = Canaries({"key": key})
    found.look_into("core", cores_in(folder))
    if not found.found:
        pytest.skip("this machine leaves no core files beside a program that crashes")


def cores_in(folder: Path) -> list[Path]:
    """The core files below a folder."""
    return [path for path in files_below(folder) if path.name.startswith("core")]


def test_s14_no_process_of_a_farm_leaves_a_core_file_with_a_key_in_it(crashing, tmp_path):
    farm = crashing.farm
    farm.has_nodes("one")
    farm.submit(Search(name="exp", trials=1, steps=500, save_every=5, has_gate=True))
    farm.open_gate("exp", 499)  # not to its end: all are to be there when they crash
    farm.wait_for_steps("exp", trials=1, steps=6)
    command = [*farm.command("logs", "-f", "exp")]
    asking = farm.laptop.start(command, farm.environ("laptop"), farm.folder / "laptop" / "logs")
    eventually(lambda: (farm.folder / "laptop" / "logs").stat().st_size)
    processes: list[psutil.Process] = []
    names: dict[int, str] = {}

    def are_there() -> bool:
        processes.clear()
        names.clear()
        for top in (asking, farm.scheduler, farm.workers["one"]):
            for pid in process_tree_of(top.pid):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    process = psutil.Process(pid)
                    names[pid] = process.name()
                    processes.append(process)
        return {"tunemq-fork", "tunemq-transfer"} <= set(names.values()) and len(processes) >= 8

    # The uploader starts with the first checkpoint, and gets its name a moment later.
    eventually(are_there, every=0.05, message=lambda: str(names))
    processes.sort(key=lambda one: one.create_time(), reverse=True)
    for number, process in enumerate(processes):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with one that crashed before
            process.send_signal(signal.SIGSEGV)
        eventually(lambda: has_ended(process), within=60)  # noqa: B023
        # Else the next one would write over it.
        for core in cores_in(tmp_path / "farm"):
            crashing.canaries.look(f"core {number}", names[process.pid], core.read_bytes())
            core.unlink()
    assert crashing.canaries.found == {}
    for top in (asking, farm.scheduler, farm.workers["one"]):
        assert top.wait() == -signal.SIGSEGV


def has_ended(process: psutil.Process) -> bool:
    """Whether it has, though its parent may not have taken notice."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
