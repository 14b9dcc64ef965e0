"""The store is a shared folder that one machine of a farm has not mounted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.farms.doctor_answers import Examination
from tests.support.farms.farm_service import FarmService, Here, Search, farm_service
from tests.support.small_disk import namespace, on_small_disk
from tests.support.waiting import eventually
from tunemq_scheduler.security.findings import Finding, FindingLevel

pytestmark = [pytest.mark.faults, pytest.mark.integration]


class Elsewhere:
    """A mount namespace in which an empty file system hides a folder, or it is read-only."""

    def __init__(self, folder: Path, *, is_read_only: bool = False) -> None:
        waits = ["sh", "-c", "echo && cat"]
        if is_read_only:
            self._show = ["mount", "-o", "remount,bind,rw"]
            again = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
            command = [*namespace(), "sh", "-c", again, str(folder), *waits]
        else:
            self._show = ["umount"]
            command = on_small_disk(folder, waits, options="size=1m")
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline()
        self._enter = ["nsenter", "--target", str(self._holder.pid), "--user", "--mount"]
        self._enter.append("--preserve-credentials")
        self._folder = folder

    def machine(self) -> Here:
        """A machine whose processes see that file system."""
        return Here(self._enter)

    def mount_the_store(self) -> None:
        """Show the folder as it is on all other machines."""
        subprocess.run([*self._enter, *self._show, str(self._folder)], check=True)

    def close(self) -> None:
        """End the process that keeps the namespace."""
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[tuple[FarmService, Elsewhere, Path]]:
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "farm").mkdir()
    with (
        contextlib.closing(Elsewhere(store)) as elsewhere,
        farm_service(tmp_path / "farm", starts=False) as service,
    ):
        service.results = store
        service.start_scheduler("--store", str(store))
        service.add_worker("good", 1)
        service.add_worker("unmounted", 1, machine=elsewhere.machine())
        service.has_nodes("good", "unmounted")
        yield service, elsewhere, store


def test_trial_waits_where_the_store_is_not_mounted_and_continues_when_it_is(farm):
    service, elsewhere, store = farm
    service.submit(Search(name="first", trials=10, steps=2, failures=0))
    # The other node does the rest.
    service.wait_for_steps("first", trials=9, steps=2)
    reason = f"there is no folder {store}/blobs on this machine"

    def is_named_by(*command: str) -> bool:
        said = service.run(*command).stdout
        return "store requests of node unmounted have been failing" in said and reason in said

    eventually(lambda: is_named_by("why", "first"), within=30, message=lambda: str(service))
    eventually(lambda: is_named_by("doctor"), within=30, message=lambda: str(service))
    rows = service.json("show", "first")["trials"]
    (waiting,) = (row["trial"] for row in rows if row["status"] == "RUNNING")
    assert reason in service.tunemq("why", f"first/{waiting}")

    elsewhere.mount_the_store()
    service.wait_for("first", "FINISHED")
    service.check_results("first")
    service.check_steps("first")


def test_node_that_does_not_see_the_store_in_time_costs_no_trial(farm):
    service, _, _ = farm
    waits = "sync_config=tune.SyncConfig(sync_timeout=1),"
    service.submit(Search(name="first", trials=20, steps=2, step_s=0.5, failures=0, run=waits))
    service.wait_for("first", "FINISHED")
    service.check_results("first")
    assert "node unmounted on " in (output := service.tunemq("logs", "first"))
    assert "is set aside" in output


def test_doctor_folder_store_of_a_running_scheduler_is_missing_reports_a_problem(tmp_path: Path):
    store = tmp_path / "store"
    (tmp_path / "farm").mkdir()
    with farm_service(tmp_path / "farm", starts=False) as service:
        service.start_scheduler("--store", str(store))
        service.add_worker("one", 1)
        service.has_nodes("one")

        def found(*more: str) -> Finding:
            said = service.run("doctor", "--json", *more)
            answer = msgspec.json.decode(said.stdout, type=Examination)
            (one,) = (one for one in answer.findings if one.check == "store")
            return one

        assert found().level is FindingLevel.OK
        store.rename(tmp_path / "moved")
        for more in ((), ("--store", str(store))):
            finding = found(*more)
            assert finding.level is FindingLevel.PROBLEM, finding
            assert f"{store} does not exist on this machine" in finding.what
        # An unknown folder may be one that a scheduler is about to use.
        assert found("--store", str(tmp_path / "other")).level is FindingLevel.WARNING
        (tmp_path / "moved").rename(store)


def test_trial_waits_where_the_store_is_read_only_and_continues_when_it_is_not(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "farm").mkdir()
    with (
        contextlib.closing(Elsewhere(store, is_read_only=True)) as elsewhere,
        farm_service(tmp_path / "farm", starts=False) as service,
    ):
        service.results = store
        service.start_scheduler("--store", str(store))
        service.add_worker("readonly", 1, machine=elsewhere.machine())
        service.submit(Search(name="first", trials=1, steps=2, failures=0))
        eventually(
            lambda: "1 of its trials wait for the store" in service.run("why", "first").stdout,
            within=60,
            message=lambda: str(service),
        )
        eventually(lambda: "Read-only file system" in service.tunemq("logs", "first"))
        assert service.rows()["first"].state == "RUNNING"
        elsewhere.mount_the_store()
        service.wait_for("first", "FINISHED")
        service.check_results("first")
        service.check_steps("first")
