"""Which incarnation of which trial holds what of which node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tunemq_scheduler.core.placement import Placement
from tunemq_scheduler.core.trial import Trial
from tunemq_shared.errors import BugError

#: A trial's id and an epoch of it.
Incarnation = tuple[str, int]


class Slots:
    """What is held of the nodes; a slot is held until nothing of its host is left."""

    def __init__(self) -> None:
        self.placement = Placement()
        self._held: dict[Incarnation, tuple[str, Mapping[str, float]]] = {}
        self._on_node: dict[str, dict[Incarnation, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[str, int, str]]:
        """Trial, epoch and node of every slot, sorted."""
        return iter(
            sorted((trial, epoch, node) for (trial, epoch), (node, _) in self._held.items())
        )

    def add_node(self, node: str, resources: Mapping[str, float]) -> None:
        """A node offers its resources."""
        self._on_node[node] = {}
        self.placement.add_node(node, resources)

    def lose_node(self, node: str) -> list[Incarnation]:
        """A node is gone; returns who held slots of it."""
        self.placement.remove_node(node)
        lost = list(self._on_node.pop(node))
        for incarnation in lost:
            del self._held[incarnation]
        return lost

    def take(self, trial: Trial) -> str:
        """Take a slot for the trial's newest epoch; returns the node.

        That is the one which has its newest checkpoint on its disk, if it has room.

        Raises:
            BugError: no node has room.
        """
        node = self.placement.fit(trial.resources, trial.checkpoints.node)
        if node is None:
            raise BugError(f"trial {trial.trial_id} was chosen, and no node has room for it")
        self.placement.take(node, trial.resources)
        incarnation = trial.trial_id, trial.epoch
        self._held[incarnation] = node, trial.resources
        self._on_node[node][incarnation] = None
        return node

    def give_back(self, trial: str, epoch: int) -> str | None:
        """Give a slot back; returns its node, None if none was held."""
        held = self._held.pop((trial, epoch), None)
        if held is None:
            return None
        node, resources = held
        self.placement.give_back(node, resources)
        del self._on_node[node][trial, epoch]
        return node

    def node_of(self, trial: Trial) -> str:
        """The node that hosts the trial's newest epoch."""
        return self._held[trial.trial_id, trial.epoch][0]

    def node_at(self, trial: str, epoch: int) -> str | None:
        """The node that hosts this incarnation, None if none does."""
        held = self._held.get((trial, epoch))
        return None if held is None else held[0]

    def has_any(self, trial: Trial) -> bool:
        """Whether any epoch of the trial holds a slot."""
        return any((trial.trial_id, epoch) in self._held for epoch in range(1, trial.epoch + 1))
