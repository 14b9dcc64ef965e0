"""F22: trials that crash, hang, take all memory, print without end or fork without end.

Each failure gets the right kind, the other trials are not disturbed, and no process remains.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

import tunemq as tune
from tests.integration.farm_support import order
from tests.integration.node_fixtures import node, scheduler, server
from tests.support.forkserver_driver import serve
from tests.support.journal_records import read_records
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, printed_by, results_of
from tests.support.waiting import eventually
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.logs import output_files

__all__ = ["ended_searches", "node", "scheduler", "serve", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

MIB = 2**20
#: Marks the environment of all processes that a search's trials start.
MARK = "F22_MARK"


def raises(number):
    raise ValueError("a bad value")


def segfaults(number):
    import ctypes

    ctypes.string_at(0)


def exits(number):
    os._exit(3)


def kills_itself(number):
    os.kill(os.getpid(), signal.SIGKILL)


def hoards(number):
    """Take memory without end, in children in separate sessions."""
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            held = []
            while True:
                held.append(b"x" * (8 * MIB))
                time.sleep(0.01)
    signal.pause()


def loops(number):
    while True:
        number += 1


def holds_the_gil(number):
    return 9 ** (9**9)


def takes_its_time(number):
    """Report correctly, and never end."""
    while True:
        time.sleep(0.02)
        tune.report({"x": number})


def prints(number):
    """Print a gigabyte."""
    block = 1024 * ("y" * 1023 + "\n")
    for printed in range(1024):
        sys.stdout.write(block)
        if printed % 4 == 0:
            tune.report({"x": printed})
    # A cut may lose output that is printed at the same moment, so the last line comes after it.
    # While the cut rewrites the file, the file is short for a moment: wait until its size is
    # stable.
    size = looks = 0
    while not 0 < size <= output_files.LIMIT_BYTES or looks < 5:
        time.sleep(0.1)
        tune.report({"x": 1024})
        before, size = size, os.fstat(sys.stdout.fileno()).st_size
        looks = looks + 1 if size == before else 0
    print("the last line")


def ends(number):
    pass


def trains(number):
    for step in range(100):
        time.sleep(0.02)
        tune.report({"x": step})


#: What a trial does, the kind of its failure, and part of the error message.
HOSTILE = {
    raises: ("user", "ValueError: a bad value"),
    segfaults: ("died", "SIGSEGV"),
    exits: ("died", "code 3"),
    kills_itself: ("died", "SIGKILL"),
    hoards: ("memory", "of memory, and its limit is 150 MiB"),
    loops: ("stalled", "has not reported for"),
    holds_the_gil: ("stalled", "has not reported for"),
}
DECENT = [prints, trains, trains]


def train(config):
    tune.report({"x": 0})
    config["does"](config["number"])


def test_f22_search_of_hostile_trials_ends_with_each_cause_named(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("TUNEMQ_CPUS", "6")
    deeds = [*HOSTILE, *DECENT]
    # No trial_s: printing a gigabyte takes as long as the machine needs.
    limits = tune.TrialLimits(stall_s=10, memory=150 * MIB)
    results = fit(
        train,
        {"number": tune.grid_search(list(range(len(deeds)))), "does": by_number(deeds)},
        trial_limits=limits,
        storage_path=str(tmp_path),
        name="hostile",
    )

    by_deed = dict(zip(HOSTILE, results, strict=False))
    kinds = kinds_of_failures(tmp_path / "hostile" / FILE_NAME)
    for deed, (kind, said) in HOSTILE.items():
        result = by_deed[deed]
        assert result.status == "ERROR", deed
        assert said in str(result.error), deed
        assert kinds[result.trial_id] == [kind], deed
        assert Path(result.path, "error.txt").exists()
    for deed in (loops, holds_the_gil):
        assert f"in {deed.__name__}\n" in printed_by(by_deed[deed], "stderr")
    printer, *trained = results[len(HOSTILE) :]
    assert [result.error for result in (printer, *trained)] == [None] * 3
    assert [result.status for result in (printer, *trained)] == ["TERMINATED"] * 3
    stdout = Path(printer.path, output_files.STDOUT)
    eventually(lambda: stdout.stat().st_size <= output_files.LIMIT_BYTES)
    assert "the last line\n" in printed_by(printer)
    assert "bytes of older output dropped" in printed_by(printer)
    for result in trained:
        assert [line["training_iteration"] for line in results_of(result)] == list(range(1, 102))
    eventually(lambda: not marked(str(tmp_path)), message=lambda: str(marked(str(tmp_path))))


def test_f22_trial_over_its_time_limit_is_ended_and_others_continue(tmp_path):
    deeds = [takes_its_time, ends, ends]
    results = fit(
        train,
        {"number": tune.grid_search(list(range(len(deeds)))), "does": by_number(deeds)},
        trial_limits=tune.TrialLimits(trial_s=12),
        storage_path=str(tmp_path),
        name="hostile",
    )

    late, *others = results
    assert (late.status, [result.status for result in others]) == ("ERROR", ["TERMINATED"] * 2)
    assert "and its limit is 12 s" in str(late.error)
    kinds = kinds_of_failures(tmp_path / "hostile" / FILE_NAME)
    assert kinds == {late.trial_id: ["trial_limit"]}
    assert Path(late.path, "error.txt").exists()


def reports_without_end(config):
    import time

    from tunemq_shared.trial.session import report

    while True:
        time.sleep(0.02)
        report({"x": 1})


def test_f22_neighbour_of_an_ended_trial_continues(node, scheduler):
    # Limits belong to a search: the neighbour belongs to another search, without limits.
    starts = {
        trial: scheduler.start(
            reports_without_end, trial_number=number, limits=TrialLimitSpec(**most)
        )
        for number, (trial, most) in enumerate({"t1": {"trial_s": 4.0}, "t2": {}}.items())
    }
    scheduler.assign(node.instance_id, *(order(trial, start) for trial, start in starts.items()))

    def reported() -> int:
        return sum(event.trial == "t2" for event in scheduler.said(m.ResultReported))

    eventually(reported, within=60, message=node.log)
    eventually(lambda: scheduler.said(m.SlotFreed), within=60, message=node.log)
    before = reported()
    eventually(lambda: reported() > before + 5, within=60, message=node.log)
    (failed,) = scheduler.said(m.TrialFailed)
    assert (failed.trial, failed.kind) == ("t1", "trial_limit")
    assert [event.trial for event in scheduler.said(m.SlotFreed)] == ["t1"]
    assert not scheduler.said(m.TrialProcessDied)
    assert [event.trial for event in scheduler.said(m.TrialStarted)].count("t2") == 1


def by_number(deeds):
    names = [deed.__name__ for deed in deeds]
    return tune.sample_from(lambda spec: globals()[names[spec.config["number"]]])


def kinds_of_failures(journal: Path) -> dict[str, list[str]]:
    """Return the kinds of each trial's failures; each trial failed only once."""
    kinds: dict[str, list[str]] = {}
    for entry in read_records(journal):
        event = entry.event
        assert not isinstance(event, m.NodeLost)
        if isinstance(event, m.TrialFailed | m.TrialProcessDied):
            kind = event.kind if isinstance(event, m.TrialFailed) else "died"
            kinds.setdefault(event.trial, []).append(kind)
    return kinds


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of trials that were started with this mark."""
    return [
        process
        for process in psutil.process_iter()
        if environment_of(process).get(MARK) == mark and "TUNEMQ_HOST" in environment_of(process)
    ]


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}


# --- those that fork ------------------------------------------------------------------------------


def hops(config):
    """Start eight chains of processes; each process forks its successor and ends.

    Each chain runs in a separate session, and ends by itself if the node does not end it.
    """
    import os
    import time

    from tunemq_shared.trial.session import report

    until = time.monotonic() + 600  # a busy machine is late
    for _ in range(8):
        if os.fork() == 0:
            while time.monotonic() < until:
                if os.fork():
                    os._exit(0)
                os.setsid()
            os._exit(0)
    report({"x": 1})
    time.sleep(600)


def multiplies(config):
    """Fork processes that fork others, in separate sessions, about a hundred in all."""
    import os
    import time

    from tunemq_shared.trial.session import report

    counter, until = "count", time.monotonic() + 600  # a busy machine is late

    def forks():
        while time.monotonic() < until:
            if os.path.getsize(counter) < 100:
                with open(counter, "ab", buffering=0) as file:
                    file.write(b"x")
                if os.fork() == 0:
                    os.setsid()
            else:
                time.sleep(0.02)

    with open(counter, "wb"):
        pass
    if os.fork() == 0:
        forks()
    while os.path.getsize(counter) < 80:
        time.sleep(0.01)
    report({"x": 1})
    time.sleep(600)


@pytest.mark.parity(128)
@pytest.mark.parametrize("bomb", [hops, multiplies])
def test_f22_process_tree_that_forks_without_end_ends_with_its_trial(serve, bomb):
    server = serve()
    other = server.start(sleeps, 1)
    other.result()
    process = server.start(bomb)
    process.result()
    began = time.monotonic()
    server.client.kill(process.name)
    process.gone()
    print(f"gone after {time.monotonic() - began:.2f} s")
    assert not left_of(server.root / "trial_0")
    assert not server.said(m.TrialProcessDied, other.name)
    assert not server.warnings()


def sleeps(config):
    import time

    from tunemq_shared.trial.session import report

    report({"x": 1})
    time.sleep(600)


def left_of(folder: Path) -> list[str]:
    """Return the processes that work in a folder."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                    found.append(pid)
            except OSError:
                continue
    return found


# --- those that send descriptors ------------------------------------------------------------------


def sends_a_socket_that_lingers(config):
    """Send the node a descriptor whose last close waits for a minute."""
    import array
    import contextlib
    import os
    import socket
    import struct
    import time

    server = socket.create_server(("127.0.0.1", 0))
    lingering = socket.create_connection(server.getsockname())
    server.detach()  # it stays open
    lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    lingering.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            lingering.send(bytes(65536))
    passed = lingering.detach()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
            if line.family == socket.AF_UNIX:
                # The node is busy while this process closes its copy.
                if line.type == socket.SOCK_STREAM:
                    line.send(1_000 * b"\0\0\0\5H\0\0\0\0")
                else:
                    for _ in range(60):
                        line.send(b"\x91\xa4pong")
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed]))
                line.sendmsg([b"\0"], [rights])
                os.close(passed)
                break
    if config is not None:
        from tunemq_shared.trial.session import report

        report({"x": 1})
        time.sleep(600)


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_f22_neighbour_of_code_that_sends_its_node_descriptors_continues(
    node, scheduler, tmp_path, is_preloaded
):
    name = sends_a_socket_that_lingers.__name__
    source = f"{inspect.getsource(sends_a_socket_that_lingers)}\n{name}(None)\n"
    (tmp_path / "sends.py").write_text(source)
    environment = m.Environment(sys.executable, ("sends",), {}, (str(tmp_path),))
    sends = {"environment": environment} if is_preloaded else {}
    train = ends if is_preloaded else sends_a_socket_that_lingers
    neighbour = scheduler.start(reports_without_end, trial_number=1)
    scheduler.assign(
        node.instance_id,
        order("t1", neighbour),
        order("t2", scheduler.start(train, trial_number=2, **sends)),
    )

    def reported(trial: str) -> int:
        return sum(event.trial == trial for event in scheduler.said(m.ResultReported))

    # Linux 6.16 and newer refuse the descriptor; older ones do not, and its sender is ended.
    eventually(lambda: reported("t2") or scheduler.said(m.SlotFreed), within=30, message=node.log)
    before = reported("t1")
    eventually(lambda: reported("t1") > before + 20, within=20, message=node.log)
    assert {event.trial for event in scheduler.said(m.SlotFreed)} <= {"t2"}
