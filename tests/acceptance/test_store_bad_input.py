"""An unusable checkpoint store, as users see it: in a script, at a prompt.

``tests/unit/shared/objects/test_s3_address.py`` has invalid addresses,
``tests/integration/test_object_store_settings.py`` has servers' rejections, and
``tests/faults/test_store_outage.py`` and ``test_store_misuse.py`` have outages.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from minio import MinioAdmin
from minio.credentials import StaticProvider

from tests.acceptance.scripts import run, write
from tests.support.searches.chain_searches import ChainSearch
from tests.support.small_disk import with_small_disk
from tests.support.stores.object_servers import running_minio
from tests.support.stores.own_store import Start, own_bucket, server, start
from tests.support.stores.store_roles import wait_for_users
from tests.support.waiting import eventually
from tunemq_shared.protocol import messages as m

__all__ = ["own_bucket", "server", "start"]

pytestmark = pytest.mark.integration

MARK = "STORE_TEST_MARK"
#: How long trials wait for the store; a busy machine takes some of it to commit a checkpoint.
SYNC_S = 10.0
SEARCH = """
    import sys
    import tempfile
    from pathlib import Path

    import tunemq as tune

    STORAGE, SIZE = sys.argv[1], int(sys.argv[2])


    def model(step):
        return bytes([step]) * (SIZE if step < 2 else 9 * SIZE)


    def train(config):
        for step in range(4):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "model").write_bytes(model(step))
                tune.report({"step": step}, checkpoint=tune.Checkpoint.from_directory(folder))


    failures = tune.FailureConfig(max_storage_failures=0)
    config = tune.RunConfig(name="e", storage_path=STORAGE, failure_config=failures)
    results = tune.Tuner(train, run_config=config).fit()
    (result,) = results
    for checkpoint, line in result.best_checkpoints:
        with checkpoint.as_directory() as folder:
            assert Path(folder, "model").read_bytes() == model(line["step"])
    print("kept and whole:", len(result.best_checkpoints))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the script; a mark identifies the script's processes."""
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return write(tmp_path / "script", {"search.py": SEARCH})


def still_running() -> list[psutil.Process]:
    """All processes that the script has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == os.environ[MARK]:
                found.append(process)
    return found


def nothing_is_left(folder: Path) -> None:
    """Check that no process of the script's is left, and no temporary file."""

    def left() -> list[object]:
        # Redis overwrites its mark with its title, but its folder identifies it.
        return [*still_running(), *(folder.parent / "tmp").iterdir()]

    eventually(lambda: not left(), message=lambda: f"left: {left()}")


# --- found before anything starts -----------------------------------------------------------------

WRONG = {
    "a server that does not run": (
        "s3://{bucket}/x?endpoint=http://127.0.0.1:1",
        {},
        ["s3://{bucket}/x at http://127.0.0.1:1", "cannot be reached", "check that it runs"],
    ),
    "a bucket that is not there": (
        "s3://no-such-bucket/x",
        {},
        ["no bucket 'no-such-bucket'", "create_bucket=true"],
    ),
    "no name of a bucket": ("s3://My_Bucket/x", {}, ["'My_Bucket'", "3 to 63", "s3://my-bucket"]),
    "keys in the address": (
        "s3://someone:hunter2@{bucket}/x",
        {},
        ["has keys in it", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"],
    ),
    "a key as a setting": (
        "s3://{bucket}/x?secret_key=hunter2",
        {},
        ["'secret_key'", "keys do not belong into an address"],
    ),
    "an unknown setting": (
        "s3://{bucket}/x?regoin=eu-1",
        {},
        ["unknown setting 'regoin'", "did you mean 'region'?"],
    ),
    "a wrong secret": (
        "s3://{bucket}/x",
        {"AWS_SECRET_ACCESS_KEY": "hunter2"},
        ["does not know these keys", "AWS_SECRET_ACCESS_KEY", "credentials file"],
    ),
    "no keys": (
        "s3://{bucket}/x",
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nowhere"},
        ["there are no keys", "/nowhere/.aws/credentials", "on each machine"],
    ),
    "half of the keys": (
        "s3://{bucket}/x",
        {"AWS_SECRET_ACCESS_KEY": ""},
        ["AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not"],
    ),
    "a profile that the file lacks": (
        "s3://{bucket}/x",
        {
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_PROFILE": "lab",
        },
        ["/dev/null has no aws_access_key_id", "profile 'lab'", "AWS_PROFILE"],
    ),
    "a wrong kind of certificate file": (
        "s3://{bucket}/x?endpoint=https://127.0.0.1:1&ca_file=/dev/null",
        {},
        ["'/dev/null'", "no certificate", "correct ca_file"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_f21_unusable_store_is_a_short_error_before_anything_starts(
    minio, bucket, folder, tmp_path, monkeypatch, wrong
):
    address, variables, words = WRONG[wrong]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    ended = run(folder, "search.py", address.format(bucket=bucket), "10")

    assert ended.returncode == 1
    told = ended.stderr.splitlines()
    for word in words:
        assert word.format(bucket=bucket) in told[-1], ended.stderr
    # Python shows the line of the script; tracebacks of sockets and clients must not appear.
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert len(told) <= 40, ended.stderr
    assert ended.stdout == ""
    for secret in ("hunter2", minio.secret_key):
        assert secret not in ended.stderr.partition("tunemq_shared.")[2]
    assert not (tmp_path / "tunemq_results").exists()
    assert list(minio.client().list_objects(bucket, recursive=True)) == []
    nothing_is_left(folder)


def test_wrong_region_is_an_error_before_anything_starts(folder, tmp_path, monkeypatch):
    with running_minio(tmp_path / "server", region="eu-7") as server:
        for name, value in (server.environ | {"AWS_REGION": "mars-1"}).items():
            monkeypatch.setenv(name, value)
        ended = run(folder, "search.py", f"s3://{server.create_bucket()}/x", "10")
    told = ended.stderr.splitlines()[-1]
    assert "the region 'mars-1' is wrong" in told
    assert "expecting 'eu-7'" in told
    assert told.endswith("set region in the address.")
    assert ended.stderr.count("Traceback") == 1
    assert not (tmp_path / "tunemq_results").exists()
    nothing_is_left(folder)


@pytest.mark.parametrize("place", ["storage_path", "$TUNEMQ_RESULTS beside a bucket"])
def test_read_only_disk_is_an_error_before_anything_starts(
    minio, bucket, folder, tmp_path, monkeypatch, place
):
    disk = tmp_path / "disk"
    storage = str(disk / "results")
    if place != "storage_path":
        monkeypatch.setenv("TUNEMQ_RESULTS", storage)
        storage = f"s3://{bucket}/x"
    script = [sys.executable, str(folder / "search.py"), storage, "10"]
    ended = with_small_disk(disk, script, options="size=8m,ro")
    told = ended.stderr.splitlines()[-1]
    assert f"the results folder {disk / 'results'}/e cannot be used: Read-only file system" in told
    assert "RunConfig(storage_path=...) or $TUNEMQ_RESULTS" in told
    assert ended.stdout == ""
    assert list(minio.client().list_objects(bucket, recursive=True)) == []
    nothing_is_left(folder)


# --- found only when a trial saves ----------------------------------------------------------------


@pytest.mark.parametrize("place", ["a local store", "the cache before a bucket"])
def test_f16_full_disk_fails_the_trial_by_name_and_keeps_earlier_checkpoints(
    minio, bucket, folder, tmp_path, monkeypatch, place
):
    disk = tmp_path / "disk"
    storage = str(disk / "results")
    if place != "a local store":
        monkeypatch.setenv("TUNEMQ_RESULTS", storage)
        storage = f"s3://{bucket}/x"
    script = [sys.executable, str(folder / "search.py"), storage, str(2**20)]
    ended = with_small_disk(disk, script, options="size=7m")
    assert ended.returncode == 0, ended.stderr
    (failed,) = [line for line in ended.stdout.splitlines() if " failed: " in line]
    assert "StoreError: checkpoint train_" in failed
    assert f"{disk}/results/e" in failed
    assert "No space left on device (" in failed
    assert "bytes are free)" in failed
    assert "kept and whole: 2" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    nothing_is_left(folder)


# --- found in the middle of a search --------------------------------------------------------------


def has_saved_twice(start: Start) -> ChainSearch:
    """A search of one trial, which has two checkpoints in the store and waits at its gate."""
    search = start(
        trials=1, steps=200, step_s=0.05, max_storage_failures=0, sync_timeout=SYNC_S, gate=8
    )
    search.wait_for(m.CheckpointCommitted, trial=search.trial(0), n=2, within=60)
    return search


def ends_in_an_error(search: ChainSearch, reason: str, sync_timeout: float) -> None:
    """Check that it said why it waits, waited for the timeout, and ended in this error."""
    waits = search.wait_for(m.TrialWaits, what="save")
    failed = search.wait_for(m.TrialFailed, within=9 * SYNC_S)
    assert failed.event.kind == "storage"
    assert f"given up after {sync_timeout:g} s" in failed.event.error
    assert reason in failed.event.error
    assert failed.at - waits.at > sync_timeout / 2
    assert search.ends() == 0, str(search)
    said = search.said.decode()
    assert "saving: waits for the store" in said
    assert reason in said
    assert "Traceback" not in said
    (result,) = search.results()
    assert result["status"] == "ERROR"
    search.leaves_nothing()


def test_revoked_store_keys_are_reported_and_end_the_trial_after_sync_timeout(
    start, server, monkeypatch
):
    keys = StaticProvider(server.access_key, server.secret_key)
    admin = MinioAdmin(endpoint=server.url.partition("//")[2], credentials=keys, secure=False)
    wait_for_users(admin)
    admin.user_add("guest", "guests-secret")
    admin.policy_set("readwrite", user="guest")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "guest")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guests-secret")
    search = has_saved_twice(start)
    admin.user_remove("guest")
    search.open_gate(200)
    ends_in_an_error(search, "the server does not know these keys", SYNC_S)


def test_removed_bucket_is_reported_and_ends_the_trial_after_sync_timeout(start, server):
    search = has_saved_twice(start)
    (server.data / "shelf").rename(server.folder / "removed")
    search.open_gate(200)

    def is_given_up() -> bool:
        # The server's pending write creates the bucket again.
        shutil.rmtree(server.data / "shelf", ignore_errors=True)
        return bool(search.all_of(m.TrialFailed))

    eventually(is_given_up, within=9 * SYNC_S, message=lambda: str(search))
    ends_in_an_error(search, "there is no bucket 'shelf'", SYNC_S)
    # The store is back: committed checkpoints are there and complete.
    shutil.rmtree(server.data / "shelf", ignore_errors=True)  # it was created again, see above
    (server.folder / "removed").rename(server.data / "shelf")
    search.is_restorable()
