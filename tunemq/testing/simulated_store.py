"""`SimulatedStore`: the manifests and objects in a store, and whether checkpoints are complete."""

from __future__ import annotations

from tunemq_scheduler.core.commands import DeleteCheckpoint
from tunemq_scheduler.storage.checkpoint_garbage_collector import Removal
from tunemq_shared.protocol.messages import CheckpointCommitted


class SimulatedStore:
    """A store in which each checkpoint has one object, its own or another checkpoint's.

    Attributes:
        manifests: by key, the objects to which each refers.
        objects: the existing objects.
    """

    def __init__(self) -> None:
        self.manifests: dict[str, tuple[str, ...]] = {}
        self.objects: set[str] = set()

    def put(self, committed: CheckpointCommitted) -> None:
        """Add a checkpoint that a node uploaded."""
        names = committed.shared or (f"{committed.key}/object",)
        if not committed.shared:
            self.objects.add(names[0])
        self.manifests[committed.key] = names

    def has(self, key: str) -> bool:
        """Return whether a checkpoint exists with all objects to which it refers."""
        names = self.manifests.get(key)
        return names is not None and self.objects.issuperset(names)

    def discard(self, removal: Removal) -> None:
        """Carry out a removal that the scheduler ordered."""
        if isinstance(removal, DeleteCheckpoint):
            self.manifests.pop(removal.key, None)
            if "object" not in removal.keep:
                self.objects.discard(f"{removal.key}/object")
        else:
            self.objects.difference_update(removal.keys)
