"""`NodeEventHandler`: handles nodes that join, disconnect, reconnect, or are lost for good.

**A silent node may be cut off and still run.** So its trials wait for a slot under the same attempt
number, and the state remembers what the node ran (`tunemq_scheduler.core.nodes.away_nodes`). The
first one to come has them: the node if it reconnects, with its processes undisturbed, or another
slot, with a new attempt. After that the old attempt's events do not count, and the node must kill
it.

**Stopping.** A trial that is stopping, or is stopped while its node is away, ends at once: a silent
node may never report again.

**Checkpoints** that only the node has count as uploading until their trial resumes on another node
or the node is declared dead. If the trial has ended, the runner waits for a while longer, because
no other attempt will write them again.
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

#: The event that ended a trial process, or the loss of its node.
FailureEvent = m.TrialFailed | m.TrialProcessDied | m.NodeLost
#: Ends a trial without a process if it was due to end; returns whether it was.
EndIfDue = Callable[[Trial, FailureEvent | None, list[Command]], bool]


class _LostItsNode(Protocol):
    def __call__(
        self, trial: Trial, event: m.NodeLost, commands: list[Command], *, was_alone: bool
    ) -> None: ...


class NodeActions(NamedTuple):
    """The runner's methods for trials; see `TrialRunner`."""

    move: Callable[[Trial, str], None]
    end_if_due: EndIfDue
    lost_its_node: _LostItsNode
    forget_if_over: Callable[[Trial, list[Command]], None]


class NodeEventHandler:
    """Handles events about whole nodes for the runner."""

    def __init__(self, state: RunnerState, moves: NodeActions, offers: OfferEventHandler) -> None:
        self._state = state
        self._offers = offers
        self._slots, self._book = state.slots, state.book
        self._moves = moves

    def joined(self, event: m.NodeJoined) -> list[Command]:
        """Add a node and its resources."""
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
        """Place nothing new on some of a node's devices for now."""
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
        """Handle a node that is silent, or dead."""
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
        """Handle a lost node that reconnected."""
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
                    if event.instance_id in fallen:  # the node was not lost after all
                        fallen.remove(event.instance_id)
        commands = self._offers.make_room(event.instance_id, event)
        orders = [self._standing_order(one.trial, one.attempt) for one in away.held_slots]
        return [*orders, *commands]

    def standing_orders(self) -> list[ReattachTrial]:
        """Return all that nodes must run, for an executor that issues the commands again."""
        return [self._standing_order(trial, attempt) for trial, attempt, _ in self._slots]

    def taken_over(self, trial: Trial) -> list[Command]:
        """Drop what away nodes have of a trial, because a new attempt of it began."""
        commands: list[Command] = []
        for node in self._state.left_behind.pop(trial.trial_id, ()):
            if node in self._state.away:
                commands += self._settle(node, trial.trial_id)
        return commands

    def trial_over(self, trial: str) -> list[Command]:
        """Drop what away nodes have of an ended trial, because no checkpoint can refer to it."""
        commands: list[Command] = []
        for node in self._state.left_behind.pop(trial, ()):
            if node in self._state.away:
                commands += self._end_attempts(node, trial)
        return commands

    def tick(self) -> list[Command]:
        """Stop waiting for overdue uploads of ended trials on away nodes."""
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
        """Forget a dead node; return the commands that follow."""
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
        """Stop waiting for a trial's uploads and attempts on this away node."""
        return [*self._book.give_up(node, trial), *self._end_attempts(node, trial)]

    def _end_attempts(self, node: str, trial: str) -> list[Command]:
        """End the writers of a trial's attempts on this away node."""
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
