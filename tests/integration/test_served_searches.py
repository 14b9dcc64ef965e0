"""Searches whose store is a folder that `tunemq store serve` serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.commands import run_tunemq
from tests.support.searches.chain_searches import ChainSearch, chain_searches
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of
from tests.support.stores.object_servers import ServedFolder
from tests.support.waiting import eventually
from tunemq_scheduler.storage.stored_checkpoint import StoredCheckpoint

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def train(config):
    """Train six steps, each with a checkpoint; fail once at the fourth."""
    checkpoint = tune.get_checkpoint()
    first = 1
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "step").read_text()) + 1
    made = Path("made")
    made.mkdir(exist_ok=True)
    (made / "same").write_bytes(b"same" * 1000)
    for step in range(first, 7):
        failed = Path(config["marker"])
        if step == 4 and not failed.exists():
            failed.touch()
            raise RuntimeError("it fails once")
        (made / "step").write_text(str(step))
        tune.report({"step": step, "score": step}, checkpoint=tune.Checkpoint(made))


@pytest.fixture
def start(tmp_path: Path, served: ServedFolder) -> Iterator[Callable[..., ChainSearch]]:
    yield from chain_searches(tmp_path, served, served.create_bucket())


def test_search_keeps_checkpoints_in_a_served_folder_and_continues_from_them(served, tmp_path):
    place = served.create_bucket()
    results = fit(
        train,
        {"marker": str(tmp_path / "failed")},
        name="mine",
        storage_path=served.address(place),
        max_failures=1,
    )
    (result,) = results
    assert result.status == "TERMINATED"
    assert [line["step"] for line in results_of(result)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(result.checkpoint, StoredCheckpoint)
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "step").read_text() == "6"
    folder = served.data / place / "mine"
    assert len(list(folder.rglob("manifest.json"))) == 6
    assert (folder / result.trial_name / "result.json").is_file()
    assert (folder / "journal" / "000001" / "ready").is_file()
    verified = run_tunemq(tmp_path, "checkpoints", "verify", served.address(place, "mine"))
    assert "6 of 6 checkpoints are whole" in verified.stdout


def test_f02_trials_whose_processes_die_continue_from_the_served_folder(start):
    search = start(trials=2, steps=30, step_s=0.02, gate=10)
    eventually(lambda: len(search.trial_pids()) == 2, within=60, message=lambda: str(search))
    assert search.kill(search.trial_pids()[0])
    assert search.kill_the_node()
    search.open_gate(30)  # not before, or they might be over already
    assert search.ends(within=100) == 0, str(search)
    search.is_undisturbed()
    search.is_whole()
    search.left_nothing_in_the_store()


def test_search_that_lost_its_folder_is_restored_from_the_served_folder(served, tmp_path):
    place = served.create_bucket()
    (tmp_path / "failed").touch()
    space = {"marker": str(tmp_path / "failed")}
    fit(train, space, name="mine", storage_path=served.address(place))
    address = served.address(place, "mine")
    script = tmp_path / "restore.py"
    script.write_text(
        "import sys, tunemq as tune\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.integration.test_served_searches import train\n"
        f"assert tune.Tuner.can_restore({address!r})\n"
        f"tuner = tune.Tuner.restore({address!r}, train)\n"
        "print(tuner.fit()[0].metrics['step'])\n"
    )
    elsewhere = {**os.environ, "TUNEMQ_RESULTS": str(tmp_path / "elsewhere")}
    done = subprocess.run(
        [sys.executable, str(script)], env=elsewhere, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "6"
