"""A farm's search goes on from its copy in the store, on another machine."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.farm_processes import Farm, farms
from tests.keys import key_folder
from tests.object_servers import ObjectServer
from tests.support import eventually
from tests.unit.scheduler.journals import HEADER
from tunemq_scheduler.journal import Journal
from tunemq_scheduler.journal.copy import JournalCopy
from tunemq_shared import messages as m
from tunemq_shared import wire
from tunemq_shared.key_files import journal_seal
from tunemq_shared.packing import PICKLED

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    yield from farms(tmp_path)


@pytest.fixture
def storage(minio: ObjectServer, bucket: str) -> str:
    return f"s3://{bucket}/searches"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The results folder of another machine."""
    return tmp_path / "elsewhere"


def files_of(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("release", ["store", pytest.param("local", marks=pytest.mark.soak)])
def test_f03_another_machine_takes_over_and_no_reported_result_is_lost(
    farm, storage, elsewhere, release
):
    farm.worker("one")
    farm.worker("two")
    options = {"trials": 6, "steps": 60, "save_every": 5, "step_s": 0.1, "storage": storage}
    # The gate: none of the first four ends before, and none of the others is just being started.
    first = farm.scheduler("--journal-release", release, **options, gate=40)
    farm.wait_for_steps(4, 25, within=90)
    first.kill()
    # With its machine its disk is gone; trials that go on may write into what is being removed.
    farm.results.rename(farm.folder / "gone")
    shutil.rmtree(farm.folder / "gone", ignore_errors=True)
    farm.open_gate(60)
    # The workers read the code from a folder that both machines share.
    second = farm.scheduler(
        "--take-over", f"{storage}/search", "--journal-release", release, results=elsewhere
    )
    assert second.ends(150) == 0, farm
    farm.nothing_is_missing_or_doubled(6, 60, results=elsewhere)
    repeated = [len(done) - len(set(done)) for done in farm.steps().values()]
    if release == "store":  # what was not copied was still with the workers
        assert repeated == [0] * 6, farm


class MakesFolder:
    """What leaves a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_s07_take_over_with_keys_runs_nothing_of_a_forged_journal(
    farm, storage, elsewhere, minio, bucket
):
    keys = key_folder(farm.folder / "keys").path
    with_keys = ("--keys", str(keys / "scheduler.toml"))
    farm.worker("one", 2, "--keys", str(keys / "worker.toml"))
    first = farm.scheduler(*with_keys, trials=2, steps=120, step_s=0.05, storage=storage)
    farm.wait_for_steps(2, 20, within=90)
    first.kill()
    farm.results.rename(farm.folder / "gone")
    trace, take_over = farm.folder / "trace", ("--take-over", f"{storage}/search", *with_keys)
    with minio.objects(bucket, "searches/search") as objects:
        honest = {
            one.key: objects.get_bytes(one.key, limit=2**24)
            for one in objects.list()
            if "checkpoint_" not in one.key
        }
        config = {"lr": msgspec.msgpack.Ext(PICKLED, pickle.dumps(MakesFolder(trace)))}
        packed = msgspec.msgpack.encode(config)
        with Journal.create(farm.folder / "journal", HEADER) as journal:
            journal.append([m.Entry(m.ConfigSuggested(0, "abc_00000", packed, "", {"cpu": 1.0}))])
            assert JournalCopy(journal, objects, journal_seal()).close(60)
        refused = farm.scheduler(*take_over, results=elsewhere)
        assert refused.ends() == 1, farm
        assert "not to be trusted" in refused.said
        # Beside the scheduler's own copy a planted Tuner changes nothing.
        objects.delete([one.key for one in objects.list("journal/")])
        for key, content in honest.items():
            objects.put_bytes(key, content)
        planted = msgspec.msgpack.decode(honest["tuner.pkl"])
        planted["param_space"] = [pickle.dumps(MakesFolder(trace)), ""]
        objects.put_bytes("tuner.pkl", msgspec.msgpack.encode(planted))
    second = farm.scheduler(*take_over, results=farm.folder / "third")
    assert second.ends(120) == 0, farm
    farm.nothing_is_missing_or_doubled(2, 120, results=farm.folder / "third")
    assert not trace.exists()


@pytest.mark.soak
def test_f03_a_take_over_is_refused_while_the_lease_is_alive(farm, storage, elsewhere):
    farm.worker("one")
    first = farm.scheduler(trials=2, steps=150, step_s=0.05, storage=storage)
    farm.wait_for_steps(2, 5, within=60)
    refused = farm.scheduler("--take-over", f"{storage}/search", results=elsewhere)
    assert refused.ends() == 75, farm
    assert f"process {first.process.pid}" in refused.said
    assert not elsewhere.exists()
    assert first.ends(60) == 0, farm
    farm.nothing_is_missing_or_doubled(2, 150)


@pytest.mark.soak
def test_f03_a_scheduler_that_wakes_after_its_successor_has_begun_changes_nothing(
    farm, storage, elsewhere
):
    """It was stopped, not dead; its machine, its folder and its lock are its own still."""
    farm.worker("one")
    farm.worker("two")
    options = {"trials": 6, "steps": 250, "save_every": 10, "step_s": 0.1, "storage": storage}
    zombie = farm.scheduler("--journal-release", "store", **options)
    farm.wait_for_steps(4, 15, within=90)
    zombie.send(signal.SIGSTOP)
    before = files_of(farm.results)
    successor = farm.scheduler(
        "--take-over", f"{storage}/search", "--journal-release", "store", results=elsewhere
    )
    eventually(lambda: list(elsewhere.glob("search/*/result.json")), within=60)
    count = {number: len(done) for number, done in farm.steps().items()}
    zombie.send(signal.SIGCONT)
    assert zombie.ends() == 75, farm
    assert "another one took its place" in zombie.said
    assert f"process {successor.process.pid}" in zombie.said
    after = files_of(farm.results)
    changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
    assert not {name for name in changed if "journal" in name}, changed
    farm.wait_for_steps(4, max(count.values()) + 5, within=60)  # trials go on undisturbed
    again = farm.scheduler("--journal-release", "store")  # on the zombie's machine
    assert again.ends() == 75, farm
    assert successor.ends(150) == 0, farm
    farm.nothing_is_missing_or_doubled(6, 250, results=elsewhere)
    assert farm.steps() == {number: list(range(1, 251)) for number in range(6)}
    # The folder that was left behind is not the newest any more, and says so.
    behind = farm.scheduler("--journal-release", "store")
    assert behind.ends() == 75, farm
    assert "went on elsewhere" in behind.said
    assert farm.redis.client.get(wire.SCHEDULER) is None


def test_a_journal_release_that_needs_a_store_is_refused_without_one(farm):
    refused = farm.scheduler("--journal-release", "store", trials=1)
    assert refused.ends() == 64
    assert "storage_path='s3://" in refused.said


@pytest.mark.soak
def test_a_take_over_of_what_is_not_there_says_so(farm, storage, elsewhere):
    refused = farm.scheduler(
        "--take-over", f"{storage}/nothing", results=elsewhere, trials=1, storage=storage
    )
    assert refused.ends() == 64, farm
    assert "is no experiment" in refused.said


@pytest.mark.soak
def test_an_experiment_that_is_only_in_the_store_is_not_begun_anew(farm, storage, elsewhere):
    farm.worker("one")
    assert farm.scheduler(trials=1, steps=3, step_s=0.01, storage=storage).ends(60) == 0, farm
    assert not farm.all_of(m.NodeLost)
    refused = farm.scheduler(results=elsewhere)
    assert refused.ends() == 64, farm
    assert f"--take-over {storage}/search" in refused.said
