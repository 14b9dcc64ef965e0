"""A program that another process executes cannot make this one wait."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support.leases import leased
from tunemq_shared.system.nonblocking_exec import executed_in_child


def test_program_takes_the_place_of_the_interpreter():
    line = executed_in_child(sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv)")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
    assert said == f"{process.pid} ['-c']\n"


def test_program_that_cannot_be_executed_is_reported(tmp_path):
    line = executed_in_child(str(tmp_path / "none"))
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "it cannot be executed: No such file or directory\n",
    )


def test_caller_does_not_wait_for_a_program_with_a_lease(tmp_path):
    program = tmp_path / "program"
    shutil.copy("/bin/true", program)
    with leased(program):
        process = subprocess.Popen(executed_in_child(str(program)))
        with pytest.raises(subprocess.TimeoutExpired):  # it waits, and not this process
            process.wait(1)
    assert process.wait(60) == 0
