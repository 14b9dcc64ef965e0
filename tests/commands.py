"""The `tunemq` command as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

#: Runs the command with arguments; see `run_tunemq`.
Run = Callable[..., subprocess.CompletedProcess[str]]


def run_tunemq(
    folder: Path, *arguments: object, code: int = 0, said: str = "", columns: int = 200
) -> subprocess.CompletedProcess[str]:
    """Run it in a folder to its end, which is to be with this exit status.

    Args:
        said: what the person answers.
        columns: how wide the terminal is.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tunemq", *map(str, arguments)],
        cwd=folder,
        input=said,
        env={**os.environ, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done
    return done
