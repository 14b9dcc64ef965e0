"""`tunemq doctor` finds problems of a farm's machines; each test causes one problem."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.integration.gpu_fixtures import uuids
from tests.support.fake_gpus import remove_locks
from tests.support.farms.examined_farm import ExaminedFarm, beginning_with, farm, shifted_library
from tests.support.farms.farm_service import Search
from tests.support.small_disk import on_small_disk, with_small_disk
from tunemq_scheduler.security.findings import FindingLevel

__all__ = ["farm", "uuids"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


def test_a_node_with_another_python_is_found(farm: ExaminedFarm, tmp_path: Path):
    older = beginning_with(
        tmp_path / "older", "import platform; platform.python_version = lambda: '3.9.1'"
    )
    with farm.worker("older", PYTHONPATH=older):
        finding = farm.has_only("node-python", "python3.", "-m venv", "install TuneMQ")
    assert "node older has Python 3.9.1" in finding.what


def test_a_node_with_another_cloudpickle_is_found(farm: ExaminedFarm, tmp_path: Path):
    other = shifted_library(tmp_path, "cloudpickle", "0.0.1")
    with farm.worker("other", PYTHONPATH=other):
        finding = farm.has_only("node-libraries", "pip install cloudpickle==")
    assert "node other has cloudpickle 0.0.1" in finding.what


def test_a_node_with_another_library_that_trials_use_is_found(farm: ExaminedFarm, tmp_path: Path):
    (tmp_path / "numpy-1.0.7.dist-info").mkdir()
    with farm.worker("other", PYTHONPATH=str(tmp_path)), farm.worker("third"):
        finding = farm.has_only("node-libraries", "pip install numpy==", level=FindingLevel.WARNING)
    assert "node other has numpy 1.0.7" in finding.what


def test_a_node_with_a_torch_that_runs_code_from_checkpoints_is_found(
    farm: ExaminedFarm, tmp_path: Path
):
    (tmp_path / "torch-2.5.1+cu121.dist-info").mkdir()
    with farm.worker("other", PYTHONPATH=str(tmp_path)):
        found = farm.examined()
    whats = [one.what for one in found.of("node-libraries")]
    assert any("torch 2.5.1+cu121" in what and "CVE-2026-24747" in what for what in whats), found


def test_a_node_whose_clock_is_off_by_an_hour_is_found(farm: ExaminedFarm, tmp_path: Path):
    late = beginning_with(
        tmp_path / "late", "import time; now = time.time; time.time = lambda: now() - 3600"
    )
    with farm.worker("late", PYTHONPATH=late):
        finding = farm.has_only("clocks", "timedatectl set-ntp true")
    assert "node late is 60 min behind" in finding.what


def test_a_head_whose_clock_is_off_by_an_hour_is_found(farm: ExaminedFarm, tmp_path: Path):
    early = beginning_with(
        tmp_path / "early", "import time; now = time.time; time.time = lambda: now() + 3600"
    )
    done = farm.doctor_process({"PYTHONPATH": early})
    assert done.returncode == 1
    assert "the clock of this machine is 60 min ahead of the others" in done.stdout


def test_two_workers_on_one_gpu_are_found(farm: ExaminedFarm, uuids: list[str]):
    shared, own = uuids
    with farm.worker("first", "--gpus", shared):
        remove_locks(shared)  # as where containers do not share the folder
        with farm.worker("second", "--gpus", f"{shared},{own}"):
            finding = farm.has_only("node-gpus", "--gpus", "/dev/shm")
    assert shared in finding.what
    assert "first on" in finding.what
    assert "second on" in finding.what


def test_a_worker_with_a_full_disk_is_found(farm: ExaminedFarm, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    before = on_small_disk(disk, [], options="size=8m")
    with farm.worker("full", "--workdir", str(disk / "work"), before=before):
        finding = farm.has_only("node-disk", "tunemq worker --workdir", "tunemq rm --files")
    assert "node full" in finding.what
    assert "the disk is full" in finding.what


def test_a_head_with_a_full_disk_is_found(farm: ExaminedFarm, tmp_path: Path, monkeypatch):
    for name, value in farm.environ("head").items():
        monkeypatch.setenv(name, value)
    results = tmp_path / "results"
    line = [*farm.command("doctor", "--results", str(results))]
    done = with_small_disk(results, line)
    assert done.returncode == 1, done
    assert "problem  results-disk" in done.stdout
    assert f"the results in {results}: " in done.stdout
    assert "tunemq scheduler --results" in done.stdout


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("size=1g,nr_inodes=1", "the file system has inodes for 0 more files only"),
        ("size=1g,ro", "the file system is read-only"),
    ],
)
def test_doctor_on_a_head_where_no_file_can_be_made_finds_a_problem(
    farm: ExaminedFarm, tmp_path: Path, monkeypatch, options: str, what: str
):
    for name, value in farm.environ("head").items():
        monkeypatch.setenv(name, value)
    results = tmp_path / "results"
    line = [*farm.command("doctor", "--results", str(results))]
    done = with_small_disk(results, line, options=options)
    assert done.returncode == 1, done
    assert f"the results in {results}: {what}" in done.stdout


def test_doctor_with_a_results_folder_that_does_not_exist_says_so(
    farm: ExaminedFarm, tmp_path: Path
):
    gone = tmp_path / "nonexistent" / "foo"
    finding = farm.has_only(
        "results-disk", level=FindingLevel.WARNING, more=("--results", str(gone))
    )
    assert f"{gone} does not exist" in finding.what
    (tmp_path / "nonexistent").write_text("a file, where a folder has to be")
    finding = farm.has_only("results-disk", more=("--results", str(gone)))
    assert "cannot be written: Not a directory" in finding.what


def test_doctor_ignores_forged_node_metrics(farm: ExaminedFarm):
    instance_id = secrets.token_hex(8)
    key = f"tunemq:vitals:{instance_id}"
    for words in (b"", b"\0", b"\x01" * 50, os.urandom(200), b"\0" + b"\x91" * 5000):
        farm.redis.client.set(key, words, ex=600)  # longer than one check takes on a busy machine
        try:
            finding = farm.has_only("nodes", "tunemq worker --keys worker.toml")
        finally:
            farm.redis.client.delete(key)
        assert instance_id in finding.what


def test_doctor_search_without_any_node_is_a_problem(farm: ExaminedFarm, monkeypatch):
    """The scheduler was started again, so that it has forgotten the node that died."""
    monkeypatch.setenv("TUNEMQ_KEYS", str(farm.keys / "ada.toml"))
    farm.submit(Search(name="needy", trials=1, step_s=1.0, steps=1000))
    farm.wait_for("needy", "RUNNING")
    farm.kill_scheduler()
    worker = farm.workers["one"]
    worker.kill()
    worker.wait()
    farm.has_node_metrics(0)
    farm.start_scheduler("--store", farm.store)
    try:
        farm.wait_for("needy", "RUNNING")
        finding = farm.has_only("nodes", "tunemq worker")
        assert "needy (RUNNING)" in finding.what
        assert farm.run("stop", "needy").returncode == 0
        farm.wait_for("needy", "STOPPED")
        farm.has_only("nodes", "tunemq worker", level=FindingLevel.WARNING)
    finally:
        farm.add_worker("one")
        farm.has_node_metrics(1)


def test_doctor_without_nodes_and_scheduler_names_the_start_commands(farm: ExaminedFarm):
    found = farm.examined("--redis", f"{farm.redis.url[:-1]}5", "--store", farm.store)
    fixes = {one.check: one.fix for one in found.findings if one.level is not FindingLevel.OK}
    assert set(fixes) == {"nodes", "scheduler"}, str(found)
    assert "tunemq worker" in fixes["nodes"]
    assert "tunemq scheduler" in fixes["scheduler"]
    assert [one.check for one in found.findings if one.level is FindingLevel.PROBLEM] == [
        "scheduler"
    ]


def test_doctor_with_a_running_scheduler_looks_at_its_results_folder(
    farm: ExaminedFarm, tmp_path: Path
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    said = farm.doctor(variables={"TUNEMQ_RESULTS": str(elsewhere)}).stdout
    assert f"the results in {farm.results}" in said
    assert str(elsewhere) not in said
