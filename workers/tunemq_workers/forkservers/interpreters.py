"""Interpreters that experiments name: how a forkserver is started in one, and why it was not.

The node's own can host trials, or there would be no node. Another one may be too old, lack TuneMQ
or have another version of it; it says so itself, and its last words are in the forkserver's log.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

from tunemq_workers.processes.forkserver_messages import COMMAND
from tunemq_workers.system.trial_user import own_files

#: What another interpreter runs first; any Python understands it.
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
#: So much of the end of a log is looked at for a last line.
_TAIL_BYTES: Final = 4096


def command(python: str) -> tuple[str, ...]:
    """What follows the interpreter's path on a forkserver's command line, before its arguments."""
    if python == sys.executable:
        return COMMAND
    return "-c", _CHECKED.format(version=our_version(), module=COMMAND[-1])


def why_not(python: str, log: str, since: int) -> str:
    """Why an interpreter could not host trials, with what to do.

    Args:
        log: what it printed, and ``since`` how long that was before.
    """
    return (
        f"the interpreter {python} cannot host trials: {_last_line(log, since)}; install TuneMQ "
        f"{our_version()} in it, or name another one with RunConfig(python=...); see {log}."
    )


def our_version() -> str:
    """TuneMQ's, as it is installed here."""
    # By name, because nothing of ours depends on the public names.
    return str(importlib.import_module("tunemq").__version__)


def _last_line(log: str, since: int) -> str:
    try:
        with own_files(), open(log, "rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return "it said nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
