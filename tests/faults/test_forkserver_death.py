"""A forkserver dies alone, or is stopped: the node ends its process trees."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.integration.farm_support import (
    Node,
    Scheduler,
    children_of,
    is_alive,
    order,
)
from tests.integration.node_fixtures import node, scheduler, server
from tests.support.forkserver_driver import serve
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import (
    FORKSERVER_LOST,
    Environment,
    NodeWarned,
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialProcessDied,
    TrialStarted,
)
from tunemq_shared.system.processes import all_pids
from tunemq_workers.forkservers.forkserver_client import ForkserverLost
from tunemq_workers.processes.forkserver_messages import ForkserverPong

__all__ = ["node", "scheduler", "serve", "server"]

pytestmark = pytest.mark.faults

#: A forkserver's remains are gone within a second; on a busy machine, within this time.
SOON = 40.0


def with_a_daemon(config):
    """Start a grandchild in a separate session, without the mark, and end its parent."""
    import os
    import time

    from tunemq_shared.trial.session import report

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, b"%d" % os.getpid())
            os.closerange(0, 64)
            os.execve("/bin/sleep", ["sleep", "60"], {})
        os._exit(0)
    report({"daemon": int(os.read(reading, 20))})
    while True:
        time.sleep(600)


def hops(config):
    """Start eight chains of sessions, in which each process forks the next one and ends."""
    import os
    import time

    from tunemq_shared.trial.session import report

    until = time.monotonic() + 90  # else only as long as the node lets them
    for _ in range(8):
        if os.fork() == 0:
            while time.monotonic() < until:
                if os.fork():
                    os._exit(0)
                os.setsid()
            os._exit(0)
    report({"pid": os.getpid()})
    time.sleep(600)


def stops_its_forkserver(config):
    """Send SIGSTOP to the forkserver, then work without end."""
    import os
    import signal
    import time

    from tunemq_shared.trial.session import report

    os.kill(os.getppid(), signal.SIGSTOP)
    report({"forkserver": os.getppid()})
    while True:
        time.sleep(600)


def waits(config):
    import time

    time.sleep(600)


#: A preloaded module whose handler blocks the forkserver, although that is not stopped.
HANGS_LATER = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
"""


def three_results(config):
    from tunemq_shared.trial.session import report

    for n in range(3):
        report({"loss": n / 10})


def three_slow_results(config):
    import time

    from tunemq_shared.trial.session import report

    for n in range(3):
        report({"loss": n / 10})
        time.sleep(1)


def forkserver_and_tree(node: Node, scheduler: Scheduler, trials: int) -> tuple[int, list[int]]:
    eventually(lambda: len(scheduler.said(ResultReported)) == trials, message=node.log)
    trial_pids = [event.pid for event in scheduler.said(TrialStarted)]
    daemons = [event.metrics["daemon"] for event in scheduler.said(ResultReported)]
    assert all(map(is_alive, trial_pids + daemons))
    return node.forkserver_of(trial_pids[0]), trial_pids + daemons


def test_processes_of_a_killed_forkserver_end_before_its_slots_are_free(node, scheduler):
    scheduler.assign(
        node.instance_id,
        *(order(f"t{n}", scheduler.start(with_a_daemon, trial_number=n)) for n in range(2)),
    )
    forkserver, process_tree = forkserver_and_tree(node, scheduler, 2)
    consumer = node.consumer()
    os.kill(forkserver, signal.SIGKILL)
    eventually(lambda: len(scheduler.said(SlotFreed)) == 2, within=SOON, message=node.log)

    assert not any(map(is_alive, process_tree))
    lost = scheduler.said(TrialFailed)
    assert [event.kind for event in lost] == [FORKSERVER_LOST] * 2
    assert all(f"the forkserver {forkserver} was killed by SIGKILL" in e.error for e in lost)
    assert not scheduler.said(TrialProcessDied)
    assert node.consumer() == consumer
    assert children_of(node.process.pid) == [node.consumers()], "no zombie is left either"


def test_chains_of_processes_that_fork_and_exit_end_with_their_forkserver(node, scheduler):
    scheduler.assign(node.instance_id, order("t0", scheduler.start(hops)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    trial = int(scheduler.said(ResultReported)[0].metrics["pid"])
    folder = os.readlink(f"/proc/{trial}/cwd")
    os.kill(node.forkserver_of(trial), signal.SIGKILL)
    eventually(lambda: scheduler.said(SlotFreed), within=SOON, message=node.log)
    assert [pid for pid in all_pids() if working_folder(pid) == folder] == []


def working_folder(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # it has just ended
        return ""


def test_node_continues_with_a_new_forkserver(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(with_a_daemon)))
    forkserver, _ = forkserver_and_tree(node, scheduler, 1)
    os.kill(forkserver, signal.SIGKILL)
    eventually(lambda: scheduler.said(TrialFailed), within=SOON, message=node.log)
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results), attempt=2))
    eventually(lambda: scheduler.said(TrialFinished), message=node.log)
    assert scheduler.said(SlotFreed)[0].attempt == 1


def test_trial_process_that_was_stopped_is_continued(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_slow_results)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    (started,) = scheduler.said(TrialStarted)
    os.kill(started.pid, signal.SIGSTOP)
    eventually(lambda: scheduler.said(TrialFinished), within=SOON, message=node.log)
    assert len(scheduler.said(ResultReported)) == 3
    (warned,) = scheduler.said(NodeWarned)
    assert "trial processes were stopped (SIGSTOP), and were continued" in warned.text


def test_idle_forkserver_that_is_killed_is_not_reported(node, scheduler):
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results)))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    (forkserver,) = set(children_of(node.process.pid)) - {node.consumers()}
    os.kill(forkserver, signal.SIGKILL)
    eventually(lambda: "forkserver.lost" in node.log())
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results), attempt=2))
    eventually(lambda: len(scheduler.said(TrialFinished)) == 2, message=node.log)


def test_node_kills_trial_whose_forkserver_is_stopped_within_a_bound(node, scheduler):
    innocent = order("t2", scheduler.start(with_a_daemon, trial_number=1))
    guilty = order("t1", scheduler.start(stops_its_forkserver))
    scheduler.assign(node.instance_id, innocent)
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    daemon = scheduler.said(ResultReported)[0].metrics["daemon"]
    scheduler.assign(node.instance_id, innocent, guilty)
    eventually(lambda: len(scheduler.said(ResultReported)) == 2, message=node.log)
    trial_pids = {event.trial: event.pid for event in scheduler.said(TrialStarted)}

    scheduler.assign(node.instance_id, guilty)
    eventually(lambda: not is_alive(trial_pids["t2"]), within=5.0, message=node.log)
    eventually(lambda: len(scheduler.said(SlotFreed)) == 2, within=SOON, message=node.log)

    assert not any(map(is_alive, [*trial_pids.values(), daemon]))
    (lost,) = scheduler.said(TrialFailed)
    assert (lost.trial, lost.kind) == ("t1", FORKSERVER_LOST)
    assert "because it was stopped" in lost.error
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results), attempt=2))
    eventually(lambda: scheduler.said(TrialFinished), message=node.log)


PRELOADED = """
import ctypes, os, pathlib, platform, subprocess
CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}[platform.machine()]
child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
pid = ctypes.CDLL(None).syscall(CLONE, CLONE_PARENT | 17, 0, 0, 0, 0)
if pid == 0:
    os.setsid()
    os.closerange(0, 256)
    os.execv("/bin/sleep", ["sleep", "600"])
pathlib.Path(__file__).with_suffix(".pids").write_text(f"{child} {pid}")
"""


@pytest.mark.parametrize("ends", ["forkserver", "node"])
def test_processes_of_a_preloaded_module_end_with_their_forkserver(node, scheduler, tmp_path, ends):
    (tmp_path / "starts_processes.py").write_text(PRELOADED)
    environment = Environment(sys.executable, ("starts_processes",), {}, (str(tmp_path),))
    start = scheduler.start(three_results, environment=environment)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    pids = [int(pid) for pid in (tmp_path / "starts_processes.pids").read_text().split()]
    assert all(map(is_alive, pids))

    if ends == "node":
        node.process.terminate()
    else:
        scheduler.assign(node.instance_id, order("t2", scheduler.start(three_results)))

    eventually(lambda: not any(map(is_alive, pids)), message=node.log)


def test_forkserver_that_no_longer_answers_is_killed_with_its_trials(serve, tmp_path):
    (tmp_path / "hangs_later.py").write_text(HANGS_LATER)
    server = serve(preload=["hangs_later"], sys_path=[str(tmp_path)])
    server.until_ready()
    pid = server.start(waits).pid
    os.kill(server.client.pid, signal.SIGUSR1)
    for _ in range(12):
        server.client.look()
    with pytest.raises(ForkserverLost, match="did not answer for 60 s") as lost:
        server.client.look()
    assert lost.value.unended == ["h0"]
    eventually(lambda: not is_alive(pid))


def test_forkserver_that_answers_late_is_not_killed(serve):
    server = serve()
    server.until_ready()
    for _ in range(3):
        for _ in range(12):  # as when the node is busy for a minute
            server.client.look()
        eventually(lambda: server.listen() or server.said(ForkserverPong))
        server.reports.clear()


def test_node_with_a_forkserver_stopped_before_it_is_ready_starts_another(
    node, scheduler, tmp_path
):
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(600)")
    slow = Environment(sys.executable, ("slow_to_import",), {}, (str(tmp_path),))
    scheduler.assign(
        node.instance_id, order("t1", scheduler.start(three_results, environment=slow))
    )
    eventually(lambda: "forkserver.preloading" in node.log(), message=node.log)
    (forkserver,) = set(children_of(node.process.pid)) - {node.consumers()}
    os.kill(forkserver, signal.SIGSTOP)
    eventually(lambda: scheduler.said(TrialFailed), within=SOON, message=node.log)
    assert scheduler.said(TrialFailed)[0].kind == FORKSERVER_LOST
    scheduler.assign(node.instance_id, order("t1", scheduler.start(three_results), attempt=2))
    eventually(lambda: scheduler.said(TrialFinished), message=node.log)
