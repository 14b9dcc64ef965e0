"""`ForkserverClient`: the end of a forkserver that a trial traces."""

from __future__ import annotations

import signal
import subprocess
import sys

from tunemq_workers.forkservers.forkserver_client import ForkserverClient

#: Seizes a process, kills it and stays: its parent gets no exit code meanwhile.
TRACER = """
import ctypes, os, signal, sys, time
pid = int(sys.argv[1])
assert ctypes.CDLL(None, use_errno=True).ptrace(0x4206, pid, None, None) == 0, ctypes.get_errno()
os.kill(pid, signal.SIGKILL)
print("killed", flush=True)
time.sleep(600)
"""


def test_forkserver_whose_end_a_tracer_hides_counts_as_killed() -> None:
    client = ForkserverClient.__new__(ForkserverClient)
    client._process = subprocess.Popen(["sleep", "600"])
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(client._process.pid)], stdout=subprocess.PIPE
    )
    try:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"killed\n"
        assert client._end_within(0.1) == -signal.SIGKILL
    finally:
        tracer.kill()
        tracer.communicate()
    assert client._process.wait(30) == -signal.SIGKILL
