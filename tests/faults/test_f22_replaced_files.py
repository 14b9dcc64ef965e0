"""F22: trials replace the files that the experiment process writes for them.

The experiment continues, the files of all other trials are intact, and the replacement is kept
beside the restored file.
"""

from __future__ import annotations

import os
import shutil
import socket
import time

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of, table_of

__all__ = ["ended_searches"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

NAMES = ("result.json", "progress.csv", "params.json", "params.pkl", "error.txt", "stdout")
STEPS = 6


def fifo(path):
    os.mkfifo(path)


def folder(path):
    os.makedirs(os.path.join(path, "in it"))


def full_device(path):
    os.symlink("/dev/full", path)


def foreign_file(path):
    os.symlink(os.environ["F22_FOREIGN"], path)


def dangling_link(path):
    os.symlink("/nowhere/at all", path)


def listening_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(os.path.dirname(path))
        server.bind(os.path.basename(path))


def no_rights(path):
    with open(path, "w"):
        pass
    os.chmod(path, 0)


def nothing(path):
    pass


@pytest.mark.parametrize(
    "put",
    [fifo, folder, full_device, foreign_file, dangling_link, listening_socket, no_rights, nothing],
)
def test_f22_trial_that_replaces_its_files_harms_no_other_trial(put, tmp_path, monkeypatch):
    foreign = tmp_path / "foreign"
    foreign.write_text("of another program")
    monkeypatch.setenv("F22_FOREIGN", str(foreign))

    def replaces(config):
        own = tune.get_context().get_trial_dir()
        first = tune.get_checkpoint() is None
        for step in range(STEPS):
            if config["number"] == 0 and first and step in (0, 3):
                for name in NAMES:
                    path = os.path.join(own, name)
                    if os.path.isdir(path):
                        shutil.rmtree(path)
                    elif os.path.lexists(path):
                        os.unlink(path)
                    put(path)
            more = {"later": 1.0} if step > 3 else {}
            tune.report({"loss": float(step), **more})
            time.sleep(0.05)
        if config["number"] == 0:
            raise ValueError("on purpose")

    grid = fit(
        replaces, {"number": tune.grid_search([0, 1, 2])}, metric="loss", mode="min", max_failures=1
    )

    statuses = {one.config["number"]: one.error for one in grid}
    assert "on purpose" in str(statuses[0])
    for one in grid:
        if one.config["number"]:
            assert one.error is None
            assert len(one.metrics_dataframe) == STEPS
    assert foreign.read_text() == "of another program"


def test_f22_trial_that_removes_its_folder_harms_no_other_trial():
    def removes(config):
        own = tune.get_context().get_trial_dir()
        for step in range(STEPS):
            if config["number"] == 0 and step % 2:
                shutil.rmtree(own)
                if step == 3:
                    with open(own, "w"):
                        pass
            more = {f"key {step}": 1.0}
            tune.report({"loss": float(step), **more})
            time.sleep(0.05)
        if config["number"] == 0:
            raise ValueError("on purpose")

    grid = fit(removes, {"number": tune.grid_search([0, 1, 2])}, metric="loss", mode="min")

    assert "on purpose" in str(grid.errors[0])
    assert all(len(one.metrics_dataframe) == STEPS for one in grid if one.config["number"])


@pytest.mark.parametrize("content", [b"", b'{"loss": 1}', b"fps,reward\n1,2\n", b"\x00\xff\n"])
@pytest.mark.parametrize("name", ["result.json", "progress.csv"])
def test_f22_search_with_a_foreign_file_can_be_restored(name, content, tmp_path):
    def fails_once(config):
        begin = 0 if tune.get_checkpoint() is None else 3
        for step in range(begin, STEPS):
            tune.report({"loss": float(step)}, checkpoint=tune.Checkpoint.from_dict({}))
            if step == 2 and not (tmp_path / "failed").exists():
                raise ValueError("on purpose")

    first = fit(fails_once, storage_path=str(tmp_path), name="search")
    (tmp_path / "failed").touch()
    path = os.path.join(first[0].path, name)
    with open(path, "wb") as file:
        file.write(content)

    grid = tune.Tuner.restore(first.experiment_path, fails_once, resume_errored=True).fit()

    assert not grid.errors
    assert [row["training_iteration"] for row in results_of(grid[0])] == [1, 2, 3, 4, 5, 6]
    assert [row["training_iteration"] for row in table_of(grid[0])] == list("123456")
