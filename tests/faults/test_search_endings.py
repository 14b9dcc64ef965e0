"""Ctrl-C, signals and exceptions in a script: what it saves, prints and leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.searches.killed_searches import GONE_WITHIN_S, RunningSearch, searches
from tests.support.waiting import eventually
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]

Start = Callable[..., RunningSearch]

CTRL_C = b"\x03"
#: Kinds of trials: one ends when asked, one has a process tree that does not, one never ends.
KINDS = ("plain", "process_tree", "stubborn")
ENDLESS = 10_000
#: Seconds from a second Ctrl-C to the script's end on a busy machine, and the grace period of trial
#: processes after the first one.
AT_ONCE_S, GRACE_S = 15.0, 100.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from searches(tmp_path)


def patience(kind: str) -> dict[str, float]:
    """Give trial processes that end by themselves enough time on a busy machine."""
    return {} if kind == "stubborn" else {"interrupt_grace_s": GRACE_S}


def begun(search: RunningSearch, step: int = 2) -> set[int]:
    """Wait until both trials are in a step; return the pids of all processes."""
    for number in (0, 1):
        search.wait_for_step(number, step)
        search.wait_for(m.ResultReported, trial=search.trial(number), step=step - 1)
    pids = {process.pid for process in search.processes()} | search.process_trees()
    assert len(pids) >= 7, "watchdog, Redis, node, consumer, forkserver, two trial processes"
    return pids


def leaves_nothing(search: RunningSearch, pids: set[int], since: float) -> None:
    within = since + GONE_WITHIN_S - time.monotonic()
    search.leaves_nothing(pids | search.process_trees(), max(0.0, within))


def everything_is_saved(search: RunningSearch) -> None:
    """Check that the loggers' files match the journal, and the journal the executed steps."""
    search.journal_gives_the_state()
    for number in (0, 1):
        recorded = [step for step, _ in search.recorded(number)]
        assert recorded == list(range(1, len(recorded) + 1))
        results = search.all_of(m.ResultReported)
        assert recorded == [one.step for one in results if one.trial == search.trial(number)]
        # The last step that began was not reported, or its report was on its way.
        assert len(search.steps(number)) - len(recorded) <= 2


def a_table_was_shown(search: RunningSearch, outcome: str) -> None:
    said = search.said.decode()
    assert f"search {outcome}" in said, str(search)
    assert str(search.folder / "search") in said.replace("\r\n", "")
    assert "best value" in said


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_the_terminal_saves_and_shows_everything_and_leaves_nothing(start, kind):
    # The shell reports how the script ended.
    shell = 'trap : INT; "$@"; echo "exit code $?"'
    how = {"kind": kind, "steps": ENDLESS, **patience(kind)}
    search = start(at_terminal=True, shell=shell, cpus=2, **how)
    pids = begun(search)
    asked = time.monotonic()
    search.type(CTRL_C)
    search.ends()

    print(f"ended after {time.monotonic() - asked:.3f}")
    leaves_nothing(search, pids, since=time.monotonic())
    assert "exit code 130" in search.said.decode(), str(search)
    everything_is_saved(search)
    a_table_was_shown(search, "was interrupted (SIGINT)")


@pytest.mark.parametrize("kind", KINDS)
def test_f24_sigterm_saves_and_shows_everything_and_leaves_nothing(start, kind):
    search = start(kind=kind, steps=ENDLESS, cpus=2, **patience(kind))
    pids = begun(search)
    search.process.terminate()
    code = search.ends()

    leaves_nothing(search, pids, since=time.monotonic())
    assert code == -signal.SIGTERM, search  # which a shell calls 143
    everything_is_saved(search)
    a_table_was_shown(search, "was interrupted (SIGTERM)")


@pytest.mark.parametrize("kind", KINDS)
def test_sigkill_of_the_script_leaves_nothing(start, kind):
    search = start(kind=kind, steps=ENDLESS, cpus=2)
    pids = begun(search)
    files = search.folder
    # The journal is written first; this test does not cover a kill between journal and loggers.
    eventually(lambda: sum(f.stat().st_size > 0 for f in files.glob("search/*/result.json")) == 2)
    search.process.kill()
    killed = time.monotonic()

    leaves_nothing(search, pids, since=killed)
    print(f"gone after {time.monotonic() - killed:.3f}")
    search.ends()
    for number in (0, 1):
        assert search.recorded(number)[0] == (1, 1000 * number + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_that_raises_ends_the_script_and_leaves_nothing(start, kind):
    search = start(kind=kind, trials=3, steps=ENDLESS, ending="raises_in_a_callback")
    code = search.ends()

    leaves_nothing(search, set(), since=time.monotonic())
    assert code == 1, str(search)
    said = search.said.decode()
    assert "ValueError: the callback fails" in said
    assert "SearchFailed" in said
    search.journal_gives_the_state()


def test_exception_after_a_search_leaves_nothing(start):
    search = start(steps=3, ending="raises_afterwards")

    assert search.ends() == 1, str(search)
    leaves_nothing(search, set(), since=time.monotonic())
    assert "ValueError: the script fails" in search.said.decode()
    a_table_was_shown(search, "finished")


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_ctrl_c_stops_at_once(start, kind):
    shell = 'trap : INT; "$@"; echo "exit code $?"'
    how = {"kind": kind, "steps": ENDLESS, "interrupt_grace_s": GRACE_S}
    search = start(at_terminal=True, shell=shell, cpus=2, **how)
    pids = begun(search)
    search.type(CTRL_C)
    search.wait_for(m.RunInterrupted)
    asked = time.monotonic()
    search.type(CTRL_C)
    search.ends()

    ended = time.monotonic()
    print(f"second Ctrl-C: ended after {ended - asked:.3f}")
    assert ended - asked < AT_ONCE_S
    leaves_nothing(search, pids, since=ended)
    assert "exit code 130" in search.said.decode(), str(search)
    search.journal_gives_the_state()


@pytest.mark.parametrize("times", [1, 2])
def test_a_script_that_catches_ctrl_c_can_search_again(start, times):
    search = start(
        at_terminal=True, kind="stubborn", steps=ENDLESS, cpus=2, ending="again_after_ctrl_c"
    )
    begun(search)
    for n in range(times):
        search.type(CTRL_C)
        if n == 0 and times == 2:
            search.wait_for(m.RunInterrupted)

    assert search.ends() == 0, str(search)
    assert search.said.decode().count("2 TERMINATED") == 1, str(search)
    search.leaves_nothing()


@pytest.mark.parametrize("sign", [None, signal.SIGINT, signal.SIGTERM])
def test_signal_handlers_of_the_script_are_restored_after_a_search(start, sign):
    search = start(steps=3 if sign is None else ENDLESS, ending="with_handlers_of_its_own", cpus=2)
    if sign is not None:
        begun(search)
        os.kill(search.process.pid, sign)

    assert search.ends() == 0, str(search)
    got = {None: "[]", signal.SIGINT: "[]", signal.SIGTERM: "[15]"}[sign]
    assert f"handlers are back: True {got}" in search.said.decode()
    search.leaves_nothing()


def test_a_search_in_a_thread_works(start):
    search = start(steps=4, ending="in_a_thread")

    assert search.ends() == 0, str(search)
    for number in (0, 1):
        assert [step for step, _ in search.recorded(number)] == [1, 2, 3, 4]
    search.journal_gives_the_state()
    search.leaves_nothing()


@pytest.mark.parametrize("delay_ms", [20, 100, 200, 300, 400, 500])
def test_ctrl_c_while_a_search_begins_leaves_nothing(start, delay_ms):
    started = time.monotonic()
    search = start(at_terminal=True, steps=ENDLESS, cpus=2)
    eventually(lambda: time.monotonic() > started + delay_ms / 1000)
    search.type(CTRL_C)

    assert search.ends() != 0, str(search)
    search.leaves_nothing()


@pytest.mark.parametrize("kind", ["plain", "process_tree"])
def test_pipe_after_the_script_ends_with_it(start, kind):
    # `cat` ends when no process holds the pipe any more.
    search = start(shell='"$@" | cat', kind=kind, steps=ENDLESS, cpus=2)
    begun(search)
    shell = psutil.Process(search.process.pid)
    (script,) = [child for child in shell.children() if child.name() != "cat"]
    script.kill()
    killed = time.monotonic()
    search.ends(within=GONE_WITHIN_S)

    assert time.monotonic() - killed < GONE_WITHIN_S
    search.leaves_nothing()
