"""`SlotTable`: the resources that each attempt of a trial holds, and on which node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tunemq_scheduler.core.nodes.away_nodes import AwaySlot
from tunemq_scheduler.core.placement.placement import Placement, PlacementState
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol.messages import Gpu

#: A trial's id and the number of an attempt.
AttemptId = tuple[str, int]


class Slot(NamedTuple):
    """What an attempt holds of one node."""

    node: str
    resources: dict[str, float]
    devices: dict[str, float]


class SlotTableState(msgspec.Struct, array_like=True):
    """`SlotTable` in serialized form: which attempt holds what, in order on each node."""

    placement: PlacementState
    held: list[tuple[AttemptId, Slot]]
    on_node: dict[str, list[AttemptId]]


class SlotTable:
    """The slots of all nodes; a slot is held until nothing of its trial process is left."""

    def __init__(self) -> None:
        self.placement = Placement()
        self._held: dict[AttemptId, Slot] = {}
        self._on_node: dict[str, dict[AttemptId, None]] = {}
        #: The number of attempts of each trial that hold a slot.
        self._attempts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[str, int, str]]:
        """Iterate over the trial, attempt and node of every slot, sorted."""
        return iter(sorted((*attempt_id, slot.node) for attempt_id, slot in self._held.items()))

    def add_node(self, node: str, resources: Mapping[str, float], gpus: Sequence[Gpu] = ()) -> None:
        """Add a node and its resources."""
        self._on_node[node] = {}
        self.placement.add_node(node, resources, gpus)

    def lose_node(self, node: str) -> list[AwaySlot]:
        """Remove a node; return the slots that were held."""
        self.placement.remove_node(node)
        held = [(*one, self._let_go(*one)) for one in self._on_node.pop(node)]
        return [
            AwaySlot(trial, attempt, dict(slot.resources), dict(slot.devices))
            for trial, attempt, slot in held
        ]

    def hold(self, node: str, away_slot: AwaySlot) -> None:
        """Allocate this slot unconditionally, since its trial process already runs."""
        slot = Slot(node, away_slot.resources, away_slot.devices)
        self.placement.hold(*slot)
        self._have((away_slot.trial, away_slot.attempt), slot)

    def take_on(self, trial: Trial, node: str | None) -> Slot:
        """Allocate a slot of this node for the trial's newest attempt.

        Raises:
            BugError: ``node`` is None.
            InvariantBroken: the node has no room.
        """
        if node is None:
            raise BugError(f"trial {trial.trial_id} was chosen, and no node has room for it")
        slot = Slot(node, trial.resources, self.placement.take(node, trial.resources))
        self._have((trial.trial_id, trial.attempt), slot)
        return slot

    def give_back(self, trial: str, attempt: int) -> str | None:
        """Free a slot; return its node, or None if none was held."""
        if (trial, attempt) not in self._held:
            return None
        slot = self._let_go(trial, attempt)
        self.placement.give_back(*slot)
        del self._on_node[slot.node][trial, attempt]
        return slot.node

    def node_of(self, trial: Trial) -> str:
        """Return the node that runs the trial's newest attempt."""
        return self._held[trial.trial_id, trial.attempt].node

    def node_at(self, trial: str, attempt: int) -> str | None:
        """Return the node that runs this attempt, or None."""
        held = self._held.get((trial, attempt))
        return None if held is None else held.node

    def held_by(self, trial: str, attempt: int) -> Slot:
        """Return what this attempt holds of its node."""
        return self._held[trial, attempt]

    def has_any(self, trial: Trial) -> bool:
        """Whether any attempt of the trial holds a slot."""
        return trial.trial_id in self._attempts

    def on_node(self, node: str) -> list[AttemptId]:
        """Return the attempts that hold a slot of this node."""
        return list(self._on_node[node])

    def dumped(self) -> SlotTableState:
        """Return the whole state."""
        on_node = {node: list(attempt_ids) for node, attempt_ids in self._on_node.items()}
        return SlotTableState(self.placement.dumped(), list(self._held.items()), on_node)

    def take_back(self, state: SlotTableState) -> None:
        """Restore the state that `dumped` returned."""
        self.placement.take_back(state.placement)
        self._held = dict(state.held)
        self._on_node = {node: dict.fromkeys(held) for node, held in state.on_node.items()}
        self._attempts = dict(Counter(trial for trial, _ in self._held))

    def _have(self, attempt_id: AttemptId, slot: Slot) -> None:
        self._held[attempt_id] = slot
        self._on_node[slot.node][attempt_id] = None
        self._attempts[attempt_id[0]] = self._attempts.get(attempt_id[0], 0) + 1

    def _let_go(self, trial: str, attempt: int) -> Slot:
        self._attempts[trial] -= 1
        if not self._attempts[trial]:
            del self._attempts[trial]
        return self._held.pop((trial, attempt))
