"""`ReceivedSignals`: the signals of the process itself, and not those of its children."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, signal, time
from tunemq_workers.trial_process.received_signals import ReceivedSignals

received = ReceivedSignals()
signal.signal(signal.SIGTERM, lambda number, frame: None)
child = os.fork()
if child == 0:
    time.sleep(0.3)  # a handler does not end it
    os._exit(0)
time.sleep(0.1)
os.kill({target}, signal.SIGTERM)
os.waitpid(child, 0)
print(received.has(signal.SIGTERM), received.has(signal.SIGTERM))
"""


def outcome(target: str) -> list[str]:
    code = CODE.format(target=target)
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return said.stdout.split()


def test_signal_of_the_process_is_noted_once():
    assert outcome("os.getpid()") == ["True", "False"]


def test_signal_of_a_forked_child_is_not_noted():
    """As each `multiprocessing.Pool` sends it to its children at its end."""
    assert outcome("child") == ["False", "False"]
