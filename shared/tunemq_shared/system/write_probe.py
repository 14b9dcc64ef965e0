"""Finds out whether a folder takes files, by writing one."""

from __future__ import annotations

import os
import tempfile


def write_probe(folder: str, *, sync: bool = True) -> None:
    """Write a file in a folder, with all its way to the disk unless not ``sync``, and remove it.

    The file has no name where the file system can do that, so that nobody meets it.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"probe")
        file.flush()
        if sync:
            os.fsync(file.fileno())
