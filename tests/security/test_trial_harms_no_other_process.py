"""A worker of root's with ``--trial-user`` does nothing to other processes for a trial."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.integration.farm_support import order
from tests.security.guarded_farm import farm
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import Environment, ResultReported, SlotFreed, TrialFailed
from tunemq_shared.protocol.trial_limits import TrialLimitSpec

__all__ = ["farm", "open_folder"]

pytestmark = pytest.mark.security

AS_NOBODY = ("--trial-user", f"{NOBODY}:{NOBODY}")

#: A preloaded module that claims that a process is the first trial process of its forkserver.
CLAIMS = """
import os, socket, sys
import msgspec
control = socket.socket(fileno=os.dup(int(sys.argv[1])))
control.send(msgspec.msgpack.encode(("forked", "h1", {victim})))
os._exit(1)
"""


#: A module that is preloaded and serves in its forkserver's place: it claims that a process is the
#: trial's, and hangs up, so that the node reads the claim of a forkserver that is gone.
SERVES = """
import os, socket, sys
from tunemq_workers.processes import forkserver_messages as messages
control = socket.socket(fileno=os.dup(int(sys.argv[1])))
control.setblocking(True)
control.send(messages.encode(messages.ForkserverReady(())))
while data := socket.recv_fds(control, 65536, 3)[0]:
    command = messages.decode_command(data)
    if isinstance(command, messages.StartProcess):
        control.send(messages.encode(messages.ProcessForked(command.process, {victim})))
        control.shutdown(socket.SHUT_RDWR)
os._exit(1)
"""


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of root's."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def speaks_for_its_forkserver(config):
    """Claim, in the forkserver's name, a process as its trial process; then end the forkserver."""
    import ctypes
    import os
    import signal
    import socket
    from pathlib import Path

    import msgspec

    from tunemq_shared.trial.session import report

    forkserver = os.getppid()
    number = int(Path(f"/proc/{forkserver}/cmdline").read_bytes().split(b"\0")[-3])
    pidfd = os.pidfd_open(forkserver)
    stolen = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, number, 0)
    report({"stolen": stolen, "errno": ctypes.get_errno(), "dumpable": _own_memory_can_be_read()})
    if stolen >= 0:
        with socket.socket(fileno=stolen) as control:
            control.send(msgspec.msgpack.encode(("forked", "h1", config["victim"])))
    os.kill(forkserver, signal.SIGKILL)
    while True:
        signal.pause()


def _own_memory_can_be_read():
    try:
        with open("/proc/self/environ", "rb") as file:
            return bool(file.read())
    except PermissionError:
        return False


def test_trial_that_impersonates_its_forkserver_gets_no_process_killed(farm, victim):
    instance_id = farm.start(reachable(), *AS_NOBODY)
    trial = farm.order(speaks_for_its_forkserver, 0, victim=victim.pid)
    farm.scheduler.assign(instance_id, order("t", trial))
    said = farm.scheduler.said
    eventually(lambda: said(SlotFreed), within=60, message=farm.story)
    (result,) = said(ResultReported)
    assert (result.metrics["stolen"], result.metrics["errno"]) == (-1, 1)
    # A trial's own process is as the user's other processes are: tools that look into it work.
    assert result.metrics["dumpable"] is True
    assert victim.poll() is None
    assert [failed.kind for failed in said(TrialFailed)] == ["forkserver"]


def test_preloaded_module_that_impersonates_the_forkserver_gets_no_process_killed(farm, victim):
    instance_id = farm.start(reachable(), *AS_NOBODY)
    (farm.folder / "claims.py").write_text(CLAIMS.format(victim=victim.pid))
    environment = Environment(sys.executable, ("claims",), {}, (str(farm.folder),))
    trial = farm.order(speaks_for_its_forkserver, 0, environment, victim=victim.pid)
    farm.scheduler.assign(instance_id, order("t", trial))
    eventually(lambda: farm.scheduler.said(SlotFreed), within=60, message=farm.story)
    assert victim.poll() is None
    (failed,) = farm.scheduler.said(TrialFailed)
    assert "while it preloaded claims" in failed.error


def test_module_that_claims_a_foreign_process_gets_it_moved_into_no_cgroup(farm, victim):
    """The kernel would kill it there at the trial's limit of memory."""
    instance_id = farm.start(reachable(), *AS_NOBODY)
    (farm.folder / "serves.py").write_text(SERVES.format(victim=victim.pid))
    environment = Environment(sys.executable, ("serves",), {}, (str(farm.folder),))
    trial = farm.order(speaks_for_its_forkserver, 0, environment, victim=victim.pid)
    trial = msgspec.structs.replace(trial, limits=TrialLimitSpec(memory=60 * 2**20))
    groups = Path(f"/proc/{victim.pid}/cgroup")
    before = groups.read_text()
    for number in range(5):  # the claim and the end of the connection have to be read together
        farm.scheduler.assign(instance_id, order(f"t{number}", trial))
        eventually(
            lambda least=number + 1: len(farm.scheduler.said(SlotFreed)) >= least,
            within=60,
            message=farm.story,
        )
        assert groups.read_text() == before
    assert victim.poll() is None


def test_interpreter_named_by_a_search_gets_no_more_rights_than_its_trials(farm):
    """It is executed before any code of ours runs as the other user."""
    shared = farm.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    program = farm.folder / "python"
    program.write_text(f"#!/bin/sh\ngrep NoNewPrivs: /proc/self/status > {shared}/found\n")
    program.chmod(0o755)
    instance_id = farm.start(reachable(), *AS_NOBODY)
    trial = farm.order(speaks_for_its_forkserver, 0, Environment(str(program), (), {}, ()))
    farm.scheduler.assign(instance_id, order("t", trial))
    eventually(lambda: farm.scheduler.said(SlotFreed), within=60, message=farm.story)
    assert (shared / "found").read_text().split() == ["NoNewPrivs:", "1"]


def lowers_its_memory_priority(config):
    import contextlib
    import os
    from pathlib import Path

    from tunemq_shared.trial.session import report

    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(PermissionError):
        file.write_text("0")
    forkserver = Path(f"/proc/{os.getppid()}/oom_score_adj")
    report({"score": int(file.read_text()), "forkserver": int(forkserver.read_text())})


def test_trial_stays_before_its_node_where_memory_runs_out(farm):
    instance_id = farm.start(reachable(), *AS_NOBODY)
    farm.scheduler.assign(instance_id, order("t", farm.order(lowers_its_memory_priority, 0)))
    said = farm.scheduler.said
    eventually(lambda: said(ResultReported), within=60, message=farm.story)
    (result,) = said(ResultReported)
    assert result.metrics["forkserver"] == 500
    assert result.metrics["score"] == (500 if _may_set_the_least_score() else 0)


def limits_its_forkserver(config):
    """Report the limit of file sizes and the number of CPUs; then lower the forkserver's."""
    import os
    import resource

    from tunemq_shared.trial.session import report

    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    report({"most_bytes": soft, "cpus": len(os.sched_getaffinity(0))})
    forkserver = os.getppid()
    os.sched_setaffinity(forkserver, [min(os.sched_getaffinity(0))])
    if config["lowers_limits"]:
        resource.prlimit(forkserver, resource.RLIMIT_FSIZE, (100, 100))


def test_trial_that_limits_its_forkserver_does_not_limit_later_trials(farm):
    instance_id = farm.start(reachable(), *AS_NOBODY)
    said = farm.scheduler.said
    for number, lowers_limits in enumerate([False, True, False]):
        trial = farm.order(limits_its_forkserver, 0, lowers_limits=lowers_limits)
        farm.scheduler.assign(instance_id, order(f"t{number}", trial))
        eventually(
            lambda least=number + 1: len(said(SlotFreed)) == least,
            within=60,
            message=farm.story,
        )
    assert said(TrialFailed) == []
    cpus = len(os.sched_getaffinity(0))
    results = [one.metrics for one in said(ResultReported)]
    assert [(one["most_bytes"], one["cpus"]) for one in results] == [(-1, cpus)] * 3
    assert "forkserver.limited" in farm.story()


def _may_set_the_least_score():
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line
    ]
    return bool(int(line.split()[1], 16) >> 24 & 1)  # CAP_SYS_RESOURCE
