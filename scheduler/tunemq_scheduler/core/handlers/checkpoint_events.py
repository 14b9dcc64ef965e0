"""Decides which checkpoint events count, and applies them.

A checkpoint counts if its result is recorded: the result precedes it in Redis and in the journal. A
commit counts if the checkpoint is known as written, whatever happened to its trial since. All
others are deleted from the store.
"""

from __future__ import annotations

from tunemq_scheduler.core.commands import DeleteCheckpoint
from tunemq_scheduler.core.handlers.inherited_states import keep_own
from tunemq_scheduler.core.trial_actions import TrialActions
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.protocol import messages as m

CheckpointEvent = (
    m.CheckpointWritten
    | m.CheckpointCommitted
    | m.CheckpointLost
    | m.CheckpointDamaged
    | m.CheckpointsForgotten
)


def about_checkpoint(runner: TrialActions, event: CheckpointEvent) -> None:
    """Apply an event, and forget its trial if that only waited for this."""
    trial = runner.live.get(event.trial)
    if isinstance(event, m.CheckpointCommitted):
        _committed(runner, trial, event)
    elif trial is not None:
        _apply(runner, trial, event)
    elif isinstance(event, m.CheckpointLost):
        # The trial has ended, so its checkpoints do not count; the store may have parts of one.
        _delete_unless_kept(runner, event)
    if trial is not None:
        runner.forget_if_over(trial)


def _apply(
    runner: TrialActions,
    trial: Trial,
    event: m.CheckpointWritten | m.CheckpointLost | m.CheckpointDamaged | m.CheckpointsForgotten,
) -> None:
    if isinstance(event, m.CheckpointWritten):
        _written(runner, trial, event)
        return
    trial.story.append(event)
    match event:
        case m.CheckpointLost():
            runner.commands += runner.book.lost(trial, event.key)
        case m.CheckpointDamaged():
            if runner.is_attempt(trial, event.attempt) and trial.restoring:
                trial.restoring = event.instead
            runner.commands += runner.book.damaged(trial, event.key)
            is_current = runner.is_attempt(trial, event.attempt)
            if is_current and event.key == trial.inherited_key and trial.newest is None:
                keep_own(runner, trial)
        case m.CheckpointsForgotten():
            runner.commands += runner.book.clear(trial)


def _written(runner: TrialActions, trial: Trial, event: m.CheckpointWritten) -> None:
    node = runner.slots.node_at(event.trial, event.attempt)
    is_wanted = _contains_recorded(runner, trial, event)
    if node is None or not is_wanted:
        runner.stale += 1
    if is_wanted:
        trial.story.append(event)
        if runner.is_attempt(trial, event.attempt):
            trial.restoring = ""
    if node is not None:
        _was_kept_by(runner, node)
        runner.book.written(trial, node, event, is_wanted=is_wanted)


def _committed(runner: TrialActions, trial: Trial | None, event: m.CheckpointCommitted) -> None:
    is_known = trial is not None and event.key in trial.checkpoints
    if trial is None:
        runner.stale += 1
        _delete_unless_kept(runner, event)
        return
    if not (is_known or _contains_recorded(runner, trial, event)):
        runner.stale += 1
        runner.commands.append(DeleteCheckpoint(event.trial, event.key))
        return
    trial.story.append(event)
    node = runner.slots.node_at(event.trial, event.attempt)
    if node is not None and not is_known:  # its process wrote it directly to the store
        _was_kept_by(runner, node)
    runner.commands += runner.book.committed(trial, event)


def _delete_unless_kept(
    runner: TrialActions, event: m.CheckpointCommitted | m.CheckpointLost
) -> None:
    """Delete what the store has of a checkpoint of an ended trial, unless the trial keeps it."""
    if event.trial in runner.finished:
        kept = runner.summary(event.trial).checkpoints
        if all(one.key != event.key for one in kept):
            runner.commands.append(DeleteCheckpoint(event.trial, event.key))


def _was_kept_by(runner: TrialActions, instance_id: str) -> None:
    joined = runner.nodes.get(instance_id)
    if joined is not None and runner.health.has_kept(joined.node):
        runner.review_nodes()


def _contains_recorded(
    runner: TrialActions, trial: Trial, event: m.CheckpointWritten | m.CheckpointCommitted
) -> bool:
    """Whether the result is recorded; False for an old attempt or beyond the trial's end.

    The attempt that a trial left for another state may still save the last step that it reported.
    """
    inherited = trial.inherited
    if inherited is not None and event.attempt == inherited.left:
        is_writing = runner.book.has_writer(event.trial, event.attempt)
        return is_writing and event.step <= inherited.last_step
    return runner.is_attempt(trial, event.attempt) and event.step <= trial.last_step
