"""`CheckpointEventHandler`: decides which checkpoint events count, and applies them."""

from __future__ import annotations

from tunemq_scheduler.core.commands import Command, DeleteCheckpoint
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointLost,
    CheckpointsForgotten,
    CheckpointWritten,
)

CheckpointEvent = (
    CheckpointWritten
    | CheckpointCommitted
    | CheckpointLost
    | CheckpointDamaged
    | CheckpointsForgotten
)


class CheckpointEventHandler:
    """Reviews each checkpoint event before it reaches the `CheckpointBook`.

    A checkpoint counts if its result is recorded: the result precedes it in Redis and in the
    journal. A commit counts if the checkpoint is known as written, whatever happened to its trial
    since. All others are deleted from the store.
    """

    def __init__(self, state: RunnerState) -> None:
        self._state = state
        self._book = state.book

    def handle(self, event: CheckpointEvent) -> list[Command]:
        """Apply an event; return the commands that follow."""
        trial = self._state.live.get(event.trial)
        if isinstance(event, CheckpointCommitted):
            return self._committed(trial, event)
        if trial is None:
            # The trial has ended, so its checkpoints do not count; the store may contain parts of
            # one.
            if isinstance(event, CheckpointLost):
                return [DeleteCheckpoint(event.trial, event.key)]
            return []
        match event:
            case CheckpointWritten():
                self._written(trial, event)
            case CheckpointLost():
                trial.story.append(event)
                return self._book.lost(trial, event.key)
            case CheckpointDamaged():
                trial.story.append(event)
                if self._state.is_attempt(trial, event.attempt) and trial.restoring:
                    trial.restoring = event.instead
                return self._book.damaged(trial, event.key)
            case CheckpointsForgotten():
                trial.story.append(event)
                return self._book.clear(trial)
        return []

    def _written(self, trial: Trial, event: CheckpointWritten) -> None:
        node = self._state.slots.node_at(event.trial, event.attempt)
        is_wanted = self._contains_recorded(trial, event)
        if node is None or not is_wanted:
            self._state.stale += 1
        if is_wanted:
            trial.story.append(event)
            trial.restoring = ""
        if node is not None:
            self._was_kept_by(node)
            self._book.written(trial, node, event, is_wanted=is_wanted)

    def _committed(self, trial: Trial | None, event: CheckpointCommitted) -> list[Command]:
        is_known = trial is not None and event.key in trial.checkpoints
        if trial is None or not (is_known or self._contains_recorded(trial, event)):
            self._state.stale += 1
            return [DeleteCheckpoint(event.trial, event.key)]
        trial.story.append(event)
        node = self._state.slots.node_at(event.trial, event.attempt)
        if node is not None and not is_known:  # its process wrote it directly to the store
            self._was_kept_by(node)
        return self._book.committed(trial, event)

    def _was_kept_by(self, instance_id: str) -> None:
        joined = self._state.nodes.get(instance_id)
        if joined is not None and self._state.health.has_kept(joined.node):
            self._state.review_nodes()

    def _contains_recorded(
        self, trial: Trial, event: CheckpointWritten | CheckpointCommitted
    ) -> bool:
        """Whether the result is recorded; False for an old attempt or beyond the trial's end."""
        return self._state.is_attempt(trial, event.attempt) and event.step <= trial.last_step
