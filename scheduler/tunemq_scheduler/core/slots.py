"""Which incarnation of which trial holds what of which node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping

import msgspec

from tunemq_scheduler.core.away import Hosted
from tunemq_scheduler.core.placement import Placement, PlacementState
from tunemq_scheduler.core.trial import Trial
from tunemq_shared.errors import BugError

#: A trial's id and an epoch of it.
Incarnation = tuple[str, int]


class SlotsState(msgspec.Struct, array_like=True):
    """`Slots` written down: who holds what of which node, each node's in their order."""

    placement: PlacementState
    held: list[tuple[str, int, str, dict[str, float]]]
    on_node: list[tuple[str, list[Incarnation]]]


class Slots:
    """What is held of the nodes; a slot is held until nothing of its host is left."""

    def __init__(self) -> None:
        self.placement = Placement()
        self._held: dict[Incarnation, tuple[str, Mapping[str, float]]] = {}
        self._on_node: dict[str, dict[Incarnation, None]] = {}
        #: How many epochs of each trial hold one.
        self._epochs: dict[str, int] = {}

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

    def lose_node(self, node: str) -> list[Hosted]:
        """A node is gone; returns who held slots of it, and what they held."""
        self.placement.remove_node(node)
        return [
            Hosted(trial, epoch, dict(self._let_go(trial, epoch)[1]))
            for trial, epoch in self._on_node.pop(node)
        ]

    def hold(self, node: str, hosted: Hosted) -> None:
        """Take this slot, whatever else could be had: its host is there."""
        self.placement.take(node, hosted.resources)
        self._have(node, (hosted.trial, hosted.epoch), hosted.resources)

    def take(self, trial: Trial, avoid: Container[str] = ()) -> str:
        """Take a slot for the trial's newest epoch; returns the node, which is none of ``avoid``.

        That is the one which has its newest checkpoint on its disk, if it has room.

        Raises:
            BugError: no node has room.
        """
        node = self.placement.fit(trial.resources, trial.checkpoints.node, avoid)
        if node is None:
            raise BugError(f"trial {trial.trial_id} was chosen, and no node has room for it")
        self.placement.take(node, trial.resources)
        self._have(node, (trial.trial_id, trial.epoch), trial.resources)
        return node

    def give_back(self, trial: str, epoch: int) -> str | None:
        """Give a slot back; returns its node, None if none was held."""
        if (trial, epoch) not in self._held:
            return None
        node, resources = self._let_go(trial, epoch)
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

    def held_by(self, trial: str, epoch: int) -> dict[str, float]:
        """What this incarnation holds of its node."""
        return dict(self._held[trial, epoch][1])

    def has_any(self, trial: Trial) -> bool:
        """Whether any epoch of the trial holds a slot."""
        return trial.trial_id in self._epochs

    def trials_on(self, node: str) -> Iterator[str]:
        """The trials that hold a slot of this node; one with two epochs there comes twice."""
        return (trial for trial, _ in self._on_node[node])

    def dumped(self) -> SlotsState:
        """All of it."""
        held = [
            (trial, epoch, node, dict(resources))
            for (trial, epoch), (node, resources) in self._held.items()
        ]
        on_node = [(node, list(incarnations)) for node, incarnations in self._on_node.items()]
        return SlotsState(self.placement.dumped(), held, on_node)

    def take_back(self, state: SlotsState) -> None:
        """Be as it was when it was `dumped`."""
        self.placement.take_back(state.placement)
        self._held = {
            (trial, epoch): (node, resources) for trial, epoch, node, resources in state.held
        }
        self._on_node = {node: dict.fromkeys(held) for node, held in state.on_node}
        self._epochs = dict(Counter(trial for trial, _ in self._held))

    def _have(self, node: str, incarnation: Incarnation, resources: Mapping[str, float]) -> None:
        self._held[incarnation] = node, resources
        self._on_node[node][incarnation] = None
        self._epochs[incarnation[0]] = self._epochs.get(incarnation[0], 0) + 1

    def _let_go(self, trial: str, epoch: int) -> tuple[str, Mapping[str, float]]:
        self._epochs[trial] -= 1
        if not self._epochs[trial]:
            del self._epochs[trial]
        return self._held.pop((trial, epoch))
