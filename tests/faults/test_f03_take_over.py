"""Another machine resumes a farm's experiment from the journal copy in the store."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.farms.farm_service import SUPERSEDED, FarmService, Search, farm_service
from tests.support.keys import key_folder
from tests.support.saved_tuners import changed_tuner
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tests.unit.scheduler.journals import HEADER
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.storage.last_run import RunRecord
from tunemq_shared.broker import redis_keys
from tunemq_shared.code.config_packing import PICKLED
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.key_files import journal_signer

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def farm(tmp_path: Path, minio: ObjectServer) -> Iterator[FarmService]:
    with farm_service(tmp_path, starts=False) as farm:
        farm.of_home = dict.fromkeys(("head", "laptop", "one", "two"), minio.environ)
        yield farm


@pytest.fixture
def storage(minio: ObjectServer, bucket: str) -> str:
    return f"s3://{bucket}/searches"


def files_of(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def lose_the_machine(farm: FarmService) -> None:
    """Kill the scheduler, and remove the data on its disk."""
    farm.kill_scheduler()
    # Running trials may still write into the folder: rename it before deleting it.
    farm.results.rename(farm.folder / "gone")
    shutil.rmtree(farm.folder / "gone", ignore_errors=True)


def start_elsewhere(farm: FarmService, *options: str) -> subprocess.Popen[bytes]:
    """Start a scheduler with another results folder, as on another machine."""
    farm.results = farm.folder / f"elsewhere-{len(list(farm.folder.glob('elsewhere-*')))}"
    farm.results.mkdir()
    return farm.start_scheduler("--results", str(farm.results), *options)


def turns_of(farm: FarmService, storage: str, name: str) -> set[str]:
    """The number of turns of a search's journal, and that of its copy if it is another one."""
    said = [
        farm.run("journal", "check", where).stdout
        for where in (f"{storage}/{name}", str(farm.results / name))
    ]
    return {re.search(r"(\d+) turns", text)[1] for text in said}


def submit_again(farm: FarmService, name: str) -> None:
    script = farm.folder / "laptop" / name / "search.py"
    farm.tunemq("submit", str(script), "--name", name, "--detach")


@pytest.mark.parametrize("release", ["store", pytest.param("local", marks=pytest.mark.soak)])
def test_f03_another_machine_takes_over_and_no_reported_result_is_lost(farm, storage, release):
    options = ("--store", storage, "--journal-release", release)
    farm.start_scheduler(*options)
    farm.add_worker("one")
    farm.add_worker("two")
    # The gate: none of the first four trials ends earlier, and none of the others is starting.
    search = {"trials": 6, "steps": 60, "save_every": 5, "step_s": 0.1, "has_gate": True}
    farm.submit(Search(name="search", failures=0, **search))
    farm.open_gate("search", 40)
    farm.wait_for_steps("search", 4, 25)
    lose_the_machine(farm)
    farm.open_gate("search", 60)
    start_elsewhere(farm, *options, "--take-over", f"{storage}/search")
    submit_again(farm, "search")
    farm.wait_for("search", "FINISHED", within=150)
    farm.check_results("search")
    repeated = [len(done) - len(set(done)) for done in farm.steps("search").values()]
    if release == "store":  # the workers still had the turns that were not copied
        assert repeated == [0] * 6, farm


def test_f03_search_of_a_scheduler_that_was_stopped_continues_elsewhere_undisturbed(farm, storage):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    farm.submit(Search(name="search", trials=2, steps=600, step_s=0.02, failures=0))
    farm.wait_for_steps("search", 2, 50)
    farm.scheduler.terminate()
    farm.scheduler.wait()
    farm.head.processes.remove(farm.scheduler)
    assert len(turns_of(farm, storage, "search")) == 1, "the worker has deleted events it lacks"
    farm.results.rename(farm.folder / "gone")
    start_elsewhere(farm, "--store", storage, "--take-over", f"{storage}/search")
    submit_again(farm, "search")
    farm.wait_for("search", "FINISHED", within=150)
    farm.check_results("search")
    farm.check_steps("search")
    assert "does not have all of its events" not in farm.said()


def test_f03_take_over_of_a_search_whose_copy_lacks_events_leaves_other_searches_alone(
    farm, storage, minio, bucket
):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one", cpus=4)
    names = ("behind", "whole")
    for name in names:
        farm.submit(Search(name=name, trials=2, steps=60, failures=0, has_gate=True))
    for steps in (10, 20, 30):
        for name in names:
            farm.open_gate(name, steps)
            farm.wait_for_steps(name, 2, steps)
            eventually(lambda name=name: len(turns_of(farm, storage, name)) == 1, within=30)
    lose_the_machine(farm)
    with minio.objects(bucket, "searches/behind") as objects:
        pieces = [one.key for one in objects.list("journal/") if ".turns/" in one.key]
        objects.delete(pieces[-2:])
    addresses = [f"--take-over={storage}/{name}" for name in names]
    start_elsewhere(farm, "--store", storage, *addresses)
    for name in names:
        submit_again(farm, name)
        farm.open_gate(name, 60)
    for name in names:
        farm.wait_for(name, "FINISHED", within=200)
        farm.check_results(name)
    farm.check_steps("whole")
    said = farm.said()
    assert "behind: node one has deleted events that this search lacks" in said, farm
    assert "Node one" not in said


def test_f03_lost_search_keeps_its_trials_and_queue_until_resubmitted(farm, storage):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    farm.submit(Search(name="lost", trials=2, steps=40, save_every=5, has_gate=True))
    farm.open_gate("lost", 20)
    farm.wait_for_steps("lost", 2, 20)
    lose_the_machine(farm)
    start_elsewhere(farm, "--store", storage, "--take-over", f"{storage}/lost")
    farm.submit(Search(name="other", trials=2, steps=3))
    farm.wait_for("other", "RUNNING")
    farm.open_gate("lost", 30)
    farm.wait_for_steps("lost", 2, 30)
    fix = "lost must be submitted again: only its process knows"
    eventually(lambda: fix in farm.tunemq("why", "other"), within=30, message=lambda: str(farm))
    assert fix in farm.said()
    assert not farm.steps("other")
    submit_again(farm, "lost")
    farm.open_gate("lost", 40)
    for name in ("lost", "other"):
        farm.wait_for(name, "FINISHED")
        farm.check_results(name)


def test_f03_take_over_after_a_loss_of_redis_waits_for_no_search_that_had_ended(
    farm, storage, minio, bucket
):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one", cpus=3)
    farm.submit(Search(name="finished", trials=1, steps=3))
    for name in ("paused", "stopped"):
        farm.submit(Search(name=name, trials=1, steps=10, has_gate=True))
        farm.open_gate(name, 5)
        farm.wait_for_steps(name, 1, 5)
    farm.tunemq("pause", "paused")
    farm.tunemq("stop", "stopped")
    names = ("finished", "paused", "stopped")
    for name in names:
        farm.wait_for(name, name.upper())
    farm.open_gate("paused", 6)
    with minio.objects(bucket, "searches/paused") as objects:

        def record() -> RunRecord:
            stored = objects.get_bytes("journal/last_run", limit=2**16)
            return msgspec.json.decode(stored[1:], type=RunRecord)

        eventually(lambda: record().is_over, message=lambda: str(farm))  # its trial has saved
    lose_the_machine(farm)
    farm.redis.client.flushall()
    asked = [word for name in names for word in ("--take-over", f"{storage}/{name}")]
    start_elsewhere(farm, "--store", storage, *asked)
    farm.has_nodes("one")  # until then, no scheduler seems to run
    farm.submit(Search(name="other", trials=2, steps=3))
    farm.wait_for("other", "FINISHED", within=60)
    farm.open_gate("paused", 10)
    for name in ("finished", "paused"):
        submit_again(farm, name)
        farm.wait_for(name, "FINISHED")
    farm.check_results("paused")
    lose_the_machine(farm)  # a search without work left has ended, too
    farm.redis.client.flushall()
    start_elsewhere(farm, "--store", storage, *asked)
    farm.has_nodes("one")  # until then, no scheduler seems to run
    farm.submit(Search(name="last", trials=2, steps=3))
    farm.wait_for("last", "FINISHED", within=60)


@pytest.mark.parametrize("bad", [b"nonsense", b"x" * 2**17, b"huge term"])
def test_f03_take_over_skips_a_search_with_a_bad_last_run(farm, storage, minio, bucket, bad):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    for name in ("lost", "damaged"):
        farm.submit(Search(name=name, trials=1, steps=20, has_gate=True))
        farm.open_gate(name, 5)
        farm.wait_for_steps(name, 1, 5)
    lose_the_machine(farm)
    with minio.objects(bucket, "searches/damaged") as objects:
        record = msgspec.json.decode(objects.get_bytes("journal/last_run", limit=2**16)[1:])
        huge = b"\0" + msgspec.json.encode({**record, "term": 2**60})
        objects.put_bytes("journal/last_run", huge if bad == b"huge term" else bad)
    both = [f"{storage}/{name}" for name in ("lost", "damaged")]
    start_elsewhere(farm, "--store", storage, "--take-over", both[0], "--take-over", both[1])
    passed_over = f"--take-over {both[1]} is skipped: journal/last_run"
    eventually(lambda: passed_over in farm.said(), message=lambda: str(farm))
    assert f"Tuner.restore('{both[1]}')" in farm.said()
    submit_again(farm, "lost")
    submit_again(farm, "damaged")
    assert "the store has an experiment at" in farm.wait_for("damaged", "FAILED").reason
    farm.open_gate("lost", 20)
    farm.wait_for("lost", "FINISHED")
    farm.check_results("lost")


def test_f03_take_over_from_a_copy_with_a_gap_continues_from_before_it(
    farm, storage, minio, bucket
):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    search = {"trials": 2, "steps": 60, "save_every": 5, "has_gate": True}
    farm.submit(Search(name="search", failures=0, **search))
    with minio.objects(bucket, "searches/search") as objects:

        def pieces() -> list[str]:
            return [one.key for one in objects.list("journal/") if ".turns/" in one.key]

        for steps in (10, 20, 30, 40):
            before = len(pieces())
            farm.open_gate("search", steps)
            farm.wait_for_steps("search", 2, steps)
            eventually(lambda before=before: len(pieces()) > before)
        lose_the_machine(farm)
        *_, lost, _ = pieces()
        objects.delete([lost])
    checked = farm.run("journal", "check", f"{storage}/search")
    assert checked.returncode == 1
    assert "lacks bytes" in checked.stdout
    start_elsewhere(farm, "--store", storage, "--take-over", f"{storage}/search")
    submit_again(farm, "search")
    farm.open_gate("search", 60)
    farm.wait_for("search", "FINISHED", within=150)
    farm.check_results("search")
    said = farm.results / "search" / "experiment.out"
    eventually(lambda: "the copy of the journal lacks bytes" in said.read_text())


class MakesFolder:
    """An object that creates a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_s07_take_over_with_keys_runs_nothing_of_a_forged_journal(farm, storage, minio, bucket):
    keys = key_folder(farm.folder / "keys").path
    files = {"head": "scheduler", "laptop": "ann", "one": "worker"}
    farm.of_home = {
        home: {**minio.environ, "TUNEMQ_KEYS": str(keys / f"{file}.toml")}
        for home, file in files.items()
    }
    farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    farm.submit(Search(name="search", trials=2, steps=120, step_s=0.05))
    farm.wait_for_steps("search", 2, 20)
    lose_the_machine(farm)
    trace, take_over = farm.folder / "trace", ("--take-over", f"{storage}/search")
    with minio.objects(bucket, "searches/search") as objects:
        honest = {
            one.key: objects.get_bytes(one.key, limit=2**24)
            for one in objects.list()
            if "checkpoint_" not in one.key
        }
        config = {"lr": msgspec.msgpack.Ext(PICKLED, pickle.dumps(MakesFolder(trace)))}
        packed = msgspec.msgpack.encode(config)
        with Journal.create(farm.folder / "journal", HEADER) as journal:
            journal.append(
                [m.JournalRecord(m.ConfigSuggested(0, "abc_00000", packed, "", {"cpu": 1.0}))]
            )
            assert JournalCopy(journal, objects, journal_signer()).close(60)
        start_elsewhere(farm, "--store", storage, *take_over)
        submit_again(farm, "search")
        eventually(
            lambda: "cannot be trusted" in farm.run("show", "search").stdout,
            within=60,
            message=lambda: str(farm),
        )
        farm.kill_scheduler()
        # Beside the scheduler's own copy a planted Tuner has no effect.
        objects.delete([one.key for one in objects.list("journal/")])
        for key, content in honest.items():
            objects.put_bytes(key, content)
        space = [pickle.dumps(MakesFolder(trace)), ""]
        objects.put_bytes("tuner.pkl", changed_tuner(honest["tuner.pkl"], param_space=space))
    start_elsewhere(farm, "--store", storage, *take_over)
    submit_again(farm, "search")
    eventually(
        lambda: "FINISHED" in farm.run("show", "search").stdout,
        within=120,
        message=lambda: str(farm),
    )
    farm.check_results("search")
    assert not trace.exists()


@pytest.mark.soak
def test_f03_a_take_over_is_refused_while_the_lease_is_alive(farm, storage):
    first = farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    farm.submit(Search(name="search", trials=2, steps=150, step_s=0.05))
    farm.wait_for_steps("search", 2, 5)
    results = farm.results
    rejected = start_elsewhere(farm, "--store", storage, "--take-over", f"{storage}/search")
    assert rejected.wait(60) == 75, farm
    assert f"process {first.pid}" in farm.said()
    farm.scheduler, farm.results = first, results
    farm.wait_for("search", "FINISHED")
    farm.check_results("search")


@pytest.mark.soak
def test_f03_scheduler_that_wakes_after_its_successor_started_changes_nothing(farm, storage):
    """The old scheduler was stopped, not killed: it still has its machine and its folder."""
    options = ("--store", storage, "--journal-release", "store")
    zombie = farm.start_scheduler(*options)
    farm.add_worker("one")
    farm.add_worker("two")
    search = {"trials": 6, "steps": 250, "save_every": 10, "step_s": 0.1}
    farm.submit(Search(name="search", failures=0, **search))
    farm.wait_for_steps("search", 4, 15)
    zombie.send_signal(signal.SIGSTOP)
    results = farm.results
    successor = start_elsewhere(farm, *options, "--take-over", f"{storage}/search")
    submit_again(farm, "search")
    eventually(lambda: list(farm.results.glob("search/*/result.json")), within=90)
    before = files_of(results)
    count = {number: len(done) for number, done in farm.steps("search").items()}
    zombie.send_signal(signal.SIGCONT)
    assert zombie.wait(60) == 75, farm
    assert re.search(SUPERSEDED, farm.said()), farm
    assert successor.poll() is None
    after = files_of(results)
    changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
    assert not {name for name in changed if "journal" in name}, changed
    farm.wait_for_steps("search", 4, max(count.values()) + 5)  # trials continue undisturbed
    farm.wait_for("search", "FINISHED", within=150)
    farm.check_results("search")
    farm.check_steps("search")
    # The folder of the lost machine is outdated, and restoring from it says so.
    farm.kill_scheduler()
    farm.results = results
    farm.start_scheduler(*options)
    eventually(lambda: "continued elsewhere" in farm.said(), within=60, message=lambda: str(farm))


def test_f03_scheduler_on_results_put_back_from_a_backup_names_the_copy_that_has_more(
    farm, storage
):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    search = {"trials": 2, "steps": 60, "save_every": 5, "has_gate": True}
    farm.submit(Search(name="search", failures=0, **search))
    farm.open_gate("search", 10)
    farm.wait_for_steps("search", 2, 10)
    shutil.copytree(farm.results, farm.folder / "backup", symlinks=True)
    farm.open_gate("search", 40)
    farm.wait_for_steps("search", 2, 40)
    farm.kill_scheduler()
    farm.results.rename(farm.folder / "gone")
    (farm.folder / "backup").rename(farm.results)
    farm.start_scheduler("--store", storage)
    eventually(
        lambda: "lacks results that the copy" in farm.tunemq("why", "search"),
        within=60,
        message=lambda: str(farm),
    )
    farm.kill_scheduler()
    (farm.results / "search").rename(farm.folder / "moved-away")  # as it says
    farm.start_scheduler("--store", storage, "--take-over", f"{storage}/search")
    farm.open_gate("search", 60)
    farm.wait_for("search", "FINISHED", within=150)
    farm.check_results("search")


def test_journal_release_from_a_store_without_a_store_is_refused(farm):
    assert farm.start_scheduler("--journal-release", "store").wait(60) == 64
    assert "--store s3://" in farm.said()


def test_take_over_of_a_folder_is_rejected(farm, storage):
    rejected = farm.start_scheduler("--store", storage, "--take-over", "/somewhere")
    assert rejected.wait(60) == 64, farm
    assert "s3://bucket/prefix/name" in farm.said()
    assert farm.redis.client.get(redis_keys.SCHEDULER) is None


def test_take_over_without_a_search_at_its_address_is_skipped_with_a_line(farm, minio, bucket):
    """The request must not go to Amazon, which would see the farm's access key."""
    keys = {name: value for name, value in minio.environ.items() if name.startswith("AWS_")}
    farm.of_home["head"] = {**keys, "TUNEMQ_S3_ENDPOINT": "http://127.0.0.1:1"}
    store, address = minio.address(bucket, "searches"), f"s3://{bucket}/searches/none"
    farm.start_scheduler("--store", store, "--take-over", address)
    farm.add_worker("one")
    farm.submit(Search(name="search", trials=1, steps=3))
    farm.wait_for("search", "FINISHED")
    assert f"--take-over {address} is skipped: no farm's search is there." in farm.said()


@pytest.mark.soak
def test_experiment_that_is_only_in_the_store_is_not_restarted_and_stays(
    farm, storage, minio, bucket
):
    farm.start_scheduler("--store", storage)
    farm.add_worker("one")
    farm.submit(Search(name="search", trials=1, steps=3))
    farm.wait_for("search", "FINISHED")
    lose_the_machine(farm)
    start_elsewhere(farm, "--store", storage)
    submit_again(farm, "search")
    row = farm.wait_for("search", "FAILED")
    assert f"--take-over {storage}/search" in row.reason
    refused = farm.run("rm", "--files", "--yes", "search")
    assert refused.returncode == 1
    assert "belongs to another experiment" in refused.stderr
    with minio.objects(bucket, "searches/search") as objects:
        assert [one for one in objects.list() if one.key.endswith("manifest.json")]
    farm.tunemq("rm", "search")
    submit_again(farm, "search")
    farm.wait_for("search", "FAILED")
    farm.tunemq("rm", "search")
    farm.kill_scheduler()
    options = ("--store", storage, "--take-over", f"{storage}/search")
    farm.start_scheduler("--results", str(farm.results), *options)
    submit_again(farm, "search")
    farm.wait_for("search", "FINISHED")
