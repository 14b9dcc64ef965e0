"""Test whether a folder is writable, by writing a file."""

from __future__ import annotations

import os
import tempfile


def write_probe(folder: str, *, sync: bool = True) -> None:
    """Write and remove a file in a folder; ``sync`` forces it to the disk.

    The file has no name if the file system supports that, so that no other process sees it.

    Raises:
        OSError: The folder cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"probe")
        file.flush()
        if sync:
            os.fsync(file.fileno())
