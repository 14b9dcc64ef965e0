"""Trials that start processes, as training does: these work during the trial and end with it."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.searches.killed_searches import RunningSearch, searches
from tests.support.waiting import eventually
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]

SCRIPT = Path(__file__).parent / "scripts" / "process_trees.py"
#: The result of each trial's process tree; three processes are known of each except the bomb.
FOUND = {"fork": 140, "spawn": 140, "forkserver": 140, "launch": 42, "bomb": 8}
#: A process tree is gone one second after its trial was stopped; on a busy machine, after this
#: time. Without that, its first process would end after five minutes.
PROMISED_S, BUSY_S = 1.0, 40.0
STALL_S = 6.0
HOW = {"script": SCRIPT, "cpus": len(FOUND)}

Start = Callable[..., RunningSearch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from searches(tmp_path)


class ProcessTrees:
    """The processes of all trials of a search, by pidfds, because the kernel reuses pids."""

    def __init__(self, search: RunningSearch) -> None:
        self.search = search
        found = list(FOUND.values())
        eventually(lambda: sorted(self._found()) == sorted(found), within=60, message=str(search))
        self.trial_pids = {event.trial: event.pid for event in search.all_of(m.TrialStarted)}
        known = 3 * (len(FOUND) - 1) + 1
        eventually(lambda: len(self._noted()) == known, message=lambda: str(self._noted()))
        self._pidfds = {
            pid: os.pidfd_open(pid) for pid in [*self.trial_pids.values(), *self._noted()]
        }

    def _found(self) -> list[int]:
        newest = {
            event.trial: event.metrics["found"] for event in self.search.all_of(m.ResultReported)
        }
        return list(newest.values())

    def _noted(self) -> set[int]:
        files = (self.search.folder / "members").iterdir()
        return {int(pid) for file in files for pid in file.read_text(encoding="ascii").split()}

    def left(self) -> list[int]:
        """Return the running processes: known ones, and those that work in the trials' folders."""
        waiting = select.poll()
        for pidfd in self._pidfds.values():
            waiting.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in waiting.poll(0)}
        known = [pid for pid, pidfd in self._pidfds.items() if pidfd not in ended]
        return known + working_below(self.search.folder / "search")

    def are_gone(self, began: float, within: float) -> None:
        """Wait until all have ended."""
        eventually(
            lambda: not self.left(),
            within=BUSY_S,
            message=lambda: f"left: {self.left()}{self.search}",
        )
        took = time.monotonic() - began
        print(f"gone after {took:.2f} s")
        assert took < within
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def working_below(folder: Path) -> list[int]:
    """Return the processes whose working directory is there; ended processes have none."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/cwd").startswith(f"{folder}/"):
                found.append(int(pid))
        except OSError:
            continue
    return found


often_and_strictly = pytest.mark.parametrize(
    "within", [BUSY_S, pytest.param(PROMISED_S, marks=pytest.mark.soak)]
)


@pytest.mark.parity(128)
@often_and_strictly
def test_process_trees_compute_right_results_and_end_with_stopped_trials(start, within):
    search = start(**HOW)
    process_trees = ProcessTrees(search)
    began = time.monotonic()
    (search.folder / "stop").touch()
    process_trees.are_gone(began, within)
    assert search.ends() == 0
    assert not search.all_of(m.TrialFailed) + search.all_of(m.TrialProcessDied)


@often_and_strictly
def test_process_trees_end_when_their_trial_processes_are_killed(start, within):
    search = start(**HOW)
    process_trees = ProcessTrees(search)
    began = time.monotonic()
    for pid in process_trees.trial_pids.values():
        os.kill(pid, signal.SIGKILL)
    process_trees.are_gone(began, within)
    assert search.ends() == 0
    assert len(search.all_of(m.TrialProcessDied)) == len(FOUND)


@pytest.mark.soak
def test_process_trees_end_when_their_trials_exceed_the_time_limit(start):
    search = start(**HOW, stall_s=STALL_S)
    process_trees = ProcessTrees(search)
    (search.folder / "hang").touch()
    failed = max(
        search.wait_for(m.TrialFailed, trial=trial).at for trial in process_trees.trial_pids
    )
    process_trees.are_gone(failed, PROMISED_S)
    assert search.ends() == 0
    assert {event.kind for event in search.all_of(m.TrialFailed)} == {"stalled"}


@pytest.mark.soak
def test_process_trees_end_with_the_script(start):
    search = start(**HOW)
    process_trees = ProcessTrees(search)
    began = time.monotonic()
    search.process.send_signal(signal.SIGINT)
    process_trees.are_gone(began, PROMISED_S)
    search.ends()
    search.leaves_nothing()
