"""A run that wakes up after another run took over its search does not change the store."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.searches.chain_searches import ChainSearch, chain_searches
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import descendants, eventually
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.storage.last_run import stored_record
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.key_files import journal_signer

pytestmark = [pytest.mark.faults, pytest.mark.integration]


@pytest.fixture
def start(tmp_path: Path, minio: ObjectServer, bucket: str) -> Iterator[Callable[..., ChainSearch]]:
    yield from chain_searches(tmp_path, minio, bucket)


@contextlib.contextmanager
def stopped(roots: Iterable[int]) -> Iterator[None]:
    """Stop these processes and all below them, as a suspended machine does."""
    pids = [pid for root in roots for pid in (root, *descendants(root))]

    def send(sent: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, sent)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


def journal_in(server: ObjectServer, bucket: str, prefix: str) -> dict[str, bytes]:
    """Return the store's journal and the record of its last run, without the first run's copy."""
    with server.objects(bucket, prefix) as objects:
        keys = [one.key for one in objects.list(f"{FILE_NAME}/")]
        counts = [key for key in keys if not key.startswith(f"{FILE_NAME}/000001/")]
        return {key: objects.get_bytes(key, limit=2**24) for key in counts}


def objects_in(server: ObjectServer, bucket: str, prefix: str) -> set[str]:
    with server.objects(bucket, prefix) as objects:
        return {one.key for one in objects.list()}


@pytest.mark.parametrize("sleeps", [True, False])
def test_f11_script_whose_search_was_restored_elsewhere_leaves_the_store_alone(
    start, minio, bucket, sleeps
):
    options = {"trials": 2, "steps": 30, "save_every": 2, "kept": 1}
    first = start(gate=10, **options)
    for number in range(2):
        first.wait_for(m.ResultReported, trial=first.trial(number), step=10)
    prefix = "prefix/0/search"
    eventually(lambda: f"{FILE_NAME}/last_run" in journal_in(minio, bucket, prefix))
    first.kill(first.trial_pids()[0])  # so that its end looks for what that left in the store
    with stopped([first.process.pid]) if sleeps else contextlib.nullcontext():
        second = start(same_place=first, restores=True, **options)
        second.wait_for(m.ExperimentResumed)
        first.open_gate(30)  # the trials of both have passed it
        assert second.ends() == 0, str(second)
        assert [one["status"] for one in second.results()] == ["TERMINATED"] * 2, str(second)
        kept = journal_in(minio, bucket, prefix)
    assert first.ends() != 0, str(first)
    assert b"Another run of this search" in first.said, str(first)
    second.is_restorable()
    assert journal_in(minio, bucket, prefix) == kept


def test_f11_script_restored_before_its_earlier_run_continued_begins_with_the_newest_checkpoints(
    start, minio, bucket
):
    options = {"trials": 2, "steps": 30, "save_every": 2, "kept": 1}
    first = start(gate=10, **options)
    for number in range(2):
        first.wait_for(m.ResultReported, trial=first.trial(number), step=10)
    second = start(same_place=first, restores=True, waits=True, **options)
    eventually((second.folder / "restored").exists)
    first.open_gate(20)
    for number in range(2):
        old = f"{first.trial(number)}/checkpoint_1-000005/manifest.json"
        eventually(lambda old=old: old not in objects_in(minio, bucket, "prefix/0/search"))
    (second.folder / "fit").touch()
    second.wait_for(m.ExperimentResumed)
    first.open_gate(30)
    assert second.ends() == 0, str(second)
    assert [one["status"] for one in second.results()] == ["TERMINATED"] * 2, str(second)
    second.is_restorable()


@pytest.mark.slow
@pytest.mark.parametrize("sleeps", [True, False])
def test_f11_farm_whose_search_another_farm_took_over_leaves_the_store_alone(
    tmp_path, minio, bucket, sleeps
):
    storage, place, claim = f"s3://{bucket}/searches", "searches/search", f"{FILE_NAME}/last_run"
    search = Search(
        name="search",
        steps=40,
        step_s=0.1,  # so that the search does not end before it is taken over
        save_every=2,
        has_gate=True,
        run="checkpoint_config=tune.CheckpointConfig(num_to_keep=1),",
    )
    with contextlib.ExitStack() as farms:
        first, second = (new_farm(farms, tmp_path / name, minio) for name in ("a", "b"))
        first.start_scheduler("--store", storage)
        worker = first.add_worker("one")
        first.submit(search)
        first.open_gate("search", 10)
        first.wait_for_steps("search", 2, 10)
        os.kill(first.events("search", m.TrialStarted)[0].pid, signal.SIGKILL)
        eventually(lambda: len(first.events("search", m.TrialStarted)) == 3)
        claimed = journal_in(minio, bucket, place)[claim]
        asleep = stopped([first.scheduler.pid, worker.pid])
        with asleep if sleeps else contextlib.nullcontext():
            second.start_scheduler("--store", storage, "--take-over", f"{storage}/search")
            second.add_worker("two")
            second.submit(search)
            if not sleeps:
                eventually(lambda: journal_in(minio, bucket, place)[claim] != claimed)
            for farm in (first, second):  # second suggests again a trial that the copy lacks
                farm.open_gate("search", 40)
            second.wait_for("search", "FINISHED")
            verify = ("checkpoints", "verify", str(second.results / "search"))
            second.tunemq(*verify)
            kept = journal_in(minio, bucket, place)
        assert "Another run of this search" in first.wait_for("search", "FAILED").reason
        second.tunemq(*verify)
        assert journal_in(minio, bucket, place) == kept


def new_farm(farms: contextlib.ExitStack, folder: Path, store: ObjectServer) -> FarmService:
    folder.mkdir()
    farm = farms.enter_context(farm_service(folder, starts=False))
    farm.of_home = dict.fromkeys(("head", "laptop", "one", "two"), store.environ)
    return farm


@pytest.mark.slow
def test_f11_farms_search_is_one_run_in_all_its_records(tmp_path, minio, bucket):
    """Another token means another run, to a check that reads a record while the next is written."""
    with contextlib.ExitStack() as farms:
        farm = new_farm(farms, tmp_path / "farm", minio)
        farm.start_scheduler("--store", f"s3://{bucket}/searches")
        farm.add_worker("one")
        farm.submit(Search(name="search", trials=1, steps=6, has_gate=True))
        farm.open_gate("search", 3)
        farm.wait_for_steps("search", 1, 3)
        records = []
        for gate in (6, None):
            with minio.objects(bucket, "searches/search") as objects:
                records.append(stored_record(objects, journal_signer()))
            if gate is not None:
                farm.open_gate("search", gate)
                farm.wait_for("search", "FINISHED")
        assert [record.is_over for record in records] == [False, True]
        assert records[0].holder == records[1].holder
