"""A script on another machine than the scheduler's reads the results of a farm's search."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tunemq as tune
from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.searches.chain import chain
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually, need
from tunemq_scheduler.api.experiment_handle import ExperimentHandle
from tunemq_scheduler.experiment.restore import foreign_results
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_scheduler.settings.saved_tuner import TUNER_FILE
from tunemq_shared.base.errors import TuneError
from tunemq_shared.checkpoints.open_store import open_objects

__all__ = ["open_folder"]

pytestmark = pytest.mark.faults


@pytest.fixture
def farm(
    tmp_path: Path, minio: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FarmService]:
    for name, value in minio.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "laptop" / "tunemq_results"))
    with farm_service(tmp_path, starts=False) as farm:
        farm.of_home = dict.fromkeys(("head", "laptop", "one"), minio.environ)
        farm.start_scheduler("--store", f"s3://{bucket}/searches")
        farm.add_worker("one")
        farm.has_nodes("one")
        yield farm


def handle_of(farm: FarmService, name: str) -> ExperimentHandle:
    """A handle as `Tuner.fit` returns it, on a machine without the scheduler's folders."""
    handle = ExperimentHandle(
        farm.url, name, chain, farm.rows()[name].id, metric="score", mode="max"
    )
    detail = handle._detail
    elsewhere = {"folder": str(farm.folder / "not here")}
    handle._detail = lambda: msgspec.structs.replace(detail(), **elsewhere)
    return handle


def steps_of(results: tune.ResultGrid) -> list[int]:
    return [len(one.history) for one in results]


def test_results_so_far_can_be_read_again_and_again(farm: FarmService) -> None:
    farm.submit(Search(name="search", trials=2, steps=20, save_every=5, has_gate=True))
    handle = handle_of(farm, "search")
    folders = set()
    for steps in (5, 10, 20):
        farm.open_gate("search", steps)

        def has_them(steps: int = steps) -> bool:
            try:
                results = handle.get_results()
            except TuneError as error:
                if re.search("not copied there yet|cannot read. Give the farm", str(error)):
                    return False  # nothing of it is in the store yet
                raise
            folders.add(results.experiment_path)
            return [one.metrics.get("training_iteration") for one in results] == [steps] * 2

        eventually(has_them, within=60, message=lambda: str(farm))
    assert handle.wait(60).is_over
    results = handle.get_results()
    assert steps_of(results) == [20, 20]
    assert folders == {str(farm.folder / "laptop" / "tunemq_results" / "search")}


def test_handle_and_fetched_folder_of_a_removed_search_are_not_those_of_its_successor(
    farm: FarmService,
) -> None:
    farm.submit(Search(name="search", trials=3, steps=5))
    handle = handle_of(farm, "search")
    assert handle.wait(60).is_over
    assert steps_of(handle.get_results()) == [5, 5, 5]
    farm.tunemq("rm", "--files", "--yes", "search")
    with pytest.raises(TuneError, match="search"):
        handle.status()
    script = farm.folder / "laptop" / "search" / "search.py"
    script.write_text(script.read_text().replace("range(3)", "range(1)"))
    farm.tunemq("submit", str(script), "--name", "search", "--detach")

    for use in (handle.status, handle.stop, handle.pause, handle.get_results):
        with pytest.raises(TuneError, match="no longer has this experiment"):
            use()
    with pytest.raises(TuneError, match="no longer has this experiment"):
        handle.attach(shows=False)
    second = handle_of(farm, "search")
    assert second.wait(60).name == "FINISHED"
    assert steps_of(second.get_results()) == [5]


def test_search_that_failed_before_it_began_has_its_reason_as_results(farm: FarmService) -> None:
    farm.submit(Search(name="search", code="raise RuntimeError('no disk of data')"))
    handle = handle_of(farm, "search")
    assert handle.wait(60).name == "FAILED"

    with pytest.raises(TuneError, match=r"search failed: (?s:.*)no disk of data"):
        handle.get_results()


def _prints_its_folder(config):
    print("the trial prints")
    tune.report({"loss": 1.0, "folder": os.getcwd()})


def test_trials_of_a_notebook_run_in_folders_of_their_node(farm: FarmService) -> None:
    """Its code has no bundle, and the scheduler's folders do not exist on another machine."""
    grid = tune.Tuner(
        _prints_its_folder,
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="notebook", verbose=0),
    ).fit(address=farm.url)
    (result,) = grid
    assert result.error is None
    assert str(farm.results) not in result.metrics["folder"]
    assert "the trial prints" in farm.tunemq("logs", f"notebook/{result.metrics['trial_id']}")


def _writes_records(config):
    for name in ("result.json", "checkpoint_1-000001/manifest.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    Path("made").mkdir()
    Path("made", "weights").write_text("good")
    tune.report({"loss": 1.0}, checkpoint=tune.Checkpoint.from_directory("made"))


def test_files_of_a_trial_replace_neither_its_results_nor_its_checkpoint_in_the_store(
    farm: FarmService, bucket: str
) -> None:
    tune.Tuner(
        _writes_records,
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="records", verbose=0),
    ).fit(address=farm.url)
    address = f"s3://{bucket}/searches/records"

    def sent() -> set[str]:
        with open_objects(address) as objects:
            return {one.key.partition("/")[2] for one in objects.list() if "/attempt_1/" in one.key}

    own = {"result.json", "checkpoint_1-000001/manifest.json", "made/weights"}
    eventually(
        lambda: sent() >= {f"attempt_1/{name}" for name in own},
        within=60,
        message=lambda: str(farm),
    )

    (result,) = tune.Tuner.restore(address, _writes_records).get_results()

    assert [one["loss"] for one in result.history] == [1.0]
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "weights").read_text() == "good"


def _fails_once(config):
    number = "second" if os.path.exists(config["tried"]) else "first"
    found = os.listdir()
    for name in ("model", number):
        Path(name).write_bytes(number.encode() * 4_000_000)
    if number == "first":
        Path(config["tried"]).touch()
        raise RuntimeError("the first attempt fails")
    tune.report({"loss": 1.0, "found": ",".join(found)})


def test_retry_on_the_same_node_changes_no_file_of_the_attempt_before(
    farm: FarmService, bucket: str, tmp_path: Path
) -> None:
    (result,) = tune.Tuner(
        _fails_once,
        param_space={"tried": str(tmp_path / "tried")},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(
            name="retried", verbose=0, failure_config=tune.FailureConfig(max_failures=1)
        ),
    ).fit(address=farm.url)
    assert set(result.metrics["found"].split(",")) == {"stdout", "stderr"}
    with open_objects(f"s3://{bucket}/searches/retried") as objects:

        def sent() -> dict[str, int]:
            found = (one for one in objects.list() if "/attempt_" in one.key)
            return {one.key.partition("/")[2]: one.size for one in found}

        eventually(lambda: {"attempt_1/first", "attempt_2/second"} <= sent().keys(), within=60)
        eventually(lambda: {"attempt_1/model", "attempt_2/model"} <= sent().keys(), within=60)
        sizes = sent()
        models = [sizes["attempt_1/model"], sizes["attempt_2/model"]]
        assert models == [len(text) * 4_000_000 for text in ("first", "second")]
        assert "attempt_2/first" not in sizes


class Leaves:
    """Leaves a mark wherever it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return _leave, (str(self.mark),)


def _leave(mark: str) -> Leaves:
    Path(mark).touch()
    return Leaves(Path(mark))


def reports_once(config):
    tune.report({"loss": config["lr"]})


def test_results_of_a_farm_are_read_without_running_what_stands_in_the_store(
    tmp_path: Path,
) -> None:
    """Another submitter, or a worker, could have put it there."""
    mark = tmp_path / "mark"
    tuner = tune.Tuner(
        reports_once,
        param_space={"lr": tune.grid_search([0.5, 0.25]), "betas": (0.9, 1), "odd": Leaves(mark)},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="search", storage_path=str(tmp_path), verbose=0),
    )
    tuner.fit()
    mark.unlink(missing_ok=True)
    folder = str(tmp_path / "search")
    identity = read_header(Path(folder) / FILE_NAME).experiment_id
    tuner_file = Path(folder, TUNER_FILE)
    tuner_file.rename(tmp_path / "aside")  # only the scheduler's user may read it
    results = foreign_results(folder, identity[:8], reports_once, metric="loss", mode="min")
    best = results.get_best_result()
    assert (best.metrics["loss"], best.config["betas"]) == (0.25, (0.9, 1))
    assert [len(one.history) for one in results] == [1, 1]
    assert "pickled" in repr(best.config["odd"])
    assert not mark.exists()
    (tmp_path / "aside").rename(tuner_file)
    assert tune.Tuner.restore(folder, reports_once).get_results()[0].config["odd"].mark == mark
    assert mark.exists(), "it would have run"


def test_folder_of_the_head_that_this_user_may_not_read_is_passed_over(open_folder: Path) -> None:
    """The store has the same results; see `ExperimentHandle.get_results`."""
    need("another user", os.geteuid() == 0 or None)
    closed = open_folder / "closed"
    (closed / "search" / "journal").mkdir(parents=True)
    closed.chmod(0o700)
    script = (
        "from tunemq_scheduler.experiment.restore import can_restore;"
        f"print(can_restore({str(closed / 'search')!r}))"
    )
    ended = subprocess.run(
        [*reachable(NOBODY), sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )
    assert (ended.stdout, ended.returncode) == ("False\n", 0), ended.stderr
