"""`TrialActions`: the steps in the life of a trial that several kinds of events cause.

Each step changes the state and adds the commands that follow to those of the event that is being
handled.
"""

from __future__ import annotations

from msgspec.structs import replace

from tunemq_scheduler.core.commands import (
    Command,
    NotifyTrialEnd,
    PauseTrial,
    StopTrial,
    WarnTrialEnd,
)
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trial_decisions import REASON_CHARACTERS, TrialDecision
from tunemq_scheduler.core.trials.trial import ERROR, PAUSED, PENDING, RUNNING, TERMINATED, Trial
from tunemq_shared.protocol import messages as m

#: The event that ended a trial process, or the loss of its node.
FailureEvent = m.TrialFailed | m.TrialProcessDied | m.NodeLost


class TrialActions(RunnerState):
    """The state of an experiment, and what happens to its trials.

    Attributes:
        commands: the commands that follow from the event that is being handled.
    """

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        self.commands: list[Command] = []

    def where(self, trial: Trial) -> tuple[str, int, str]:
        """Return a trial's id, its newest attempt, and the node that runs this."""
        return trial.trial_id, trial.attempt, self.slots.node_of(trial)

    def move(self, trial: Trial, status: str) -> None:
        """Change a trial's status, and all that depends on it."""
        before = trial.status
        trial.move_to(status)
        self.giving_way.pop(trial.trial_id, None)
        self.counts[before] -= 1
        self.counts[status] += 1
        self.queue.follow(trial)

    def decided(self, trial: Trial, action: str, reason: str, source: str = "") -> None:
        """Keep a decision about a trial, before it is carried out."""
        step, kept = trial.last_step, reason[:REASON_CHARACTERS]
        trial.keep_decision(TrialDecision(step, action, kept, source, trial.lineage, self.elapsed))

    # --- waiting for a slot -----------------------------------------------------------------------

    def set_aside(self, trial: Trial) -> None:
        """Queue a trial without a process: PAUSED if it was pausing, else PENDING.

        This holds however it lost its process, because the component that paused it does not expect
        its next result. The trial repeats all steps since its last checkpoint; the runner drops the
        recorded ones.
        """
        status = trial.status_without_process
        trial.ending = trial.pausing = ""
        trial.resuming = False
        self.move(trial, status)

    def try_again(self, trial: Trial) -> None:
        """Queue a trial that failed, for its next retry."""
        trial.back_off(self.elapsed)
        self.set_aside(trial)

    def gave_way(self, trial: Trial) -> None:
        """Queue a trial that gave way and has no process any more, or none that counts."""
        if not trial.pausing:  # otherwise it was to pause anyway
            trial.preemptions += 1
        self.set_aside(trial)

    def pause(self, trial: Trial, reason: str) -> None:
        """Pause a trial by a decision; one without a process only ceases to wait for a slot."""
        trial.pausing, trial.resuming = reason or "it was paused", False
        if trial.status == RUNNING:
            self.commands.append(PauseTrial(*self.where(trial)))
        elif trial.status == PENDING:
            self.move(trial, PAUSED)

    def resume(self, trial: Trial) -> None:
        """Let a paused trial wait for a slot; one that is being paused waits once it has paused."""
        if trial.status == PAUSED:
            trial.pausing = ""
            self.move(trial, PENDING)
        elif trial.pausing:
            trial.resuming = True

    # --- the end ----------------------------------------------------------------------------------

    def stop(self, trial: Trial, reason: str) -> None:
        """Stop a trial; a running one ends once its process has sent its remaining events."""
        if trial.is_finished or trial.stop_ordered:
            return
        self.decided(trial, m.STOP, reason)
        if trial.status == RUNNING:
            self.commands.append(StopTrial(*self.where(trial)))
            trial.stop_ordered = True
            trial.ending = trial.ending or reason
        else:
            self.end(trial, TERMINATED, reason, early=True)

    def stop_all(self, reason: str) -> None:
        """Stop all trials, and ask for no further ones."""
        self.stopping = self.stopping or reason
        for trial in list(self.live.values()):
            self.stop(trial, reason)

    def end(self, trial: Trial, status: str, reason: str, *, early: bool = False) -> None:
        """End a trial; the only place that does so, and the transition table forbids a repeat."""
        had_run = trial.attempt > 0 and trial.status != PAUSED
        self.move(trial, status)
        trial.reason, trial.ending = reason, ""
        self.commands.append(NotifyTrialEnd(trial.trial_id, status, reason, early, had_run))
        if trial.awaits_state:
            self.leave_inherited(trial)
        self.forget_if_over(trial)

    def end_in_error(self, trial: Trial, reason: str) -> None:
        """End a trial that failed and is not retried."""
        self.end(trial, ERROR, reason)
        if self.settings.fail_fast:
            self.stop_all(f"fail_fast: trial {trial.trial_id} failed")

    def end_if_due(self, trial: Trial, failure: FailureEvent | None) -> bool:
        """End a trial whose process is gone if it was due to end; return whether it was.

        Such a trial has all of its results. It has failed only if it reports that it could not save
        its last checkpoint.
        """
        if trial.stop_ordered:  # its log shows errors on the way
            self.end(trial, TERMINATED, trial.end_reason, early=True)
            return True
        could_not_save = isinstance(failure, m.TrialFailed) and failure.kind == "storage"
        if not trial.is_complete or could_not_save:
            return False
        self._warn_of_end(trial, failure)
        self.end(trial, TERMINATED, trial.end_reason)
        return True

    def end_early(self, trial: Trial, reason: str) -> None:
        """End a running trial by a decision; its process may still save its last checkpoint."""
        self.commands.append(StopTrial(*self.where(trial)))
        self.end(trial, TERMINATED, reason, early=True)
        trial.ending = reason or "a decision"

    def process_gone(self, trial: Trial, failure: FailureEvent | None) -> None:
        """Warn if the process of a trial that ended by a decision could not end by itself."""
        if trial.status == TERMINATED and trial.ending:
            trial.ending = ""
            self._warn_of_end(trial, failure)

    def _warn_of_end(self, trial: Trial, failure: FailureEvent | None) -> None:
        own = trial.checkpoints.since(trial.first_attempt)
        saved = max((one.step for one in own if one.is_wanted), default=0)
        hostname = self.hostname_of(trial)
        self.commands.append(
            WarnTrialEnd(trial.trial_id, failure, hostname, trial.last_step, saved)
        )

    def forget_if_over(self, trial: Trial) -> None:
        """Keep only the summary of an ended trial with no processes and no pending uploads."""
        is_over = trial.is_finished and not trial.checkpoints.uploading
        if is_over and not self.slots.has_any(trial):
            del self.live[trial.trial_id]
            self.keep_summary(trial.trial_id, trial.summary())
            # No checkpoint can refer to what away nodes have of it.
            for node in self.left_behind.pop(trial.trial_id, ()):
                if node in self.away:
                    self.end_attempts(node, trial.trial_id)
            self.commands += self.book.trial_over(trial)

    # --- states of other trials -------------------------------------------------------------------

    def leave_inherited(self, trial: Trial) -> None:
        """Stop waiting for the state that a trial was to inherit, and stop keeping it."""
        self.stop_awaiting(trial)
        self.commands += self.book.release(trial)

    def stop_awaiting(self, trial: Trial) -> None:
        """Stop waiting for the state that a trial was to inherit."""
        inherited = trial.inherited
        if inherited is not None and inherited.is_awaited:
            waiting = self.awaited[inherited.source]
            del waiting[trial.trial_id]
            if not waiting:
                del self.awaited[inherited.source]
            trial.inherited = replace(inherited, is_awaited=False, key="")

    # --- nodes that are away ----------------------------------------------------------------------

    def take_over(self, trial: Trial) -> None:
        """Drop what away nodes have of a trial, because a new attempt of it began."""
        for node in self.left_behind.pop(trial.trial_id, ()):
            if node in self.away:
                self.settle(node, trial.trial_id)

    def settle(self, node: str, trial: str) -> None:
        """Stop waiting for a trial's uploads and attempts on this away node."""
        self.commands += self.book.give_up(node, trial)
        self.end_attempts(node, trial)

    def end_attempts(self, node: str, trial: str) -> None:
        """End the writers of a trial's attempts on this away node."""
        for one in self.away[node].held_slots:
            if one.trial == trial:
                self.commands += self.book.end(trial, one.attempt)
