"""A farm with keys works as one without, also while an admin changes the keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.stores.object_servers import running_minio
from tests.support.waiting import eventually
from tunemq_scheduler.security.key_folder import KeyFolder
from tunemq_shared.signing.key_files import KEYS_VARIABLE

pytestmark = [pytest.mark.security, pytest.mark.integration]

REASONS = {"unsigned", "signed_without_keys", "unknown_key", "unknown_submitter", "altered"}
#: The key file of each machine.
FILES = {"head": "scheduler.toml", "one": "worker.toml", "two": "worker.toml", "laptop": "ada.toml"}


class Keys:
    """The keys of a farm, and their copies on its machines."""

    def __init__(self, farm: FarmService) -> None:
        self.farm = farm
        self.folder = KeyFolder(str(farm.folder / "head" / "keys"))
        self.folder.create(["ada"])
        self.copy()
        for machine in FILES:
            farm.of_home[machine] = {KEYS_VARIABLE: str(self.path(machine))}

    def path(self, machine: str) -> Path:
        """Where a machine has its file."""
        return self.farm.folder / machine / "farm-keys.toml"

    def copy(self) -> None:
        """Copy each file to where it is used, as `scp -p` does."""
        for machine, file in FILES.items():
            self.path(machine).parent.mkdir(exist_ok=True)
            shutil.copy2(self.folder.path / file, self.path(machine))

    def are_read(self, times: int) -> bool:
        """Whether all that run have read their files again so often."""
        logs = [self.farm.said(), *(self.said_by(name) for name in self.farm.workers)]
        return all(log.count("was read again") >= times for log in logs)

    def said_by(self, worker: str) -> str:
        """The log of a worker."""
        return (self.farm.folder / worker / "worker.log").read_text()


def distrusted(farm: FarmService) -> set[tuple[str, str]]:
    """Messages rejected for their signature, by kind and reason."""
    rows = farm.json("nodes")["rejected"]
    # Honest nodes cause the others, too: they resend messages that may have been lost.
    return {(row["kind"], row["reason"]) for row in rows if row["reason"] in REASONS}


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path, starts=False) as farm:
        yield farm


@pytest.fixture
def keys(farm: FarmService, monkeypatch: pytest.MonkeyPatch) -> Keys:
    keys = Keys(farm)
    monkeypatch.setenv(KEYS_VARIABLE, str(keys.path("laptop")))  # for requests of this process
    farm.start_scheduler()
    for name in ("one", "two"):
        farm.add_worker(name)
    farm.has_nodes("one", "two")
    return keys


def test_a_search_runs_while_all_keys_are_changed_and_the_scheduler_is_killed(farm, keys):
    farm.submit(Search(name="exp", trials=4, steps=12, has_gate=True))
    farm.open_gate("exp", 3)
    farm.wait_for_steps("exp", trials=4, steps=3)
    for number, change in enumerate((keys.folder.rotate, keys.folder.promote), start=1):
        change()
        keys.copy()
        eventually(
            lambda number=number: keys.are_read(number), within=60, message=lambda: str(farm)
        )
        farm.open_gate("exp", 3 + 2 * number)
        farm.wait_for_steps("exp", trials=4, steps=3 + 2 * number)
    assert distrusted(farm) == set()
    farm.kill_scheduler()
    farm.start_scheduler()
    farm.has_nodes("one", "two")
    keys.folder.drop()
    keys.copy()
    eventually(lambda: keys.are_read(3), within=60, message=lambda: str(farm))
    farm.open_gate("exp", 12)
    row = farm.wait_for("exp", "FINISHED")

    assert row.owner == "ada"
    farm.check_results("exp")
    farm.check_steps("exp")
    assert distrusted(farm) == set()


def test_searches_continue_after_the_keys_of_journals_were_replaced_at_once(
    farm, monkeypatch, tmp_path
):
    """As after a leak: rotate, promote and drop, and a restart of the scheduler."""
    with running_minio(tmp_path / "minio") as server:
        keys = Keys(farm)
        monkeypatch.setenv(KEYS_VARIABLE, str(keys.path("laptop")))
        for machine in FILES:
            farm.of_home[machine] = {**farm.of_home[machine], **server.environ}
        options = ("--store", f"s3://{server.create_bucket()}/farm")
        farm.start_scheduler(*options)
        farm.add_worker("one")
        for name in ("runs", "paused"):
            farm.submit(Search(name=name, trials=1, steps=12, has_gate=True))
            farm.open_gate(name, 3)
            farm.wait_for_steps(name, trials=1, steps=3)
        farm.tunemq("pause", "paused")
        farm.wait_for("paused", "PAUSED")

        for change in (keys.folder.rotate, keys.folder.promote, keys.folder.drop):
            change(["journals"])
        keys.copy()
        farm.kill_scheduler()
        farm.start_scheduler(*options)
        farm.tunemq("resume", "paused")
        for name in ("runs", "paused"):
            farm.open_gate(name, 12)
            farm.wait_for(name, "FINISHED")
            farm.check_results(name)


def test_client_and_worker_without_keys_are_rejected(farm, keys):
    farm.of_home["stranger"] = {}
    farm.add_worker("stranger")
    hers = farm.of_home.pop("laptop")
    done = farm.run("ls")
    farm.of_home["laptop"] = hers
    assert done.returncode == 1
    assert "accepts signed requests only" in done.stderr
    eventually(lambda: ("registration", "unsigned") in distrusted(farm), within=60, every=0.5)
    assert ("request", "unknown_submitter") in distrusted(farm)
    assert set(farm.nodes()) == {"one", "two"}

    farm.submit(Search(name="short"))
    farm.wait_for("short", "FINISHED")
    farm.check_results("short")
