"""``tunemq checkpoints``, on an experiment's folder and on its address in a store."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.commands import Run, run_tunemq
from tests.support.journal_records import read_records
from tests.support.searches.searches import fit
from tests.support.stores.object_servers import ObjectServer
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_shared.checkpoints.open_store import join, open_objects
from tunemq_shared.protocol.messages import CheckpointCommitted
from tunemq_shared.signing.key_files import journal_signer

pytestmark = pytest.mark.integration


def saver(config):
    for step in range(1, 4):
        Path("model").mkdir(exist_ok=True)
        Path("model", "weights").write_bytes(bytes([step]) * 1000)
        Path("model", "constant").write_bytes(b"c" * 5000)
        tune.report({"step": step}, checkpoint=tune.Checkpoint.from_directory("model"))


@pytest.fixture
def tunemq(tmp_path: Path) -> Run:
    return partial(run_tunemq, tmp_path)


@pytest.fixture(params=["folder", "store, by its folder", "store, by its address"])
def experiment(request: pytest.FixtureRequest, minio: ObjectServer, tmp_path: Path) -> str:
    if request.param == "folder":
        grid = fit(saver, name="models", storage_path=str(tmp_path / "results"), num_samples=2)
        return grid.experiment_path
    address = minio.address(minio.create_bucket(), "team/results")
    grid = fit(saver, name="models", storage_path=address, num_samples=2)
    return grid.experiment_path if "folder" in request.param else join(address, "models")


def keys_of(listing: str) -> list[str]:
    return [line.split()[0] for line in listing.splitlines() if "/checkpoint_" in line]


def damage(experiment: str, key: str) -> None:
    """Change a byte of the checkpoint's own weights in the folder or the store."""
    if "://" not in experiment and (file := Path(experiment, key, "files", "weights")).exists():
        file.write_bytes(b"\0" * 1000)
        return
    address = experiment if "://" in experiment else _store_of(experiment)
    objects = open_objects(address)
    (weights,) = [found.key for found in objects.list(f"{key}/") if found.size == 1000]
    objects.put_bytes(weights, b"\0" * 1000)


def _store_of(folder: str) -> str:
    return read_header(Path(folder, FILE_NAME)).store


def test_checkpoints_are_listed_verified_copied_and_removed(experiment, tunemq, tmp_path):
    listed = tunemq("checkpoints", "list", experiment).stdout
    keys = keys_of(listed)
    assert len(keys) == 6
    assert "6 checkpoints, 36.0 kB" in listed
    assert listed.count("newest") == 2

    assert "6 of 6 checkpoints are whole" in tunemq("checkpoints", "verify", experiment).stdout

    said = tunemq("checkpoints", "get", experiment, keys[1], "copy").stdout
    assert "iteration 2" in said
    assert (tmp_path / "copy" / "weights").read_bytes() == b"\2" * 1000
    assert (tmp_path / "copy" / "constant").read_bytes() == b"c" * 5000

    trial = keys[0].partition("/")[0]
    tunemq("checkpoints", "get", experiment, trial, "newest")
    assert (tmp_path / "newest" / "weights").read_bytes() == b"\3" * 1000

    # The file that never changes is an object of the first checkpoint; the others still need it.
    assert "nothing was removed" in tunemq("checkpoints", "rm", experiment, keys[0], code=1).stdout
    tunemq("checkpoints", "rm", experiment, keys[0], said="y\n")
    verified = tunemq("checkpoints", "verify", experiment, *keys[1:]).stdout
    assert "5 of 5 checkpoints are whole" in verified
    missing = tunemq("checkpoints", "verify", experiment, keys[0], code=1).stdout
    assert keys[0] in missing
    listed = tunemq("checkpoints", "list", experiment).stdout
    (line,) = [line for line in listed.splitlines() if "not there" in line]
    assert line.startswith(keys[0])
    assert "5 checkpoints, 30.0 kB" in listed


def test_old_journal_copy_removes_no_checkpoint_unknown_to_it(minio, bucket, tunemq, tmp_path):
    address = minio.address(bucket, "results")
    grid = fit(saver, name="models", storage_path=address)
    experiment, whole = join(address, "models"), Path(grid.experiment_path, FILE_NAME)
    first, second, third = keys_of(tunemq("checkpoints", "list", experiment).stdout)
    # As if the journal had been copied when one of the three was committed, and never again.
    entries = list(read_records(whole))
    commits = [n for n, one in enumerate(entries) if isinstance(one.event, CheckpointCommitted)]
    with (
        Journal.create(tmp_path / "older", read_header(whole)) as older,
        open_objects(experiment) as objects,
    ):
        older.append(entries[: commits[0] + 1])
        assert JournalCopy(older, objects, journal_signer()).close()
    listed = tunemq("checkpoints", "list", experiment).stdout
    assert keys_of(listed) == [first]
    assert "The store has 2 more" in listed

    refused = tunemq("checkpoints", "rm", experiment, first, "--yes", code=64)
    assert "has not ended, and may continue from it" in refused.stderr
    assert keys_of(tunemq("checkpoints", "list", experiment).stdout) == [first]
    tunemq("checkpoints", "rm", experiment, first, "--yes", "--force")
    verified = tunemq("checkpoints", "verify", grid.experiment_path, second, third).stdout
    assert "2 of 2 checkpoints are whole" in verified


def test_damaged_checkpoint_is_named(experiment, tunemq):
    keys = keys_of(tunemq("checkpoints", "list", experiment).stdout)
    damage(experiment, keys[4])
    told = tunemq("checkpoints", "verify", experiment, code=1).stdout
    assert keys[4] in told
    assert "weights" in told
    assert "5 of 6 checkpoints are whole" in told
    rejected = tunemq("checkpoints", "get", experiment, keys[4], "copy", code=64).stderr
    assert keys[4] in rejected


def test_folder_without_experiment_is_refused(tunemq, tmp_path, minio):
    assert "is not an experiment" in tunemq("checkpoints", "list", tmp_path, code=64).stderr
    address = minio.address(minio.create_bucket(), "nothing/here")
    assert "is not an experiment" in tunemq("checkpoints", "list", address, code=64).stderr
    missing = tunemq("checkpoints", "list", "s3://there-is-no-such-bucket/x", code=64).stderr
    assert "there-is-no-such-bucket" in missing


def test_unknown_checkpoint_is_refused_with_the_existing_ones_listed(tunemq, tmp_path):
    grid = fit(saver, name="models", storage_path=str(tmp_path / "results"))
    told = tunemq("checkpoints", "get", grid.experiment_path, "nonsense", code=64).stderr
    assert "no checkpoint 'nonsense'" in told
    assert "checkpoint_1-000001" in told


def test_help_lists_the_commands(tunemq):
    assert "checkpoints" in tunemq("--help").stdout
    for command in ("list", "verify", "get", "rm"):
        assert command in tunemq("checkpoints", "--help").stdout
        assert "experiment" in tunemq("checkpoints", command, "--help").stdout
