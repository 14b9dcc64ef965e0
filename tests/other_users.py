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
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import need

#: A user, and its group, that own nothing.
NOBODY: Final = 65534

#: In a namespace of the program's own, $1 is put where everybody may pass to it: $2 is what bars
#: the way.
_MOUNT: Final = """
set -e
aside=$(mktemp -d)
mount --bind "$1" "$aside"
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir -p "$1"
mount --move "$aside" "$1"
rmdir "$aside"
shift 2
exec "$@"
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A new folder that everybody may pass through and list."""
    folder = Path(tempfile.mkdtemp(prefix="tunemq-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def reachable(user: int | None = None) -> list[str]:
    """What a command line begins with whose interpreter other users can run, too.

    Args:
        user: whom the program itself runs as; root unless one is given.
    """
    need("root, to run trials as somebody else", os.geteuid() == 0 or None)
    need("setpriv", shutil.which("setpriv"))
    become = []
    if user is not None:
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    bar = _what_bars(Path(sys.base_prefix))
    if bar is None:
        return become
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "sh"]
    command += [sys.base_prefix, str(bar)]
    works = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    need(f"an interpreter that others can run ({bar} is closed to them)", works or None)
    return [*command, *become]


def _what_bars(path: Path) -> Path | None:
    """The highest folder on the way to ``path`` that others may not pass."""
    above = [*reversed(path.parents), path]
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)
