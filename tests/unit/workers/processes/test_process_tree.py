from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tunemq_shared.system import process_attributes
from tunemq_shared.system.processes import children_of
from tunemq_workers.processes import killed_trees, process_tree
from tunemq_workers.processes.forkserver_messages import (
    ProcessExited,
    ProcessTreeGone,
    ProcessTreeStuck,
)
from tunemq_workers.processes.process_tree import ProcessTrees


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Fake /proc: process 10 has two threads and children 20, 30 and 40; 50 is a child of 20."""
    for pid, parent in [(10, 1), (20, 10), (30, 10), (40, 10), (50, 20)]:
        folder = tmp_path / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (a) b (c) S {parent} 1 1 0")
    (tmp_path / "10" / "task" / "11").mkdir()
    (tmp_path / "self").mkdir()
    return tmp_path


def test_children_are_found_without_the_kernels_list(proc):
    assert sorted(children_of(10, str(proc))) == [20, 30, 40]


def test_kernels_list_is_read_for_every_thread(proc):
    (proc / "thread-self").mkdir()
    (proc / "thread-self/children").write_text("")
    (proc / "10/task/10/children").write_text("20 30 ")
    (proc / "10/task/11/children").write_text("60 ")

    assert sorted(children_of(10, str(proc))) == [20, 30, 60]


def test_ended_process_has_no_children_and_causes_no_full_scan(proc):
    (proc / "thread-self").mkdir()
    (proc / "thread-self/children").write_text("")
    (proc / "10/task/11/children").write_text("60 ")

    assert children_of(10, str(proc)) == [60], "one of its threads has ended"
    assert children_of(20, str(proc)) == [], "its main thread has ended"
    assert children_of(99, str(proc)) == []


def test_process_that_ends_during_the_search_is_no_child(proc):
    (proc / "30" / "stat").unlink()

    assert sorted(children_of(10, str(proc))) == [20, 40]


def test_children_of_a_real_process_are_found():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in children_of(os.getpid())
        child.communicate(b"\n")


def asleep() -> int:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


def test_mark_of_a_process_with_any_bytes_in_its_environment_is_text():
    process = subprocess.Popen(["sleep", "60"], env={process_tree.MARK: "\udcff"})
    try:
        eventually(lambda: process_tree._mark_of(process.pid) == "\ufffd")
    finally:
        process.kill()
        process.wait()


def test_child_outside_any_process_tree_is_left_alone():
    own = asleep()
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    process = asleep()
    process_trees.add("h", process)
    os.kill(process, signal.SIGKILL)
    reports = []

    eventually(lambda: reports.extend(process_trees.reap()) or len(reports) == 2)

    assert reports == [ProcessExited("h", process, signal.SIGKILL, None), ProcessTreeGone("h")]
    assert not process_trees
    os.kill(own, signal.SIGKILL)
    assert os.waitpid(own, 0)[1] == signal.SIGKILL


def has_ended() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_living_processes_are_killed_youngest_first_before_dead_ones_are_reaped(monkeypatch):
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    older = asleep()
    ended = {has_ended() for _ in range(10)}
    younger = asleep()
    process_trees.add("h", process := asleep())
    kill, killed = os.kill, []

    def note(pid: int, number: int) -> None:
        killed.append((pid, ended <= set(children_of(os.getpid()))))
        kill(pid, number)

    kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", note)
        eventually(lambda: process_trees.reap() and not process_trees)

    assert killed == [(younger, True), (older, True)]
    assert not ended & set(children_of(os.getpid()))


@pytest.fixture
def is_subreaper() -> Iterator[None]:
    process_attributes.become_subreaper()
    yield
    process_attributes._prctl(process_attributes._PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.usefixtures("is_subreaper")
def test_orphan_that_ends_during_the_search_does_not_hide_its_forked_child(
    monkeypatch,
):
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    process_trees.add("h", process := has_ended())
    reading, writing = os.pipe()
    hops = os.fork()
    if hops == 0:
        os.read(reading, 1)
        if os.fork() == 0:
            signal.pause()
        os._exit(0)
    left: list[int] = []

    def look_before_it_hops(pid: int) -> list[int]:
        seen = children_of(pid)
        if not left:
            os.write(writing, b"x")
            os.waitid(os.P_PID, hops, os.WEXITED | os.WNOWAIT)
            left.extend(set(children_of(pid)) - set(seen))
        return seen

    reports: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(process_tree, "children_of", look_before_it_hops)
        eventually(lambda: reports.extend(process_trees.reap()) or ProcessTreeGone("h") in reports)
    (orphan,) = left
    is_there = orphan in children_of(os.getpid())
    if is_there:
        os.kill(orphan, signal.SIGKILL)
        os.waitpid(orphan, 0)
    assert not is_there, "it was killed and waited for before its process's slot was free"
    assert reports == [ProcessExited("h", process, None, 0), ProcessTreeGone("h")]


def without_its_first_thread() -> int:
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=signal.pause).start()
        ctypes.CDLL(None).pthread_exit(None)
    eventually(lambda: b") Z " in Path(f"/proc/{pid}/stat").read_bytes())
    return pid


def test_slot_of_a_process_is_not_free_while_an_earlier_orphan_remains(
    monkeypatch,
):
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    process_trees.add("h", process := without_its_first_thread())
    orphan, kill = asleep(), os.kill
    has_ended()

    def kill_slowly(pid: int, number: int) -> None:
        if pid != orphan:
            kill(pid, number)

    reports: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", kill_slowly)
        patch.setattr(process_tree, "signal_group", lambda *_: None)
        assert process_trees.reap() == [], "the orphan is there, and its process has not ended yet"
        kill(process, signal.SIGKILL)
        eventually(lambda: reports.extend(process_trees.reap()) or reports)
    kill(orphan, signal.SIGKILL)
    assert reports == [ProcessExited("h", process, signal.SIGKILL, None)]
    eventually(lambda: process_trees.reap() == [ProcessTreeGone("h")])


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The scheduling policies that this process has requested."""
    asked: list[int] = []
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda _pid, policy, _param: asked.append(policy & 0xFF)
    )
    return asked


def test_killed_process_that_ends_slowly_returns_the_node_to_normal_priority(policies, monkeypatch):
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    process_trees.add("h", process := asleep())
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: None)  # it waits for a disk that hangs
        process_trees.kill("h")
    assert policies == [os.SCHED_RR]
    assert process_trees.reap() == []
    assert policies == [os.SCHED_RR, os.SCHED_OTHER]
    os.kill(process, signal.SIGKILL)
    eventually(lambda: process_trees.reap() and not process_trees)


def test_processes_that_cannot_be_killed_return_the_node_to_normal_priority(policies, monkeypatch):
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    orphan, kill = asleep(), os.kill
    process_trees.add("h", process := asleep())
    kill(process, signal.SIGKILL)

    def kill_unless_immune(pid: int, number: int) -> None:
        if pid == orphan:
            raise PermissionError
        kill(pid, number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", kill_unless_immune)
        eventually(process_trees.reap)
        process_trees.reap()
    assert process_trees, "its slot stays taken"
    assert policies[-1] == os.SCHED_OTHER
    kill(orphan, signal.SIGKILL)
    eventually(lambda: process_trees.reap() and not process_trees)


def test_commands_about_an_ended_process_are_ignored():
    process_trees = ProcessTrees()

    process_trees.term("h")
    process_trees.kill("h")
    process_trees.kill_all()

    assert process_trees.reap() == []


@pytest.mark.parametrize("is_orphan", [False, True])
def test_killed_process_is_held_once_nothing_new_was_below_it_for_long(monkeypatch, is_orphan):
    monkeypatch.setattr(killed_trees, "_LOOK_S", 0.0)
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    process_trees.add("h", process := asleep())
    held, kill = asleep() if is_orphan else process, os.kill
    reports: list[object] = []
    with monkeypatch.context() as patch:  # as if it waited for a lost file system
        patch.setattr(os, "kill", lambda *_: None)
        patch.setattr(process_tree, "signal_group", lambda *_: None)
        if is_orphan:
            kill(process, signal.SIGKILL)
            eventually(lambda: reports.extend(process_trees.reap()) or reports)
            assert reports.pop(0) == ProcessExited("h", process, signal.SIGKILL, None)
        else:
            process_trees.kill("h")
        for _ in range(100):
            assert process_trees.is_waiting is not bool(reports)
            reports += process_trees.reap()
    assert reports == [ProcessTreeStuck("h", is_orphan, (held,))]
    assert not process_trees
    assert not process_trees.is_waiting
    kill(held, signal.SIGKILL)
    eventually(lambda: process_trees.reap() or held not in children_of(os.getpid()))
    assert not process_trees.reap(), "its end is not reported again"


def test_other_trial_is_gone_while_one_is_held(monkeypatch):
    process_trees = ProcessTrees(own=children_of(os.getpid()))
    process_trees.add("held", held := asleep())
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: None)
        process_trees.kill("held")
    process_trees.add("other", asleep())
    process_trees.kill("other")
    reports: list[object] = []
    eventually(lambda: reports.extend(process_trees.reap()) or ProcessTreeGone("other") in reports)
    os.kill(held, signal.SIGKILL)
    eventually(lambda: process_trees.reap() and not process_trees)


#: Fork as many children as each line of the input says, which end; "alive" forks one that waits.
FORKS = """
import os, signal, sys
print(flush=True)
for line in sys.stdin:
    is_alive = line == "alive\\n"
    for _ in range(1 if is_alive else int(line)):
        pid = os.fork()
        if pid == 0:
            if is_alive:
                signal.pause()
            os._exit(0)
        if not is_alive:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print(pid, flush=True)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process that forks on demand: see `FORKS`."""
    line = [sys.executable, "-S", "-c", FORKS]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        process.stdout.readline()
        yield process
        process.kill()


def forks(parent: subprocess.Popen[str], what: str) -> int:
    parent.stdin.write(f"{what}\n")
    parent.stdin.flush()
    return int(parent.stdout.readline())


def test_only_living_processes_below_a_killed_one_are_new(parent, monkeypatch):
    monkeypatch.setattr(killed_trees, "_LOOK_S", 0.0)
    tree, looks = killed_trees.KilledTree(), killed_trees._LOOKS
    assert not tree.is_stuck([parent.pid])
    for _ in range(looks - 1):
        forks(parent, "10")
        assert not tree.is_stuck([parent.pid])
    left = forks(parent, "alive")
    for _ in range(looks):
        assert not tree.is_stuck([parent.pid])
        eventually(lambda: killed_trees.is_zombie(left))
    assert tree.is_stuck([parent.pid])
    assert tree.living == {parent.pid}


@pytest.mark.usefixtures("is_subreaper")
def test_process_with_thousands_of_ended_children_is_killed_as_others_are(parent):
    process_trees = ProcessTrees(own=set(children_of(os.getpid())) - {parent.pid})
    forks(parent, "2000")
    process_trees.add("h", parent.pid)
    process_trees.kill("h")
    reports: list[object] = []
    eventually(lambda: reports.extend(process_trees.reap()) or len(reports) == 2)
    assert reports == [
        ProcessExited("h", parent.pid, signal.SIGKILL, None),
        ProcessTreeGone("h"),
    ]
