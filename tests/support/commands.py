"""The `tunemq` command as a person runs it."""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.support.warm_commands import WarmCommands

#: Runs the command with arguments; see `run_tunemq`.
Run = Callable[..., subprocess.CompletedProcess[str]]


def run_tunemq(
    folder: Path, *arguments: object, code: int = 0, said: str = "", columns: int = 200
) -> subprocess.CompletedProcess[str]:
    """Run a `tunemq` command in a folder until it ends, and check its exit status.

    Args:
        said: the user's input.
        columns: the width of the terminal.
    """
    environ = {**os.environ, "COLUMNS": str(columns)}
    done = _commands().run([*map(str, arguments)], environ, folder, said=said)
    assert done.returncode == code, done
    return done


@cache
def _commands() -> WarmCommands:
    """The shared `WarmCommands` of all tests of this process."""
    commands = WarmCommands(os.environ)
    atexit.register(commands.close)
    return commands
