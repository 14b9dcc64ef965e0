"""Reference counts of store objects, and the deletion of checkpoints.

A file is an object in the folder of the checkpoint that first contained it. Manifests of later
checkpoints may refer to it, and this module counts those references: deleting a checkpoint keeps
the objects that others need, and deleting the last of those others deletes them. A writer may only
refer to the contents of pinned manifests, so no new reference to a condemned key appears.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from tunemq_scheduler.core.commands import Command, DeleteCheckpoint, DeleteObjects
from tunemq_shared.protocol.messages import CheckpointCommitted


class ObjectReferences(msgspec.Struct, array_like=True):
    """References to objects from outside their own folders, pins, and delayed deletions.

    A checkpoint that is condemned while pinned is deleted with its last pin.

    Attributes:
        users: checkpoint -> object name in its folder -> number of manifests elsewhere that refer
            to it.
        removed: deleted checkpoints of which objects remain that others refer to.
        pins: the number of pins of each pinned checkpoint.
        waiting: checkpoints that are condemned and pinned: the trial, and the commit if there was
            one.
    """

    users: dict[str, dict[str, int]] = {}
    removed: set[str] = set()
    pins: dict[str, int] = {}
    waiting: dict[str, tuple[str, CheckpointCommitted | None]] = {}

    def may_refer(self, shared: Iterable[str], bases: Collection[str]) -> bool:
        """Whether all these objects are safe: in the pinned ``bases``, or already referred to."""
        for name in shared:
            folder, _, digest = name.rpartition("/")
            if folder not in bases and digest not in self.users.get(folder, ()):
                return False
        return True

    def add(self, shared: Iterable[str]) -> None:
        """Count a manifest's references to these objects of other checkpoints."""
        for name in shared:
            folder, _, digest = name.rpartition("/")
            users = self.users.setdefault(folder, {})
            users[digest] = users.get(digest, 0) + 1

    def pin(self, keys: Iterable[str]) -> None:
        """Protect these checkpoints until the same number of `unpin` calls."""
        for key in keys:
            self.pins[key] = self.pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[str]) -> list[Command]:
        """Remove one pin of each; return the deletions that follow."""
        commands: list[Command] = []
        for key in keys:
            self.pins[key] -= 1
            if not self.pins[key]:
                del self.pins[key]
                if key in self.waiting:
                    commands += self._remove(key, *self.waiting.pop(key))
        return commands

    def is_pinned(self, key: str) -> bool:
        """Whether an attempt may still read this checkpoint or refer to its objects."""
        return key in self.pins

    def condemn(
        self, trial: str, key: str, committed: CheckpointCommitted | None = None
    ) -> list[Command]:
        """Delete an expired checkpoint now, or once it is not pinned any more.

        Args:
            trial: its trial.
            key: its key.
            committed: the commit; None if the store has only parts of it.
        """
        if key not in self.pins:
            return self._remove(key, trial, committed)
        self.waiting[key] = trial, committed
        return []

    def condemned(self) -> list[CheckpointCommitted]:
        """Return the committed checkpoints that exist only because they are pinned."""
        return [committed for _, committed in self.waiting.values() if committed is not None]

    def _remove(self, key: str, trial: str, committed: CheckpointCommitted | None) -> list[Command]:
        keep = tuple(sorted(self.users.get(key, ())))
        if keep:
            self.removed.add(key)
        commands: list[Command] = [DeleteCheckpoint(trial, key, keep)]
        shared = () if committed is None else committed.shared
        orphans = tuple(name for name in shared if self._release(name))
        if orphans:
            commands.append(DeleteObjects(orphans))
        return commands

    def _release(self, name: str) -> bool:
        """Remove one reference to an object; return whether to delete the object now."""
        folder, _, digest = name.rpartition("/")
        users = self.users[folder]
        users[digest] -= 1
        if users[digest]:
            return False
        del users[digest]
        is_removed = folder in self.removed
        if not users:
            del self.users[folder]
            self.removed.discard(folder)
        return is_removed
