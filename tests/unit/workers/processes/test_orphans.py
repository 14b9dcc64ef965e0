"""Which processes a node kills when one of its forkservers has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest

from tests.support.waiting import eventually
from tests.unit.workers.fakes import Clock
from tunemq_shared.system.processes import children_of
from tunemq_workers.processes import killed_trees, orphans
from tunemq_workers.processes.orphans import OrphanReaper

SLEEPS = (sys.executable, "-c", "input()")


class World:
    """A sweep, and whether it has finished."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.is_done = False
        self.stuck: Collection[int] = ()
        reactor: Any = self.clock
        self.reaper = OrphanReaper(reactor, set(children_of(os.getpid())))
        self.reaper.sweep(self._done)

    def _done(self, stuck: Collection[int]) -> None:
        self.is_done, self.stuck = True, stuck

    def continues(self) -> bool:
        self.clock.advance(1.0)
        return self.is_done


def test_process_of_the_node_itself_is_no_orphan():
    world = World()
    with subprocess.Popen(SLEEPS, stdin=subprocess.PIPE) as own:
        orphan = subprocess.Popen(SLEEPS, stdin=subprocess.PIPE, start_new_session=True)
        eventually(world.continues)
        assert orphan.pid not in children_of(os.getpid())
        own.communicate(b"\n")
    assert own.returncode == 0
    orphan.communicate()  # another caller has waited for it


@pytest.mark.parametrize("vanishes", ["at first", "then", "at last"])
def test_children_reaped_by_another_thread_are_ignored(monkeypatch, vanishes):
    world = World()
    gone = subprocess.Popen(SLEEPS, stdin=subprocess.DEVNULL, start_new_session=True)
    gone.wait()
    monkeypatch.setattr(orphans, "children_of", lambda _pid: [gone.pid])
    if vanishes != "at first":
        monkeypatch.setattr(orphans, "_group_of", lambda _pid: gone.pid)
    if vanishes == "at last":
        monkeypatch.setattr(os, "kill", lambda *_: None)
    for _ in range(3):
        world.continues()
    assert world.is_done is (vanishes == "at first")


#: Traces a process until its own input ends: only it can reap that process then.
TRACER = """
import ctypes, sys
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None), flush=True)
sys.stdin.read()
"""


def test_orphan_that_another_process_traces_is_not_waited_for():
    world = World()
    orphan = subprocess.Popen(SLEEPS, stdin=subprocess.PIPE, start_new_session=True)
    line = (sys.executable, "-c", TRACER, str(orphan.pid))
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout.readline() == b"0\n"
        eventually(world.continues)
        tracer.communicate(b"")
    orphan.communicate()


def test_killed_orphan_that_does_not_end_is_not_waited_for_without_end(monkeypatch, caplog):
    world = World()
    monkeypatch.setattr(killed_trees, "_LOOK_S", 0.0)
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: None)  # as if it waited for a lost file system
        patch.setattr(orphans, "signal_group", lambda *_: None)
        eventually(world.continues)
        assert set(world.stuck) == {orphan.pid}
        assert f"killed processes do not end: {orphan.pid} (state " in caplog.text
        world.is_done = False
        world.reaper.sweep(world._done)
        for _ in range(orphans._QUIET_LOOKS):
            world.continues()
        assert world.is_done, "the next sweep does not wait for it"
    orphan.send_signal(signal.SIGKILL)
    eventually(lambda: world.continues() and orphan.pid not in children_of(os.getpid()))
    assert orphan.wait() == 0  # it was reaped
