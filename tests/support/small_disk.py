"""A real file system of a few MiB, for tests of a full or read-only disk.

The child mounts it in a separate namespace, so it disappears with the child.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
_MOUNT = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'


@functools.cache
def can_mount() -> bool:
    """Whether this machine lets us mount one."""
    if not shutil.which("unshare"):
        return False
    tried = subprocess.run(
        [*_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


def namespace() -> list[str]:
    """What runs a command in a namespace for mounts; skip where this machine does not permit it."""
    if not can_mount():
        pytest.skip("this machine does not permit mounting a file system")
    return _NAMESPACE


def on_small_disk(disk: Path, command: list[str], *, options: str) -> list[str]:
    """A command that becomes ``command``, which finds the file system at the folder ``disk``."""
    return [*namespace(), "sh", "-c", _MOUNT, "sh", options, str(disk), *command]


def with_small_disk(
    disk: Path, command: list[str], *, options: str = "size=8m"
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds the file system at ``disk``, an empty folder; skip if it cannot."""
    disk.mkdir(exist_ok=True)
    return subprocess.run(
        on_small_disk(disk, command, options=options),
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
