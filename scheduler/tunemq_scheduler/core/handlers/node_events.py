"""Handles nodes that join, disconnect, reconnect, or are lost for good.

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

from msgspec.structs import replace

from tunemq_scheduler.core.commands import DropNode, ReattachTrial, StartTrial
from tunemq_scheduler.core.handlers import failure_events, offer_events
from tunemq_scheduler.core.nodes.away_nodes import AWAY_UPLOADS_S, AwayNode, TrialActivity
from tunemq_scheduler.core.trial_actions import TrialActions
from tunemq_scheduler.core.trials.trial import PAUSED, PENDING, RUNNING, Trial
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import TO_THE_END


def joined(runner: TrialActions, event: m.NodeJoined) -> None:
    """Add a node and its resources."""
    if event.instance_id not in runner.nodes:
        runner.nodes[event.instance_id] = event
        runner.slots.add_node(event.instance_id, event.resources, event.gpus)
        if event.withheld:
            runner.placement.withhold(event.instance_id, event.withheld)
        if event.is_shared:
            offer_events.apply_offer(runner, event.instance_id)
        runner.queue.review(event.instance_id)
        runner.review_nodes()


def withheld(runner: TrialActions, event: m.DevicesWithheld) -> None:
    """Place nothing new on some devices of a node until it offers them again, or on all of it."""
    node = event.instance_id
    if node in runner.nodes:
        runner.nodes[node] = replace(
            runner.nodes[node], withheld=event.devices, is_ending=event.is_ending
        )
        runner.placement.withhold(node, event.devices)
        runner.review_nodes()
    elif node in runner.away:
        away = runner.away[node]
        without = replace(away.joined, withheld=event.devices, is_ending=event.is_ending)
        runner.away[node] = replace(away, joined=without)


def lost(runner: TrialActions, event: m.NodeLost) -> None:
    """Handle a node that is silent, or dead."""
    node = runner.nodes.pop(event.instance_id, None)
    if node is not None:
        held_slots = tuple(runner.slots.lose_node(event.instance_id))
        runner.queue.review(event.instance_id)
        runner.review_nodes()
        activity: dict[str, TrialActivity] = {}
        runner.away[event.instance_id] = AwayNode(node, runner.elapsed, held_slots, activity)
        runner.leave_behind(event.instance_id)
        was_alone = not event.is_shared and len({one.trial for one in held_slots}) == 1
        for one in held_slots:
            trial = runner.live.get(one.trial)
            if trial is not None and trial.attempt == one.attempt:
                _lose_process(
                    runner, trial, event, activity, was_alone=was_alone, has_left=node.is_ending
                )
    if event.is_dead:
        _bury(runner, event.instance_id)


def returned(runner: TrialActions, event: m.NodeReturned) -> None:
    """Handle a lost node that reconnected."""
    away = runner.away.pop(event.instance_id, None)
    if away is None:
        return
    joined(runner, away.joined)
    for one in away.held_slots:
        runner.slots.hold(event.instance_id, one)
        trial, activity = runner.live.get(one.trial), away.activity.get(one.trial)
        if trial is None or activity is None or trial.attempt != one.attempt:
            continue
        if trial.status in {PENDING, PAUSED} and not runner.interrupted:
            trial.story.append(event)
            was_paused = trial.status == PAUSED
            runner.move(trial, RUNNING)
            activity.resume(trial)
            # It may have been paused or resumed while its node was away.
            if was_paused and not trial.pausing:
                trial.pausing = "it was paused while its node was away"
            trial.resuming = bool(trial.pausing) and not was_paused
            for fallen in (trial.fell_with, trial.fell_alone):
                if event.instance_id in fallen:  # the node was not lost after all
                    fallen.remove(event.instance_id)
    offer_events.make_room(runner, event.instance_id, event)
    orders = [standing_order(runner, one.trial, one.attempt) for one in away.held_slots]
    runner.commands[:0] = orders


def end_overdue_uploads(runner: TrialActions) -> None:
    """Stop waiting for overdue uploads of ended trials on away nodes."""
    for node, away in runner.away.items():
        if runner.elapsed < away.since + AWAY_UPLOADS_S:
            continue
        for owner in runner.book.owners(node):
            trial = runner.live[owner]
            if trial.is_finished:
                runner.settle(node, owner)
                runner.forget_if_over(trial)


def _lose_process(
    runner: TrialActions,
    trial: Trial,
    event: m.NodeLost,
    activity: dict[str, TrialActivity],
    *,
    was_alone: bool,
    has_left: bool,
) -> None:
    if trial.status != RUNNING:
        runner.process_gone(trial, event)
        runner.forget_if_over(trial)
        return
    trial.story.append(event)
    if not runner.end_if_due(trial, event):
        activity[trial.trial_id] = TrialActivity.of(trial)
        failure_events.lost_its_node(runner, trial, event, was_alone=was_alone, has_left=has_left)


def _bury(runner: TrialActions, node: str) -> None:
    """Forget a dead node."""
    away = runner.away.pop(node, None)
    if away is None:
        return
    runner.acknowledged.pop(node, None)
    runner.offers.pop(node, None)
    runner.commands.append(DropNode(node))
    owners = runner.book.owners(node)
    runner.commands += runner.book.give_up(node)
    for one in away.held_slots:
        runner.commands += runner.book.end(one.trial, one.attempt)
    for owner in dict.fromkeys((*owners, *(one.trial for one in away.held_slots))):
        if owner in runner.live:
            runner.forget_if_over(runner.live[owner])


def standing_order(runner: TrialActions, trial_id: str, attempt: int) -> ReattachTrial:
    """Return all commands of an attempt that holds a slot of a node."""
    slot = runner.slots.held_by(trial_id, attempt)
    trial = runner.live.get(trial_id)
    is_wanted = trial is not None and trial.attempt == attempt
    summary = runner.summary(trial_id)
    start = StartTrial(
        trial=trial_id,
        attempt=attempt,
        instance_id=slot.node,
        number=summary.number,
        config=summary.config,
        resources=dict(slot.resources),
        run_until=TO_THE_END if trial is None else trial.run_until,
        last_step=0 if trial is None else trial.last_step,
        restore=() if trial is None else runner.book.candidates(trial, slot.node),
        time_spent_s=0.0 if trial is None else trial.time_spent_s,
        devices=dict(slot.devices),
        is_complete=trial is not None and trial.is_complete,
    )
    gives_way = trial_id in runner.giving_way
    is_pausing = trial is not None and bool(trial.pausing)
    return ReattachTrial(
        start,
        pause=is_pausing or gives_way,
        stop=trial is None or trial.stop_ordered or trial.status != RUNNING,
        is_wanted=is_wanted,
        at_checkpoint=gives_way and not is_pausing,
    )
