"""Interpreters that experiments name: how to start a forkserver in one, and why that failed.

Another interpreter than the node's may be too old, or have no TuneMQ or another version. It then
prints the reason, which is the last line of the forkserver's log.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

from tunemq_shared.system.nonblocking_exec import executed_in_child
from tunemq_workers.processes.forkserver_messages import COMMAND
from tunemq_workers.system.trial_user import own_files

#: The program that another interpreter runs first; any version of Python can parse it.
_CHECKED: Final = """\
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d, and TuneMQ needs 3.11 or newer" % sys.version_info[:2])
sys.path[:] = [entry for entry in sys.path if entry]
import tunemq
if tunemq.__version__ != {version!r}:
    sys.exit("it has TuneMQ " + tunemq.__version__ + ", and this worker " + {version!r})
import runpy
runpy._run_module_as_main({module!r})
"""
#: The most bytes at the end of a log in which the last line is searched.
_TAIL_BYTES: Final = 4096


def command(python: str) -> tuple[str, ...]:
    """Return the first part of a forkserver's command line, before its arguments."""
    if python == sys.executable:
        return python, *COMMAND
    program = _CHECKED.format(version=our_version(), module=COMMAND[-1])
    return executed_in_child(python, "-c", program)


def why_not(python: str, log: str, since: int) -> str:
    """Return why an interpreter cannot run trials, and what to do about it.

    Args:
        python: the path of the interpreter.
        log: the file that it printed to.
        since: the size of that file before it started, in bytes.
    """
    return (
        f"the interpreter {python} cannot host trials: {_last_line(log, since)}; install TuneMQ "
        f"{our_version()} in it, or name another one with RunConfig(python=...); see {log}."
    )


def our_version() -> str:
    """Return the version of TuneMQ that is installed here."""
    # Imported by name because our modules do not depend on the public names.
    return str(importlib.import_module("tunemq").__version__)


def _last_line(log: str, since: int) -> str:
    try:
        with own_files(), open(log, "rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            # Limited, as the interpreter's processes may lengthen it meanwhile.
            lines = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return "it printed nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
