"""A new process that is stopped before it executes its program."""

from __future__ import annotations

import os
import signal
import subprocess

from tunemq_workers.forkservers.sigstop_guard import killing_stopped_starts


def test_start_of_a_process_that_is_stopped_before_its_program_ends():
    with subprocess.Popen(["sleep", "600"]) as other:
        other.send_signal(signal.SIGSTOP)  # not a start
        with killing_stopped_starts():
            stopped = subprocess.Popen(
                ["true"],
                preexec_fn=lambda: os.kill(os.getpid(), signal.SIGSTOP),  # noqa: PLW1509
            )
        assert stopped.wait() == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
