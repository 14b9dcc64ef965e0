"""`TreeWatch` on real processes, without control groups: the memory that it reports."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable

import pytest

from tests.support.refused_threads import threads_refused
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.processes import tree_watch
from tunemq_workers.processes.tree_watch import TreeWatch

pytestmark = pytest.mark.integration

MIB = 2**20
#: Holds 40 MiB itself, and 40 MiB in a child.
HOLDS = """
import os, sys
held = b"x" * (40 << 20)
if os.fork() == 0:
    own = b"y" * (40 << 20)
    print("holds", flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


def test_process_tree_above_its_memory_limit_is_reported() -> None:
    calls: queue.Queue = queue.Queue()
    said: list[tuple[str, str, str]] = []
    watch = TreeWatch(calls.put, lambda _: 0)
    watch.on_exceeded = lambda *what: said.append(what)
    with threads_refused():  # the next trial's process finds a thread
        watch.watch("h0", os.getpid(), TrialLimitSpec(memory=2**50))
    watch.leave("h0")
    python = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(python, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"holds\n"
        watch.watch("h1", process.pid, TrialLimitSpec(memory=70 * MIB))
        try:
            calls.get(timeout=10)()
        except queue.Empty:
            pytest.fail("nothing is reported")
        finally:
            watch.leave("h1")
            process.stdin.close()
    ((name, kind, error),) = said
    assert (name, kind) == ("h1", "memory")
    assert "its limit is 70 MiB" in error


def test_process_tree_that_cannot_be_measured_delays_no_look_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks, ends = threading.Event(), threading.Event()

    def measure(tree: Iterable[int], limit: int) -> int:
        if limit == 1:
            blocks.set()
            ends.wait()
        return limit + 1

    monkeypatch.setattr(tree_watch, "tree_bytes", measure)
    calls: queue.Queue = queue.Queue()
    said: list[str] = []
    watch = TreeWatch(calls.put, lambda _: 0)
    watch.on_exceeded = lambda process, kind, error: said.append(process)
    try:
        watch.watch("blocked", os.getpid(), TrialLimitSpec(memory=1))
        assert blocks.wait(10)
        watch.watch("other", os.getpid(), TrialLimitSpec(memory=2))
        calls.get(timeout=10)()
        assert watch.late_look("blocked") == watch.late_look("blocked") is not None
        assert watch.late_look("other") is None
    finally:
        watch.leave("blocked")
        ends.set()
    assert said == ["other"]
