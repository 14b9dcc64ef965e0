"""Handles a farm's offers of node resources, and their withdrawal.

While more is held of a node than offered, nothing is placed there. If the offer has a grace period,
trials *give way*: they pause, those first that would repeat the least work, and wait for a slot
again once their processes have paused. A trial that cannot save on request runs to its next
checkpoint. One that has not paused when the grace period ends is stopped, and resumes from its last
checkpoint; the runner counts the steps that it reports twice.

This is no failure of the trial, and the algorithms are not notified.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunemq_scheduler.core.commands import PauseTrial, StopTrial
from tunemq_scheduler.core.nodes.slots import Slot
from tunemq_scheduler.core.placement.resource_request import TOLERANCE
from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_scheduler.core.trial_actions import TrialActions
from tunemq_scheduler.core.trials.trial import RUNNING, Trial
from tunemq_shared.protocol.messages import NodeOffered, NodeReturned


def offered(runner: TrialActions, event: NodeOffered) -> None:
    """Apply a new limit on what may be held of a node."""
    node = event.instance_id
    known = runner.offers.get(node)
    is_known = node in runner.nodes or node in runner.away
    if not is_known or (known is not None and event.n <= known.n):
        return
    runner.offers[node] = event
    if node in runner.nodes:
        apply_offer(runner, node)
        make_room(runner, node, event)


def apply_offer(runner: TrialActions, node: str) -> None:
    """Apply the current offer to a shared node; without one, nothing may be held of it."""
    offer = runner.offers.get(node)
    amounts = ResourceAmounts()
    if offer is not None:
        amounts = ResourceAmounts(offer.resources, offer.devices)
    runner.placement.offer(node, amounts)


def make_room(runner: TrialActions, node: str, event: NodeOffered | NodeReturned) -> None:
    """Preempt trials until a node is within its offer, if the offer has a grace period."""
    offer = runner.offers.get(node)
    if offer is None or offer.preempt_grace_s is None:
        return
    excess = _Excess(runner.placement.excess(node))
    staying: list[tuple[Trial, Slot]] = []
    due = runner.elapsed + offer.preempt_grace_s
    for trial_id, attempt in runner.slots.on_node(node):
        trial, slot = runner.live.get(trial_id), runner.slots.held_by(trial_id, attempt)
        is_running = trial is not None and trial.attempt == attempt and trial.status == RUNNING
        if trial is not None and is_running and not _is_leaving(runner, trial):
            staying.append((trial, slot))
            continue
        excess.less(slot)
        if trial is not None and is_running and (trial.pausing or trial_id in runner.giving_way):
            # Its pause gets a deadline, too; and a later offer may shorten the grace.
            runner.giving_way[trial_id] = min(runner.giving_way.get(trial_id, due), due)
    staying.sort(key=lambda one: _loss(one[0]))
    # First the trials on GPUs that are taken back, because no other trial can free those; then,
    # for the rest of the excess, any trial.
    for is_too_much in (excess.has_device_of, excess.has_any_of):
        for trial, slot in staying:
            if trial.trial_id not in runner.giving_way and is_too_much(slot):
                excess.less(slot)
                trial.story.append(event)
                runner.giving_way[trial.trial_id] = due
                runner.commands.append(
                    PauseTrial(trial.trial_id, trial.attempt, node, at_checkpoint=True)
                )


def end_grace_periods(runner: TrialActions) -> None:
    """Stop each trial whose grace period has ended; it waits for a slot again."""
    for trial_id, due in list(runner.giving_way.items()):
        if runner.elapsed < due:
            continue
        trial = runner.live[trial_id]
        if trial.stop_ordered or trial.ending:  # it will end anyway
            del runner.giving_way[trial_id]
            continue
        runner.commands.append(StopTrial(*runner.where(trial)))
        runner.gave_way(trial)


def _is_leaving(runner: TrialActions, trial: Trial) -> bool:
    is_told = trial.pausing or trial.stop_ordered or trial.ending
    return bool(is_told) or trial.trial_id in runner.giving_way


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
        for excess, held in ((self._resources, slot.resources), (self._devices, slot.devices)):
            for name, over in excess.items():
                excess[name] = round(over - held.get(name, 0.0), 9)


def _loss(trial: Trial) -> tuple[float, float, int]:
    """Estimate what a trial may lose by giving way; smaller is better.

    That is the seconds since its last checkpoint; ties are broken by total time and age.
    """
    last = trial.last_result
    if last is None:
        return 0.0, 0.0, -trial.number
    own = trial.checkpoints.since(trial.first_attempt)
    saved = max((one.step for one in own if one.is_wanted), default=0)
    unsaved = last.time_total_s * max(0, last.step - saved) / last.step
    return unsaved, last.time_total_s, -trial.number


def _is_any(excess: Mapping[str, float], held: Mapping[str, float]) -> bool:
    return any(held.get(name, 0.0) and over > TOLERANCE for name, over in excess.items())
