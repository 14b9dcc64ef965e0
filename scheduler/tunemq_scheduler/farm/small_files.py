"""Replaces a small file of the farm's own as a whole, durably."""

from __future__ import annotations

import os
from pathlib import Path

from tunemq_shared.errors import JournalError


def replace_file(path: Path, data: bytes) -> None:
    """Have ``data`` in the file; after a crash there is that, or what was there before.

    Raises:
        JournalError: the disk refuses it; what was there before stands.
    """
    beside = path.with_suffix(".new")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise JournalError(f"{path} cannot be written: {error.strerror}.") from error
