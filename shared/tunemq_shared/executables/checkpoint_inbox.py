"""`CheckpointInbox`: the folder into which a program puts its checkpoints.

With each result, the folder's content at that moment becomes the result's checkpoint. It is moved
away, so that the program may continue while it is saved. Names that begin with a dot stay: a
program that writes slowly uses such a name and then renames.
"""

from __future__ import annotations

import os

from tunemq_shared.base.errors import TrainableError


class CheckpointInbox:
    """The folder for new checkpoints, and another for those taken out of it.

    Args:
        work: A private folder on the same file system.
    """

    def __init__(self, work: str) -> None:
        self.folder = os.path.join(work, "checkpoint")
        self._taken = os.path.join(work, "taken")
        self._number = 0
        os.makedirs(self.folder)
        os.makedirs(self._taken)

    def take(self) -> str | None:
        """Move the folder's content to a new folder and return that; None if there is none.

        Raises:
            TrainableError: The program replaced the folder by a link; its target is not ours.
        """
        if os.path.islink(self.folder):
            raise TrainableError(
                f"the program replaced its checkpoint folder {self.folder} by a link to "
                f"{os.path.realpath(self.folder)}; write or copy files into the folder itself."
            )
        try:
            names = [name for name in os.listdir(self.folder) if not name.startswith(".")]
        except FileNotFoundError:  # the program has removed it
            return None
        if not names:
            return None
        taken = self._next()
        os.mkdir(taken)
        for name in names:
            os.rename(os.path.join(self.folder, name), os.path.join(taken, name))
        return taken

    def take_named(self, path: str) -> str | None:
        """Take the checkpoint at ``path``; if it lies in the folder, it is moved out."""
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
