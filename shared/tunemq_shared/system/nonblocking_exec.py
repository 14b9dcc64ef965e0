"""`executed_in_child`: start a program whose file may not answer, and do not wait for it.

`subprocess.Popen` returns when the new process has executed its program. That takes for ever if
the program's file is on a file server that is away, or 45 s if another process holds a lease on it.
"""

from __future__ import annotations

import sys
from typing import Final

_EXECUTES: Final = """\
import os, sys
try:
    os.execv(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit("it cannot be executed: " + error.strerror)
"""


def executed_in_child(program: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of this interpreter, which then executes the program in its place.

    Args:
        program: The path of the program; if it cannot be executed, the process prints why.
        arguments: The program's arguments.
    """
    return sys.executable, "-I", "-S", "-c", _EXECUTES, program, *arguments
