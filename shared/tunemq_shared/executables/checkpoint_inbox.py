"""The folder into which a program puts its checkpoints.

With each result goes what is in it at that moment; it is moved out of the program's way, so that
the program may go on while it is kept. Names that begin with a dot stay: whoever writes slowly,
writes under such a name and renames.
"""

from __future__ import annotations

import os


class CheckpointInbox:
    """The folder, and what was taken out of it.

    Args:
        work: a folder of our own, on the same file system.
    """

    def __init__(self, work: str) -> None:
        self.folder = os.path.join(work, "checkpoint")
        self._taken = os.path.join(work, "taken")
        self._number = 0
        os.makedirs(self.folder)
        os.makedirs(self._taken)

    def take(self) -> str | None:
        """What is there now, in a folder of its own; None when nothing is."""
        names = [name for name in os.listdir(self.folder) if not name.startswith(".")]
        if not names:
            return None
        taken = self._next()
        os.mkdir(taken)
        for name in names:
            os.rename(os.path.join(self.folder, name), os.path.join(taken, name))
        return taken

    def take_named(self, path: str) -> str | None:
        """The checkpoint at ``path``; one that lies in the folder is taken out of it."""
        inside = os.path.relpath(os.path.realpath(path), os.path.realpath(self.folder))
        if inside == os.curdir:
            return self.take()
        if inside.split(os.sep, 1)[0] == os.pardir:
            return path
        taken = self._next()
        os.rename(path, taken)
        return taken

    def is_ours(self, path: str) -> bool:
        """Whether ``path`` was taken out of the folder, so that it may be removed."""
        return os.path.dirname(path) == self._taken

    def _next(self) -> str:
        self._number += 1
        return os.path.join(self._taken, str(self._number))
