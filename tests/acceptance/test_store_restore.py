"""An experiment whose folder is lost is restored from its store."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.searches import results_of, table_of
from tests.support.stores.object_servers import ObjectServer
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.objects import remote_object_store

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers may take its time, as one on a busy machine does."""
    monkeypatch.setattr(remote_object_store, "PROBE_S", 30.0)
    monkeypatch.setattr(remote_object_store, "PROBE_ANSWER_S", 30.0)


def train(config):
    step = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step = int(Path(folder, "step").read_text(encoding="ascii"))
    while step < 6:
        step += 1
        if step == 5 and not Path(config["fixed"]).exists():
            raise ValueError("it fails")
        Path("state").mkdir(exist_ok=True)
        Path("state", "step").write_text(str(step), encoding="ascii")
        checkpoint = tune.Checkpoint.from_directory("state") if step % 2 == 0 else None
        tune.report({"loss": config["x"] * step, "began": step}, checkpoint=checkpoint)


def searched(folder: Path, address: str, *, values: tuple[int, ...] = (1, 2)) -> tune.ResultGrid:
    return tune.Tuner(
        train,
        param_space={"x": tune.grid_search(list(values)), "fixed": str(folder / "fixed")},
        tune_config=tune.TuneConfig(metric="loss", mode="min", seed=1),
        run_config=tune.RunConfig(name="search", storage_path=address, verbose=0),
    ).fit()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_search_is_restored_from_its_address(
    tmp_path: Path, monkeypatch, minio: ObjectServer, bucket: str, is_lost: bool
) -> None:
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "results"))
    address = minio.address(bucket, "searches")
    assert searched(tmp_path, address).num_errors == 2
    (tmp_path / "fixed").touch()
    place = minio.address(bucket, "searches/search")
    if is_lost:
        shutil.rmtree(tmp_path / "results")
    assert tune.Tuner.can_restore(place)
    assert not tune.Tuner.can_restore(minio.address(bucket, "searches/other"))
    with pytest.raises(ConfigError, match="is not an experiment"):
        tune.Tuner.restore(minio.address(bucket, "searches/other"), train)

    again = tune.Tuner.restore(place, train, resume_errored=True).fit()

    assert again.experiment_path == str(tmp_path / "results" / "search")
    assert [one.metrics["loss"] for one in again] == [6, 12]
    for one in again:
        assert [line["training_iteration"] for line in results_of(one)] == [1, 2, 3, 4, 5, 6]
        assert len(table_of(one)) == 6
        assert one.metrics["iterations_since_restore"] == 2, "it continued from its checkpoint"


def test_restore_does_not_take_an_outdated_folder_for_the_newest(
    tmp_path: Path, monkeypatch, minio: ObjectServer, bucket: str
) -> None:
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "one machine"))
    assert searched(tmp_path, minio.address(bucket, "searches")).num_errors == 2
    (tmp_path / "fixed").touch()
    place = minio.address(bucket, "searches/search")
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "another machine"))
    assert tune.Tuner.restore(place, train, resume_errored=True).fit().num_errors == 0

    assert tune.Tuner.restore(place, train).get_results().num_errors == 0
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "one machine"))
    heard = rf"process {os.getpid()} on {socket.gethostname()}, since .*, last heard \d+ s ago"
    with pytest.raises(ConfigError, match=rf"continued elsewhere.*\({heard}"):
        tune.Tuner.restore(place, train)
    folder = str(tmp_path / "one machine" / "search")
    outdated = tune.Tuner.restore(folder, train, resume_errored=True)
    assert outdated.get_results().num_errors == 2, "if that is meant"
    with minio.objects(bucket, "searches/search") as objects:
        before = {one.key for one in objects.list()}
        with pytest.raises(ConfigError, match=f"continued elsewhere.*{heard}.*Tuner.restore"):
            outdated.fit()
        assert {one.key for one in objects.list()} == before
        objects.delete([key for key in before if key.startswith("journal/")])  # as it says
    again = tune.Tuner.restore(folder, train, resume_errored=True).fit()
    assert [one.metrics["iterations_since_restore"] for one in again] == [2, 2]


def test_restore_brings_the_newest_state_to_a_folder_that_was_only_fetched(
    tmp_path: Path, monkeypatch, minio: ObjectServer, bucket: str
) -> None:
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "one machine"))
    ran = searched(tmp_path, minio.address(bucket, "searches"))
    place = minio.address(bucket, "searches/search")
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "another machine"))
    assert tune.Tuner.restore(place, train).get_results().num_errors == 2
    folder = tmp_path / "another machine" / "search"
    (folder / "plot.png").touch()  # of the user
    (tmp_path / "fixed").touch()
    tune.Tuner.restore(ran.experiment_path, train, resume_errored=True).fit()

    again = tune.Tuner.restore(place, train).get_results()

    assert (again.num_errors, again.experiment_path) == (0, str(folder))
    assert [len(results_of(one)) for one in again] == [6, 6]
    assert (folder / "plot.png").exists()


def test_restore_does_not_take_a_removed_search_for_the_one_that_got_its_address(
    tmp_path: Path, monkeypatch, minio: ObjectServer, bucket: str
) -> None:
    (tmp_path / "fixed").touch()
    place = minio.address(bucket, "searches/search")
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "one machine"))
    first = searched(tmp_path, minio.address(bucket, "searches"), values=(1, 2, 3))
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "another machine"))
    fetched = tune.Tuner.restore(place, train).get_results().experiment_path
    with minio.objects(bucket, "searches/search") as objects:
        objects.delete([one.key for one in objects.list()])
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "a third machine"))
    searched(tmp_path, minio.address(bucket, "searches"), values=(7,))

    for machine in ("one machine", "another machine"):
        monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / machine))
        (one,) = tune.Tuner.restore(place, train).get_results()
        assert one.config["x"] == 7
    for folder in (first.experiment_path, fetched):  # they may be the last ones
        assert len(tune.Tuner.restore(folder, train).get_results()) == 3
    with pytest.raises(ConfigError, match="another search took its place"):
        tune.Tuner.restore(first.experiment_path, train, resume_errored=True).fit()


def test_restore_where_another_folder_has_the_name_finds_its_own_folder_again(
    tmp_path: Path, monkeypatch, minio: ObjectServer, bucket: str
) -> None:
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "results"))
    assert searched(tmp_path, minio.address(bucket, "searches")).num_errors == 2
    place = minio.address(bucket, "searches/search")
    (tmp_path / "results" / "search").rename(tmp_path / "elsewhere")
    (tmp_path / "results" / "search").mkdir()

    first = tune.Tuner.restore(place, train, resume_errored=True).fit()
    (tmp_path / "fixed").touch()
    second = tune.Tuner.restore(place, train, resume_errored=True).fit()

    assert first.experiment_path == str(tmp_path / "results" / "search_2")
    assert second.experiment_path == first.experiment_path
    assert second.num_errors == 0
    (tmp_path / "results" / "search").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "results" / "search")  # checked afterwards
