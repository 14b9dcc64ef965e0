"""Which objects of the store somebody still refers to, and what removing a checkpoint means.

A file is an object in the folder of the checkpoint that first carried it. Manifests of later ones
may refer to it: those references are counted here, so that removing a checkpoint leaves behind what
others need, and removing the last of those others takes it away. A writer may refer only to what a
pinned manifest holds; so a key that is condemned is never referred to again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from tunemq_scheduler.core.commands import Command, DeleteCheckpoint, DeleteObjects
from tunemq_shared.protocol.messages import CheckpointCommitted


class ObjectReferencesState(msgspec.Struct, array_like=True):
    """`ObjectReferences` written down."""

    users: dict[str, dict[str, int]]
    removed: set[str]
    pins: dict[str, int]
    condemned: dict[str, tuple[str, CheckpointCommitted | None]]


class ObjectReferences:
    """References to objects from outside their own folders, pins of checkpoints, and what waits.

    A checkpoint that is condemned while it is pinned is removed when the last pin goes.
    """

    def __init__(self) -> None:
        #: Checkpoint -> an object's name in its folder -> how many manifests elsewhere refer to it.
        self._users: dict[str, dict[str, int]] = {}
        #: Checkpoints that are removed, but for objects that others refer to.
        self._removed: set[str] = set()
        self._pins: dict[str, int] = {}
        #: Condemned and pinned: its trial, and what was committed of it.
        self._condemned: dict[str, tuple[str, CheckpointCommitted | None]] = {}

    def may_refer(self, shared: Iterable[str], bases: Collection[str]) -> bool:
        """Whether all these objects stand: in the pinned ``bases``, or referred to already."""
        for name in shared:
            folder, _, digest = name.rpartition("/")
            if folder not in bases and digest not in self._users.get(folder, ()):
                return False
        return True

    def add(self, shared: Iterable[str]) -> None:
        """A manifest refers to these objects of other checkpoints."""
        for name in shared:
            folder, _, digest = name.rpartition("/")
            users = self._users.setdefault(folder, {})
            users[digest] = users.get(digest, 0) + 1

    def pin(self, keys: Iterable[str]) -> None:
        """Remove none of these before as many `unpin`."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[str]) -> list[Command]:
        """Take one pin of each away."""
        commands: list[Command] = []
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                if key in self._condemned:
                    commands += self._remove(key, *self._condemned.pop(key))
        return commands

    def is_pinned(self, key: str) -> bool:
        """Whether somebody may still read it, or refer to its objects."""
        return key in self._pins

    def condemn(
        self, trial: str, key: str, committed: CheckpointCommitted | None = None
    ) -> list[Command]:
        """A checkpoint is not kept any longer: remove it now, or when nobody needs it.

        Args:
            committed: None for one of which the store has parts at most.
        """
        if key not in self._pins:
            return self._remove(key, trial, committed)
        self._condemned[key] = trial, committed
        return []

    def condemned(self) -> list[CheckpointCommitted]:
        """Those that are only there because they are pinned."""
        return [committed for _, committed in self._condemned.values() if committed is not None]

    def state(self) -> tuple[Any, ...]:
        """All of it; equal states give equal values."""
        return (
            sorted((key, sorted(users.items())) for key, users in self._users.items()),
            sorted(self._removed),
            sorted(self._pins.items()),
            sorted(self._condemned),
        )

    def dumped(self) -> ObjectReferencesState:
        """All of it."""
        return ObjectReferencesState(self._users, self._removed, self._pins, self._condemned)

    def take_back(self, state: ObjectReferencesState) -> None:
        """Be as it was when it was `dumped`."""
        self._users, self._removed = state.users, state.removed
        self._pins, self._condemned = state.pins, state.condemned

    def _remove(self, key: str, trial: str, committed: CheckpointCommitted | None) -> list[Command]:
        keep = tuple(sorted(self._users.get(key, ())))
        if keep:
            self._removed.add(key)
        commands: list[Command] = [DeleteCheckpoint(trial, key, keep)]
        shared = () if committed is None else committed.shared
        orphans = tuple(name for name in shared if self._release(name))
        if orphans:
            commands.append(DeleteObjects(orphans))
        return commands

    def _release(self, name: str) -> bool:
        """One manifest less refers to an object; returns whether it has to go now."""
        folder, _, digest = name.rpartition("/")
        users = self._users[folder]
        users[digest] -= 1
        if users[digest]:
            return False
        del users[digest]
        is_removed = folder in self._removed
        if not users:
            del self._users[folder]
            self._removed.discard(folder)
        return is_removed
