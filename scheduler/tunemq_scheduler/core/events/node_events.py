"""`NodeEventHandler`: nodes that join, fall silent, are heard again, or are gone for good.

**A silent node may be cut off and go on.** So its trials wait for a slot, with their epoch as it
was, and what it hosted is kept in mind (`tunemq_scheduler.core.nodes.away_nodes`). Whoever is heard
again first has them: the node, as if nothing had been, or another slot, with a new epoch. What the
node then still says of the old one counts for nothing, and it is told to kill it.

**Stopping.** A trial that is to stop, or is told to while its node is away, ends at once: nobody
waits for the last words of a node that may never speak again.

**Checkpoints** that only the node has are under way until their trial goes on elsewhere, or the
node is dead. Of a trial that is over they are waited for a while longer, for nobody will make
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from tunemq_scheduler.core.commands import Command, DropNode, ReattachTrial, StartTrial
from tunemq_scheduler.core.events.offer_events import OfferEventHandler
from tunemq_scheduler.core.nodes.away_nodes import AWAY_UPLOADS_S, AwayNode, TrialActivity
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING, Trial
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.conditions import TO_THE_END

#: What a host, or its node, fell to.
FailureEvent = m.TrialFailed | m.TrialProcessDied | m.NodeLost
#: Ends a trial without a host if it was to end anyway; returns whether it was.
EndIfDue = Callable[[Trial, FailureEvent | None, list[Command]], bool]


class _LostItsNode(Protocol):
    def __call__(
        self, trial: Trial, event: m.NodeLost, commands: list[Command], *, was_alone: bool
    ) -> None: ...


class NodeActions(NamedTuple):
    """What the runner does with a trial; see there."""

    move: Callable[[Trial, str], None]
    end_if_due: EndIfDue
    lost_its_node: _LostItsNode
    forget_if_over: Callable[[Trial, list[Command]], None]


class NodeEventHandler:
    """Handles what concerns whole nodes, for the runner."""

    def __init__(self, state: RunnerState, moves: NodeActions, offers: OfferEventHandler) -> None:
        self._state = state
        self._offers = offers
        self._slots, self._book = state.slots, state.book
        self._moves = moves

    def joined(self, event: m.NodeJoined) -> list[Command]:
        """A node offers its resources."""
        if event.instance_id not in self._state.nodes:
            self._state.nodes[event.instance_id] = event
            self._slots.add_node(event.instance_id, event.resources, event.gpus)
            if event.withheld:
                self._state.placement.withhold(event.instance_id, event.withheld)
            self._offers.joined(event)
            self._state.queue.review(event.instance_id)
            self._state.review_nodes()
        return []

    def withheld(self, event: m.DevicesWithheld) -> list[Command]:
        """On some of a node's devices nothing is to begin, for now."""
        state, node = self._state, event.instance_id
        if node in state.nodes:
            state.nodes[node] = replace(state.nodes[node], withheld=event.devices)
            state.placement.withhold(node, event.devices)
            state.review_nodes()
        elif node in state.away:
            away = state.away[node]
            joined = replace(away.joined, withheld=event.devices)
            state.away[node] = replace(away, joined=joined)
        return []

    def lost(self, event: m.NodeLost) -> list[Command]:
        """A node is silent, or dead."""
        state = self._state
        commands: list[Command] = []
        joined = state.nodes.pop(event.instance_id, None)
        if joined is not None:
            held_slots = tuple(self._slots.lose_node(event.instance_id))
            state.queue.review(event.instance_id)
            state.review_nodes()
            activity: dict[str, TrialActivity] = {}
            state.away[event.instance_id] = AwayNode(joined, state.elapsed, held_slots, activity)
            state.leave_behind(event.instance_id)
            was_alone = not event.is_shared and len({one.trial for one in held_slots}) == 1
            for one in held_slots:
                trial = state.live.get(one.trial)
                if trial is not None and trial.attempt == one.attempt:
                    self._lose_process(trial, event, activity, commands, was_alone=was_alone)
        if event.is_dead:
            commands += self._bury(event.instance_id)
        return commands

    def returned(self, event: m.NodeReturned) -> list[Command]:
        """A lost node is heard again."""
        state = self._state
        away = state.away.pop(event.instance_id, None)
        if away is None:
            return []
        self.joined(away.joined)
        for one in away.held_slots:
            self._slots.hold(event.instance_id, one)
            trial, activity = state.live.get(one.trial), away.activity.get(one.trial)
            if trial is None or activity is None or trial.attempt != one.attempt:
                continue
            if trial.status in {PENDING, PAUSED} and not state.interrupted:
                trial.story.append(event)
                self._moves.move(trial, RUNNING)
                activity.resume(trial)
                for fallen in (trial.fell_with, trial.fell_alone):
                    if event.instance_id in fallen:  # no, the node did not fall
                        fallen.remove(event.instance_id)
        commands = self._offers.make_room(event.instance_id, event)
        orders = [self._standing_order(one.trial, one.attempt) for one in away.held_slots]
        return [*orders, *commands]

    def standing_orders(self) -> list[ReattachTrial]:
        """All that nodes are to host, for whoever gives the orders anew."""
        return [self._standing_order(trial, attempt) for trial, attempt, _ in self._slots]

    def taken_over(self, trial: Trial) -> list[Command]:
        """A new epoch of a trial began: what away nodes have of it counts no longer."""
        commands: list[Command] = []
        for node in self._state.left_behind.pop(trial.trial_id, ()):
            if node in self._state.away:
                commands += self._settle(node, trial.trial_id)
        return commands

    def trial_over(self, trial: str) -> list[Command]:
        """A trial is forgotten: what away nodes wrote of it refers to nothing any more."""
        commands: list[Command] = []
        for node in self._state.left_behind.pop(trial, ()):
            if node in self._state.away:
                commands += self._end_attempts(node, trial)
        return commands

    def tick(self) -> list[Command]:
        """Time went on: what is waited for long enough is given up."""
        commands: list[Command] = []
        for node, away in self._state.away.items():
            if self._state.elapsed < away.since + AWAY_UPLOADS_S:
                continue
            for owner in self._book.owners(node):
                trial = self._state.live[owner]
                if trial.is_finished:
                    commands += self._settle(node, owner)
                    self._moves.forget_if_over(trial, commands)
        return commands

    # --- small things -----------------------------------------------------------------------------

    def _lose_process(
        self,
        trial: Trial,
        event: m.NodeLost,
        activity: dict[str, TrialActivity],
        commands: list[Command],
        *,
        was_alone: bool,
    ) -> None:
        if trial.status != RUNNING:
            self._moves.forget_if_over(trial, commands)
            return
        trial.story.append(event)
        if not self._moves.end_if_due(trial, event, commands):
            activity[trial.trial_id] = TrialActivity.of(trial)
            self._moves.lost_its_node(trial, event, commands, was_alone=was_alone)

    def _bury(self, node: str) -> list[Command]:
        """Nothing of a node has to be kept in mind any longer."""
        state = self._state
        away = state.away.pop(node, None)
        if away is None:
            return []
        state.acknowledged.pop(node, None)
        state.offers.pop(node, None)
        commands: list[Command] = [DropNode(node)]
        owners = self._book.owners(node)
        commands += self._book.give_up(node)
        for one in away.held_slots:
            commands += self._book.end(one.trial, one.attempt)
        for owner in dict.fromkeys((*owners, *(one.trial for one in away.held_slots))):
            if owner in state.live:
                self._moves.forget_if_over(state.live[owner], commands)
        return commands

    def _settle(self, node: str, trial: str) -> list[Command]:
        """Whatever this away node still has of a trial, and says of it, is not waited for."""
        return [*self._book.give_up(node, trial), *self._end_attempts(node, trial)]

    def _end_attempts(self, node: str, trial: str) -> list[Command]:
        """What this away node hosts of a trial writes nothing any more that counts."""
        commands: list[Command] = []
        for one in self._state.away[node].held_slots:
            if one.trial == trial:
                commands += self._book.end(trial, one.attempt)
        return commands

    def _standing_order(self, trial_id: str, attempt: int) -> ReattachTrial:
        slot = self._slots.held_by(trial_id, attempt)
        trial = self._state.live.get(trial_id)
        is_wanted = trial is not None and trial.attempt == attempt
        summary = self._state.summary(trial_id)
        start = StartTrial(
            trial=trial_id,
            attempt=attempt,
            instance_id=slot.node,
            number=summary.number,
            config=summary.config,
            resources=dict(slot.resources),
            run_until=TO_THE_END if trial is None else trial.run_until,
            last_step=0 if trial is None else trial.last_step,
            restore=() if trial is None else self._book.candidates(trial, slot.node),
            time_spent_s=0.0 if trial is None else trial.time_spent_s,
            devices=dict(slot.devices),
        )
        gives_way = trial_id in self._state.giving_way
        is_pausing = trial is not None and bool(trial.pausing)
        return ReattachTrial(
            start,
            pause=is_pausing or gives_way,
            stop=trial is None or trial.stop_ordered or trial.status != RUNNING,
            is_wanted=is_wanted,
            at_checkpoint=gives_way and not is_pausing,
        )
