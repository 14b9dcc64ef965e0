"""`SimulatedStore`: which manifests and objects are there, and whether what is kept is whole."""

from __future__ import annotations

from tunemq_scheduler.core.commands import DeleteCheckpoint
from tunemq_scheduler.storage.checkpoint_garbage_collector import Removal
from tunemq_shared.protocol.messages import CheckpointCommitted


class SimulatedStore:
    """Each checkpoint carries one object of its own, or refers to one that another carried.

    Attributes:
        manifests: by key, the objects that each refers to.
        objects: those that are there.
    """

    def __init__(self) -> None:
        self.manifests: dict[str, tuple[str, ...]] = {}
        self.objects: set[str] = set()

    def put(self, committed: CheckpointCommitted) -> None:
        """A node has uploaded a checkpoint."""
        names = committed.shared or (f"{committed.key}/object",)
        if not committed.shared:
            self.objects.add(names[0])
        self.manifests[committed.key] = names

    def has(self, key: str) -> bool:
        """Whether a checkpoint is there with all that it refers to."""
        names = self.manifests.get(key)
        return names is not None and self.objects.issuperset(names)

    def discard(self, removal: Removal) -> None:
        """Carry out an order of the scheduler."""
        if isinstance(removal, DeleteCheckpoint):
            self.manifests.pop(removal.key, None)
            if "object" not in removal.keep:
                self.objects.discard(f"{removal.key}/object")
        else:
            self.objects.difference_update(removal.keys)
