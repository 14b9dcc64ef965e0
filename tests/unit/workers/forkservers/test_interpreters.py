"""Trials run on the interpreter that an experiment names, or the error says why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tunemq
from tunemq_workers.forkservers import interpreters
from tunemq_workers.processes.forkserver_messages import COMMAND


def started_in(python: str, folder: Path, files: dict[str, str], version: str = "1.0") -> str:
    """Start an interpreter with these modules as forkservers are started; return its output."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code = interpreters._CHECKED.format(version=version, module="program")
    environ = {"PYTHONPATH": str(folder)}
    command = [python, "-S", "-c", code, "7", "{}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


PROGRAM = "import sys\nprint(__name__, sys.argv[1:], '' in sys.path)\n"


def test_own_interpreter_is_started_as_usual():
    assert interpreters.command(sys.executable) == (sys.executable, *COMMAND)


def test_other_interpreter_of_the_same_version_runs_the_program_as_main_module(tmp_path):
    files = {"tunemq.py": "__version__ = '1.0'\n", "program.py": PROGRAM}
    assert started_in(sys.executable, tmp_path, files) == "__main__ ['7', '{}'] False\n"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "No module named 'tunemq'"),
        (
            {"tunemq.py": "__version__ = '0.9'\n"},
            "it has TuneMQ 0.9, and this worker 1.0",
        ),
        ({"tunemq.py": "__version__ = '1.0'\n"}, "No module named program"),
    ],
)
def test_interpreter_that_lacks_a_package_names_it(tmp_path, files, why):
    said = started_in(sys.executable, tmp_path / "path", files)
    (tmp_path / "log").write_text("an older line\n" + said)
    text = interpreters.why_not("/envs/mine/bin/python", str(tmp_path / "log"), 14)
    assert text.startswith("the interpreter /envs/mine/bin/python cannot host trials: ")
    assert why in text
    assert f"install TuneMQ {tunemq.__version__} in it" in text


def test_interpreter_that_is_too_old_is_rejected():
    code = interpreters._CHECKED.format(version="1.0", module="program")
    pretend = code.replace("import sys\n", "import sys\nsys.version_info = (3, 9)\n", 1)
    done = subprocess.run(
        [sys.executable, "-c", pretend], capture_output=True, text=True, check=False
    )
    assert done.stderr == "it is Python 3.9, and TuneMQ needs 3.11 or newer\n"


def test_interpreter_that_fails_silently_is_reported(tmp_path):
    (tmp_path / "log").write_text("older\n")
    assert ": it printed nothing; install" in interpreters.why_not("/p", str(tmp_path / "log"), 6)
    assert ": it printed nothing; install" in interpreters.why_not("/p", str(tmp_path / "none"), 0)
