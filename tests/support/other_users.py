"""Processes of a user without rights, for tests that root runs.

folder = open_folder()                  below which such a user may go
subprocess.Popen([*reachable(), ...])   a program for which the interpreter is where it may go
subprocess.Popen([*reachable(NOBODY), ...])     ... and which runs as that user
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Final

import pytest

from tests.support.waiting import need

#: A user, and its group, that own nothing.
NOBODY: Final = 65534

#: Folders that the other user's interpreter reads: itself, its packages, and this checkout.
_NEEDED: Final = (Path(sys.base_prefix), Path(sys.prefix), Path(__file__).resolve().parents[2])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may pass through and list."""
    _skip_unless_open(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix="tunemq-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def reachable(user: int | None = None) -> list[str]:
    """The command prefix that lets other users run the interpreter, too.

    Args:
        user: the user that the program runs as; root by default.
    """
    need("root, to run trials as another user", os.geteuid() == 0 or None)
    need("setpriv", shutil.which("setpriv"))
    become = []
    if user is not None:
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return [*_with_interpreter_open_to_all(), *become]


@cache
def _with_interpreter_open_to_all() -> tuple[str, ...]:
    """Return the start of a command line under which each user can run this interpreter.

    A checkout below root's home is closed to other users. The command then sees the interpreter and
    the checkout through a mount namespace in which each closed folder above them is an open one.
    """
    _skip_unless_open(Path(tempfile.gettempdir()))
    closed = {path: barrier for path in _outermost(_NEEDED) if (barrier := _barrier_to(path))}
    command = (
        ("unshare", "--mount", "--propagation", "private", "sh", "-c", _mounting(closed), "sh")
        if closed
        else ()
    )
    as_nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    tried = subprocess.run(
        [*command, *as_nobody, sys.executable, "-c", "import tunemq_workers.node.worker_command"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        # The location of the checkout is up to its user, so CI skips as well.
        said = (tried.stderr.strip().splitlines() or ["no output"])[-1]
        barriers = ", ".join(sorted({str(barrier) for barrier in closed.values()})) or "none"
        pytest.skip(
            f"another user cannot run {sys.executable}: {said} "
            f"(folders closed to others: {barriers})"
        )
    return command


def _mounting(closed: dict[Path, Path]) -> str:
    """Write the shell script that opens the way to each path, and then runs its arguments.

    Args:
        closed: each path, with the closed folder on the way to it.
    """
    lines = ["set -e", "aside=$(mktemp -d)"]
    for number, path in enumerate(closed):
        lines += [f"mkdir $aside/{number}", f"mount --rbind {quote(str(path))} $aside/{number}"]
    lines += [
        f"mount -t tmpfs -o mode=755 tmpfs {quote(str(barrier))}"
        for barrier in dict.fromkeys(closed.values())
    ]
    for number, path in enumerate(closed):
        lines += [
            f"mkdir -p {quote(str(path))}",
            f"mount --move $aside/{number} {quote(str(path))}",
            f"rmdir $aside/{number}",
        ]
    return "\n".join([*lines, "rmdir $aside", 'exec "$@"'])


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Leave out each path that lies below another."""
    distinct = set(paths)
    return sorted(path for path in distinct if not distinct.intersection(path.parents))


def _barrier_to(path: Path) -> Path | None:
    """Return the highest folder on the way to ``path`` that other users may not enter."""
    way = [*reversed(path.parents), path]
    return next((folder for folder in way if not folder.stat().st_mode & 0o001), None)


def _skip_unless_open(folder: Path) -> None:
    barrier = _barrier_to(folder)
    if barrier is not None:
        pytest.skip(f"other users cannot reach {folder}: only its owner may enter {barrier}")
