"""Searches with checkpoints in a bucket of a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.checkpoints import contents
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of
from tests.support.waiting import eventually, free_port
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_scheduler.security.findings import FindingLevel
from tunemq_scheduler.security.store_role_probes import StoreKeys, StoreRole, try_store
from tunemq_scheduler.storage.stored_checkpoint import StoredCheckpoint
from tunemq_shared.base.errors import ConfigError, StoreError

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def train(config):
    """Train six steps, each with a checkpoint of two files, one of which never changes."""
    checkpoint = tune.get_checkpoint()
    first = 1
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "step").read_text()) + 1
    made = Path("made")
    made.mkdir(exist_ok=True)
    (made / "same").write_bytes(b"same" * 1000)
    for step in range(first, config.get("steps", 6) + 1):
        failed = Path(config["marker"]) if "marker" in config else None
        if failed is not None and step == 4 and not failed.exists():
            failed.touch()
            if config.get("how") == "kill":
                os.kill(os.getpid(), 9)
            raise RuntimeError("it fails once")
        (made / "step").write_text(str(step))
        tune.report({"step": step, "score": -abs(step - 3)}, checkpoint=tune.Checkpoint(made))


def step_in(checkpoint):
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "step").read_text())


def objects_in(server, bucket, prefix=""):
    found = server.client().list_objects(bucket, prefix=prefix, recursive=True)
    return sorted(one.object_name for one in found)


def manifests_in(server, bucket):
    return [key for key in objects_in(server, bucket) if key.endswith("/manifest.json")]


@pytest.mark.parity(114)
def test_a_search_keeps_its_checkpoints_in_the_bucket_and_they_come_back_when_asked_for(
    minio, bucket
):
    results = fit(train, name="mine", storage_path=f"s3://{bucket}/searches")
    (result,) = results

    assert result.status == "TERMINATED"
    assert [line["step"] for line in results_of(result)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(result.checkpoint, StoredCheckpoint)
    assert step_in(result.checkpoint) == 6
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [1, 2, 3, 4, 5, 6]
    assert step_in(result.get_best_checkpoint("score", "max")) == 3
    keys = manifests_in(minio, bucket)
    assert len(keys) == 6
    assert all(key.startswith(f"searches/mine/{result.trial_name}/checkpoint_1-") for key in keys)


@pytest.mark.parity(110)
def test_the_results_of_checkpoints_are_read_here_or_else_in_the_bucket(minio, bucket):
    results = fit(train, {"steps": 2}, storage_path=f"s3://{bucket}/searches")

    def steps():
        return [metrics["step"] for _, metrics in results[0].best_checkpoints]

    file = Path(results[0].path, "result.json")
    written = file.read_bytes()
    file.unlink()
    assert steps() == [1, 2]
    file.write_bytes(written)
    for key in manifests_in(minio, bucket):
        minio.client().remove_object(bucket, key)
    assert steps() == [1, 2]


def test_the_local_folder_has_the_results_and_no_checkpoint_when_the_search_has_ended(
    minio, bucket
):
    results = fit(train, name="mine", storage_path=f"s3://{bucket}/searches")

    folder = Path(results.experiment_path)
    # The node learns with its next lease renewal that the search has finished.
    eventually(lambda: not (folder / ".cache").exists())
    assert [one for one in contents(folder) if "checkpoint_" in one] == []
    address = read_header(folder / FILE_NAME).store
    assert address.startswith(f"s3://{bucket}/searches/mine?endpoint={minio.url}")


def test_files_of_a_search_are_in_the_bucket_too(minio, bucket):
    (result,) = fit(train, name="mine", storage_path=f"s3://{bucket}/searches")

    keys = set(objects_in(minio, bucket))
    assert "searches/mine/journal/000001/ready" in keys
    assert f"searches/mine/{result.trial_name}/result.json" in keys


def test_an_unchanged_file_is_in_the_bucket_once(minio, bucket):
    fit(train, storage_path=f"s3://{bucket}/searches")

    sizes = [
        one.size
        for one in minio.client().list_objects(bucket, recursive=True)
        if "/checkpoint_" in one.object_name and one.size == 4000
    ]
    assert len(sizes) == 1


@pytest.mark.parity(107, 108, 111)
def test_expired_checkpoints_are_gone_from_the_bucket_after_the_search(minio, bucket):
    (result,) = fit(
        train,
        storage_path=f"s3://{bucket}/searches",
        num_to_keep=1,
        checkpoint_score_attribute="score",
    )

    kept = [metrics["step"] for _, metrics in result.best_checkpoints]
    assert kept == [3, 6]
    assert len(manifests_in(minio, bucket)) == 2
    assert step_in(result.checkpoint) == 6, "the file that checkpoint 1 brought is still there"


def test_checkpoint_of_a_repeated_step_comes_with_the_result_that_it_contains(minio, bucket):
    """A repeated step has another result than before, as where a GPU is not deterministic."""

    def learns(config):
        checkpoint, attempt = tune.get_checkpoint(), Path("attempts")
        begin = 1 if checkpoint is None else step_in(checkpoint) + 1
        is_second = attempt.exists()
        attempt.touch()
        for step in range(begin, 5):
            score = step + 0.5 if is_second else step
            made = None
            if step == 1 or is_second:
                Path("made").mkdir(exist_ok=True)
                Path("made", "step").write_text(str(step))
                made = tune.Checkpoint("made")
            tune.report({"score": score}, checkpoint=made)
            if step == 3 and not is_second:
                raise RuntimeError("it fails once")

    (result,) = fit(learns, storage_path=f"s3://{bucket}/searches", max_failures=1)

    kept = {step_in(one): metrics["score"] for one, metrics in result.best_checkpoints}
    assert kept == {1: 1, 2: 2.5, 3: 3.5, 4: 4.5}
    assert [row["score"] for row in result.history] == [1, 2, 3, 4.5]


def test_only_the_best_checkpoints_of_all_trials_are_kept(minio, bucket):
    results = fit(
        train,
        {"n": tune.grid_search([1, 2, 3])},
        storage_path=f"s3://{bucket}/searches",
        checkpoint_score_attribute="score",
        num_to_keep_in_experiment=2,
    )

    kept = [metrics["score"] for result in results for _, metrics in result.best_checkpoints]
    assert kept == [0, 0]
    assert len(manifests_in(minio, bucket)) == 2


@pytest.mark.parity(70, 71)
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_trial_that_failed_continues_from_its_newest_checkpoint(minio, bucket, tmp_path, how):
    space = {"marker": str(tmp_path / "failed"), "how": how}
    (result,) = fit(train, space, max_failures=1, storage_path=f"s3://{bucket}/searches")

    assert result.status == "TERMINATED"
    assert [line["step"] for line in results_of(result)] == [1, 2, 3, 4, 5, 6]
    assert step_in(result.checkpoint) == 6


def test_a_name_that_is_taken_in_the_bucket_gets_a_number(minio, bucket, tmp_path, monkeypatch):
    places = []
    for n in range(2):
        monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / f"machine-{n}"))
        results = fit(train, {"steps": 1}, name="mine", storage_path=f"s3://{bucket}/searches")
        places.append(results.experiment_path)

    assert [os.path.basename(place) for place in places] == ["mine", "mine_2"]
    assert {key.split("/")[1] for key in objects_in(minio, bucket)} == {"mine", "mine_2"}


@pytest.mark.parity(146)
def test_an_upload_dir_means_the_same_and_leaves_results_where_they_were_asked_for(
    minio, bucket, tmp_path
):
    analysis = tune.run(
        train,
        name="mine",
        local_dir=tmp_path / "mine",
        sync_config=tune.SyncConfig(upload_dir=f"s3://{bucket}/searches"),
        verbose=0,
    )

    assert analysis.experiment_path == str(tmp_path / "mine" / "mine")
    assert len(manifests_in(minio, bucket)) == 6
    assert step_in(analysis.trials[0].checkpoint) == 6


def test_a_debugged_search_keeps_its_checkpoints_in_the_bucket(
    minio, bucket, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # it runs in this process, and writes where that is
    (result,) = fit(train, {"steps": 3}, storage_path=f"s3://{bucket}/searches", debug=True)

    assert result.status == "TERMINATED"
    assert len(manifests_in(minio, bucket)) == 3
    assert step_in(result.checkpoint) == 3


# --- beginning from a checkpoint of the user ------------------------------------------------------


@pytest.fixture(params=["bucket", "folder"])
def storage(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "storage")
    return f"s3://{request.getfixturevalue('bucket')}/searches"


def own_checkpoint(folder: Path, step: int) -> Path:
    folder.mkdir()
    (folder / "step").write_text(str(step))
    return folder


@pytest.mark.parity(113)
def test_every_trial_begins_from_the_users_checkpoint_which_is_never_deleted(storage, tmp_path):
    given = own_checkpoint(tmp_path / "given", 4)
    results = fit(
        train,
        {"n": tune.grid_search([1, 2])},
        storage_path=storage,
        num_to_keep=1,
        resume_from_checkpoint=str(given),
    )

    assert [[line["step"] for line in results_of(one)] for one in results] == [[5, 6], [5, 6]]
    address = read_header(Path(results.experiment_path) / FILE_NAME)
    (ref,) = address.settings.restore
    place = address.store or results.experiment_path
    assert step_in(StoredCheckpoint(place, ref.key, ref.sha256)) == 4
    assert given.exists()


class Counts(tune.Trainable):
    """Counts on from its checkpoint."""

    def setup(self, config):
        self.n = 0

    def step(self):
        self.n += 1
        return {"n": self.n}

    def save_checkpoint(self, checkpoint_dir):
        return {"n": self.n}

    def load_checkpoint(self, checkpoint):
        self.n = checkpoint["n"]


@pytest.mark.parity(113)
def test_a_search_that_begins_where_another_ended_counts_on(storage):
    (first,) = fit(
        Counts, storage_path=storage, checkpoint_at_end=True, stop={"training_iteration": 3}
    )
    analysis = tune.run(
        Counts,
        storage_path=storage,
        restore=first.checkpoint,
        stop={"training_iteration": 5},
        verbose=0,
    )

    (second,) = analysis.trials
    assert [(line["training_iteration"], line["n"]) for line in results_of(second)] == [
        (4, 4),
        (5, 5),
    ]


# --- pausing --------------------------------------------------------------------------------------


class TakesTurns(tune.schedulers.TrialScheduler):
    """Pauses each trial after two results, so that another one runs."""

    def on_trial_result(self, runner, trial, result):
        return self.PAUSE if result["training_iteration"] % 2 == 0 else self.CONTINUE


@pytest.mark.parity(68, 130, 140)
def test_paused_trials_give_way_and_continue_without_loss(storage, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEMQ_CPUS", "1")
    log = tmp_path / "log"

    class Writes(Counts):
        def step(self):
            with log.open("a") as file:
                print(self.config["trial"], self.n + 1, file=file)
            return super().step()

    results = fit(
        Writes,
        {"trial": tune.grid_search(["a", "b"])},
        scheduler=TakesTurns(),
        storage_path=storage,
        stop={"training_iteration": 5},
    )

    assert [one.status for one in results] == ["TERMINATED"] * 2
    for result in results:
        assert [line["n"] for line in results_of(result)] == [1, 2, 3, 4, 5]
    executed = log.read_text().splitlines()
    assert len(executed) == len(set(executed)) == 10, "no step was run twice"
    assert executed[:4] == ["a 1", "a 2", "b 1", "b 2"]


# --- what cannot work -----------------------------------------------------------------------------


def nothing_was_made(tmp_path):
    return not (tmp_path / "tunemq_results").exists()


def test_missing_bucket_is_named_before_anything_starts(minio, tmp_path):
    with pytest.raises(StoreError, match="no-such-bucket"):
        fit(train, storage_path="s3://no-such-bucket/searches")
    assert nothing_was_made(tmp_path)


def test_a_bucket_is_made_where_that_was_asked_for(minio):
    (result,) = fit(train, {"steps": 1}, storage_path="s3://made-when-asked/x?create_bucket=true")
    assert step_in(result.checkpoint) == 1


def test_rejected_store_keys_are_called_wrong_and_not_shown(minio, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    with pytest.raises(StoreError) as raised:
        fit(train, storage_path=f"s3://{bucket}/searches")
    assert "wrong-and-secret" not in str(raised.value)
    assert nothing_was_made(tmp_path)


def test_store_server_that_does_not_run_is_named(minio, tmp_path):
    port = free_port()
    with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
        fit(train, storage_path=f"s3://bucket/x?endpoint=http://127.0.0.1:{port}")
    assert nothing_was_made(tmp_path)


def test_an_address_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        fit(train, storage_path="gs://bucket/prefix")
    assert nothing_was_made(tmp_path)


def test_no_key_is_written_down_or_shown_anywhere(minio, bucket, capfd):
    def looks(config):
        shown = subprocess.run(["ps", "-ww", "ax", "-o", "args"], capture_output=True, check=True)
        Path("shown").write_bytes(shown.stdout)
        train({"steps": 2})

    results = fit(looks, storage_path=f"s3://{bucket}/searches", verbose=2)

    secret = minio.secret_key.encode()
    folder = Path(results.experiment_path)
    # What its node still removes is in the bucket, too.
    eventually(lambda: not (folder / ".cache").exists())
    files = contents(folder)
    assert b"redis" in next(text for name, text in files.items() if name.endswith("/shown"))
    assert [name for name, text in files.items() if secret in text] == []
    assert secret not in b"".join(part.encode() for part in capfd.readouterr())
    for key in objects_in(minio, bucket):
        assert secret not in minio.client().get_object(bucket, key).data


def test_search_at_an_address_with_a_profile_uses_its_keys_alone(
    minio, bucket, tmp_path, monkeypatch
):
    file = tmp_path / "credentials"
    file.write_text(
        f"[ada]\naws_access_key_id = {minio.access_key}\n"
        f"aws_secret_access_key = {minio.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "somebody's")
    address = minio.address(bucket, "searches", profile="ada")
    (result,) = fit(train, name="mine", storage_path=address)
    assert step_in(result.checkpoint) == 6

    shutil.rmtree(tmp_path / "results", ignore_errors=True)
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "elsewhere"))
    kept = minio.address(bucket, "searches/mine", profile="ada")
    assert tune.Tuner.can_restore(kept)
    (again,) = tune.Tuner.restore(kept, train).get_results()
    assert step_in(again.checkpoint) == 6

    found = try_store(address, [StoreKeys(StoreRole.SCHEDULER, os.environ)])
    assert {one.level for one in found} == {FindingLevel.OK}
    assert not tune.Tuner.can_restore(kept.replace("profile=ada", "profile=ben"))
    with pytest.raises(StoreError, match="for the profile 'ben'; add them there"):
        fit(train, name="other", storage_path=address.replace("profile=ada", "profile=ben"))
