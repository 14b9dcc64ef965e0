"""Trials that die after their last result, with their process or with the script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.searches.killed_searches import RunningSearch
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.integration]

SCRIPT = Path(__file__).parent / "scripts" / "stopping_search.py"
LAST = 8

Run = Callable[..., RunningSearch]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A function that runs the script, always in the same folder."""
    begun: list[RunningSearch] = []

    def start(**options: Any) -> RunningSearch:
        begun.append(RunningSearch(tmp_path, script=SCRIPT, **options))
        return begun[-1]

    yield start
    for one in begun:
        one.close()


def check(search: RunningSearch, last: int = LAST) -> None:
    """Check that all trials ended well, with the results up to this step."""
    assert search.ends() == 0, str(search)
    results = json.loads((search.folder / "results.json").read_text("utf-8"))
    assert results == [["TERMINATED", ""]] * 2, str(search)
    for number in range(2):
        assert search.recorded(number) == [(step, step) for step in range(1, last + 1)]
    search.journal_gives_the_state()
    search.leaves_nothing()


@pytest.mark.parametrize(
    ("form", "way", "stop"),
    [
        ("class", "is_killed", "criteria"),
        ("class", "exits", "max_t"),
        ("class", "is_killed", "done"),
        ("function", "exits", "criteria"),
    ],
)
@pytest.mark.parametrize("max_failures", [0, -1])
def test_f02_trial_killed_during_cleanup_ends_with_its_last_result(
    run: Run, form: str, way: str, stop: str, max_failures: int
) -> None:
    search = run(form=form, way=way, stop=stop, max_failures=max_failures)
    check(search)
    said = search.said.decode()
    for number in range(2):
        told = f"trial {search.trial(number)} had reported its last result (step 8)"
        assert said.count(told) == 1, said
        assert not list(search.folder.glob(f"search/*_{number:05d}/error.txt"))


@pytest.mark.parametrize(("last", "expected"), [(8, 8), (12, 12)])
def test_f03_script_killed_during_trial_cleanup_is_restored_to_the_last_result(
    run: Run, last: int, expected: int
) -> None:
    """If the restored search has other stop criteria, its trials continue until these apply."""
    search = run(way="waits")
    cleaned = search.folder / "cleaned"
    eventually(lambda: cleaned.exists() and len(cleaned.read_text().splitlines()) == 2, within=60)
    os.kill(search.process.pid, signal.SIGKILL)
    search.process.wait()
    search.leaves_nothing()
    check(run(way="continues", last=last), expected)
