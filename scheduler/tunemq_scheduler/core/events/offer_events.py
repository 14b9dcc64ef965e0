"""`OfferEventHandler`: handles a farm's offers of node resources, and their withdrawal.

While more is held of a node than offered, nothing is placed there. If the offer has a grace period,
trials *give way*: they pause, those first that would repeat the least work, and wait for a slot
again once their processes have paused. A trial that cannot save on request runs to its next
checkpoint. One that has not paused when the grace period ends is stopped, and resumes from its last
checkpoint; the runner counts the steps that it reports twice.

This is no failure of the trial, and the algorithms are not notified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.core.commands import Command, PauseTrial, StopTrial
from tunemq_scheduler.core.nodes.slots import Slot
from tunemq_scheduler.core.placement.resource_request import TOLERANCE
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trials.trial import RUNNING, Trial
from tunemq_shared.protocol.messages import NodeJoined, NodeOffered, NodeReturned


class OfferEventHandler:
    """Handles a farm's offers for the runner.

    Args:
        state: the runner's state.
        set_aside: the runner's method for a trial that has no process any more.
    """

    def __init__(self, state: RunnerState, set_aside: Callable[[Trial], None]) -> None:
        self._state = state
        self._set_aside = set_aside

    def joined(self, node: NodeJoined) -> None:
        """Apply the current offer to a node that joined; a shared one starts with nothing."""
        if node.is_shared:
            self._state.placement.offer(node.instance_id, self._offered_of(node.instance_id))

    def offered(self, event: NodeOffered) -> list[Command]:
        """Apply a new limit on what may be held of a node."""
        state, node = self._state, event.instance_id
        known = state.offers.get(node)
        is_known = node in state.nodes or node in state.away
        if not is_known or (known is not None and event.n <= known.n):
            return []
        state.offers[node] = event
        if node not in state.nodes:
            return []
        state.placement.offer(node, self._offered_of(node))
        return self.make_room(node, event)

    def make_room(self, node: str, event: NodeOffered | NodeReturned) -> list[Command]:
        """Preempt trials until a node is within its offer, if the offer has a grace period."""
        state = self._state
        offer = state.offers.get(node)
        if offer is None or offer.preempt_grace_s is None:
            return []
        excess = _Excess(state.placement.excess(node))
        staying: list[tuple[Trial, Slot]] = []
        due = state.elapsed + offer.preempt_grace_s
        for trial_id, attempt in state.slots.on_node(node):
            trial, slot = state.live.get(trial_id), state.slots.held_by(trial_id, attempt)
            is_running = trial is not None and trial.attempt == attempt and trial.status == RUNNING
            if trial is not None and is_running and not self._is_leaving(trial):
                staying.append((trial, slot))
                continue
            excess.less(slot)
            if trial is not None and is_running and trial.pausing:
                state.giving_way.setdefault(trial_id, due)  # its pause gets a deadline, too
        commands: list[Command] = []
        staying.sort(key=lambda one: _loss(one[0]))
        # First the trials on GPUs that are taken back, because no other trial can free those; then,
        # for the rest of the excess, any trial.
        for is_too_much in (excess.has_device_of, excess.has_any_of):
            for trial, slot in staying:
                if trial.trial_id not in state.giving_way and is_too_much(slot):
                    excess.less(slot)
                    trial.story.append(event)
                    state.giving_way[trial.trial_id] = due
                    commands.append(
                        PauseTrial(trial.trial_id, trial.attempt, node, at_checkpoint=True)
                    )
        return commands

    def tick(self) -> list[Command]:
        """Stop each trial whose grace period has ended; it waits for a slot again."""
        state = self._state
        commands: list[Command] = []
        for trial_id, due in list(state.giving_way.items()):
            if state.elapsed < due:
                continue
            trial = state.live[trial_id]
            if trial.stop_ordered or trial.ending:  # it will end anyway
                del state.giving_way[trial_id]
                continue
            commands.append(StopTrial(trial_id, trial.attempt, state.slots.node_of(trial)))
            self.gave_way(trial)
        return commands

    def gave_way(self, trial: Trial) -> None:
        """Queue a trial that gave way and has no process any more, or none that counts."""
        if not trial.pausing:  # otherwise it was to pause anyway
            trial.preemptions += 1
        self._set_aside(trial)

    def _is_leaving(self, trial: Trial) -> bool:
        is_told = trial.pausing or trial.stop_ordered or trial.ending
        return bool(is_told) or trial.trial_id in self._state.giving_way

    def _offered_of(self, node: str) -> ResourceAmounts:
        offer = self._state.offers.get(node)
        return (
            ResourceAmounts() if offer is None else ResourceAmounts(offer.resources, offer.devices)
        )


class _Excess:
    """The resources that the remaining trials hold beyond the offer."""

    def __init__(self, excess: ResourceAmounts) -> None:
        self._resources, self._devices = dict(excess.resources), dict(excess.devices)

    def has_device_of(self, slot: Slot) -> bool:
        """Whether a GPU of this slot is held beyond the offer."""
        return _is_any(self._devices, slot.devices)

    def has_any_of(self, slot: Slot) -> bool:
        """Whether any resource of this slot is held beyond the offer."""
        return _is_any(self._resources, slot.resources) or self.has_device_of(slot)

    def less(self, slot: Slot) -> None:
        """Subtract a slot that will be freed."""
        _take(self._resources, slot.resources)
        _take(self._devices, slot.devices)


class _Loss(NamedTuple):
    """What a trial may lose by giving way; smaller is better."""

    unsaved_s: float
    spent_s: float
    older: int


def _loss(trial: Trial) -> _Loss:
    """Estimate the seconds since the last checkpoint; ties are broken by total time and age."""
    last = trial.last_result
    if last is None:
        return _Loss(0.0, 0.0, -trial.number)
    saved = max((one.step for one in trial.checkpoints if one.is_wanted), default=0)
    unsaved = last.time_total_s * max(0, last.step - saved) / last.step
    return _Loss(unsaved, last.time_total_s, -trial.number)


def _is_any(excess: Mapping[str, float], held: Mapping[str, float]) -> bool:
    return any(held.get(name, 0.0) and over > TOLERANCE for name, over in excess.items())


def _take(excess: dict[str, float], held: Mapping[str, float]) -> None:
    excess.update((name, round(over - held.get(name, 0.0), 9)) for name, over in excess.items())
