"""Opens files with another user's rights, as a node of root's does with those of trials."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tunemq_shared.system import process_attributes

USER = 54321


@contextlib.contextmanager
def files_of_a_user(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Give a folder to a user, and open files as that user in this thread; as ours if not root."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, USER, USER)
    process_attributes.files_as(USER, USER)
    try:
        yield
    finally:
        process_attributes.files_as(0, 0)
        process_attributes.keep_memory_private(False)  # Linux does that where the user changes
