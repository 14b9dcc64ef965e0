"""A killed process of a trial that cannot end: its slot is free after a time, with a warning.

The process is the first one of a pid namespace. The kernel ends it only after all others of the
namespace are reaped, and a process outside of the trial's process tree does not reap one of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.integration.farm_support import is_alive, order
from tests.integration.node_fixtures import node, scheduler, server
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import NodeWarned, ResultReported, SlotFreed, TrialStarted

__all__ = ["node", "scheduler", "server"]

pytestmark = pytest.mark.faults

#: Fork a process into the pid namespace of another one, and reap it at the end of the input.
HOLDS = """
import ctypes, os, sys
CLONE_NEWPID = 0x20000000
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setns(os.open(f"/proc/{sys.argv[1]}/ns/pid", os.O_RDONLY), CLONE_NEWPID) == 0
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print("held", flush=True)
sys.stdin.read()
"""


def has_a_namespace(config):
    """Start the first process of a pid namespace."""
    import subprocess
    import time

    from tunemq_shared.system.processes import children_of
    from tunemq_shared.trial.session import report

    starter = subprocess.Popen(["unshare", "--pid", "--fork", "sleep", "600"])
    while not (first := children_of(starter.pid)):
        time.sleep(0.01)
    report({"first": first[0]})
    time.sleep(600)


@pytest.mark.parametrize("has_forkserver", [True, False])
def test_slot_of_a_killed_trial_with_a_process_that_cannot_end_is_free(
    node, scheduler, has_forkserver
):
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("this user may make no pid namespace")
    scheduler.assign(node.instance_id, order("t1", scheduler.start(has_a_namespace)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    stuck = scheduler.said(ResultReported)[0].metrics["first"]
    line = [sys.executable, "-c", HOLDS, str(stuck)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        if has_forkserver:
            scheduler.assign(node.instance_id)
        else:
            os.kill(node.forkserver_of(scheduler.said(TrialStarted)[0].pid), signal.SIGKILL)
        eventually(lambda: scheduler.said(SlotFreed), message=node.log)
        assert is_alive(stuck)
        text = f"killed processes do not end: {stuck} (state"
        eventually(lambda: any(text in one.text for one in scheduler.said(NodeWarned)))
        assert text in node.log()
        holder.communicate()
    eventually(lambda: not is_alive(stuck))
