"""kill -9 of a script, and a restore of its search, repeatedly."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.journal_records import read_records
from tests.support.searches.chain_searches import ChainSearch
from tests.support.searches.killed_searches import GONE_WITHIN_S
from tests.support.stores.object_servers import ObjectServer
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]

Run = Callable[..., ChainSearch]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A function that runs the script, always in the same folder."""
    begun: list[ChainSearch] = []

    def start(**options: Any) -> ChainSearch:
        begun.append(ChainSearch(tmp_path, **options))
        return begun[-1]

    yield start
    for one in begun:
        one.close()


def killed(search: ChainSearch, after_s: float, gone_within: float) -> bool:
    """Kill the script and all of its farm after some time; return False if it ended before."""
    until = time.monotonic() + after_s
    while time.monotonic() < until and search.process.poll() is None:
        time.sleep(0.005)  # the kill comes at a random moment
    if search.process.poll() is not None:
        return False
    os.kill(search.process.pid, signal.SIGKILL)
    search.process.wait()
    search.leaves_nothing(within=gone_within)
    if not tune.Tuner.can_restore(search.folder / "search"):
        # The search had not begun; a script that starts again chooses another name.
        shutil.rmtree(search.folder / "search", ignore_errors=True)
    return True


def repeats(folder: Path) -> list[int]:
    """For each trial of each later run, count the recorded steps that its process reports again."""
    recorded: dict[str, int] = {}
    first: dict[str, int] = {}
    found = []
    for entry in read_records(folder / "search" / FILE_NAME):
        event = entry.event
        if isinstance(event, m.ExperimentResumed):
            first = {}
        elif isinstance(event, m.ResultReported):
            last = recorded.get(event.trial, 0)
            if event.trial not in first:
                first[event.trial] = event.step
                found.append(last + 1 - event.step)
            recorded[event.trial] = max(last, event.step)
    return found


def check(search: ChainSearch) -> None:
    """Check the end of a search that was killed and restored."""
    assert search.ends() == 0, str(search)
    search.is_undisturbed()
    found = repeats(search.folder)
    assert min(found) >= 0, (found, "a step is missing")
    assert max(found) <= search.save_every, (found, search)
    path = search.folder / "search" / FILE_NAME
    again = replay(recover(path).header.settings, read_records(path))
    assert comparable(again) == (search.folder / "snapshot").read_bytes()
    search.leaves_nothing()


def kill_and_restore(
    run: Run,
    kills: int,
    chance: random.Random,
    gone_within: float = GONE_WITHIN_S,
    **options: Any,
) -> int:
    """Kill the search ``kills`` times, then let it end; return how many kills met it alive.

    With a ``gate`` its trials wait behind that step until all kills are done.
    """
    done = 0
    for _ in range(kills):
        search = run(**options)
        if not killed(search, chance.uniform(0.1, 3.0), gone_within):
            break
        done += 1
    check(run(**options | ({"gate": options["steps"]} if "gate" in options else {})))
    return done


@pytest.mark.parity(180)
def test_f03_killed_script_is_restored_without_loss(run: Run, tmp_path: Path) -> None:
    options = {"storage": str(tmp_path), "trials": 4, "steps": 60, "save_every": 4, "cpus": 2}
    assert kill_and_restore(run, 4, random.Random(4), step_s=0.03, **options) >= 3


@pytest.mark.parametrize("form", ["function", "class"])
def test_f03_restore_uploads_a_checkpoint_that_was_only_written(
    run: Run, minio: ObjectServer, bucket: str, form: str
) -> None:
    options = {"storage": minio.address(bucket, "place"), "trials": 2, "steps": 60, "form": form}
    options |= {"save_every": 5, "step_s": 0.03, "gate": 59}
    assert kill_and_restore(run, 2, random.Random(form), **options) == 2


def test_a_search_that_was_interrupted_continues_where_it_was(run: Run, tmp_path: Path) -> None:
    options = {"storage": str(tmp_path), "trials": 4, "steps": 60, "save_every": 4, "cpus": 2}
    search = run(**options, gate=24)
    search.wait_for(m.ResultReported, step=20)
    os.kill(search.process.pid, signal.SIGINT)
    search.wait_for(m.RunInterrupted)
    search.open_gate(60)
    assert search.ends() != 0
    search.leaves_nothing()
    # Running trials got as far as the machine allowed; the other two did not begin.
    assert len({event.trial for event in search.all_of(m.TrialStarted)}) == 2
    check(run(**options, gate=60))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["function", "class"])
def test_f03_twenty_kills_of_the_script_at_random_moments(
    run: Run, tmp_path: Path, form: str
) -> None:
    options = {"storage": str(tmp_path), "trials": 6, "steps": 600, "save_every": 5, "cpus": 3}
    options |= {"step_s": 0.03, "form": form}
    done = kill_and_restore(run, 20, random.Random(form), gone_within=2.0, **options)
    assert done == 20
