"""`TrialRunner`: the state machine of a search, which turns events into commands.

    handle(event, answers) -> commands

It reads no clock, draws no random numbers, and does no I/O. It contains no algorithms either: the
loop asks them and passes their answers with the event. So the same events and answers always give
the same state and commands, and the journal is a complete record of both.

The cost of an event does not grow with the number of trials: only live trials are objects, ended
ones are packed, and no code scans either.

Its state is in `tunemq_scheduler.core.runner_state`, the steps in the life of a trial in
`tunemq_scheduler.core.trial_actions`, and the handling of many events in
`tunemq_scheduler.core.handlers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.handlers import failure_events, node_events, offer_events
from tunemq_scheduler.core.handlers.action_events import action_taken
from tunemq_scheduler.core.handlers.checkpoint_events import about_checkpoint
from tunemq_scheduler.core.handlers.experiment_resumed import resumed
from tunemq_scheduler.core.handlers.inherited_states import review_awaited
from tunemq_scheduler.core.resource_demand import ANY_NUMBER, UsageTracker
from tunemq_scheduler.core.result_lookup import reached, reaches, value_of
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_snapshot import restore
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.core.trial_actions import TrialActions
from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager
from tunemq_scheduler.core.trials.trial import (
    PENDING,
    REACHED_ITS_END,
    RUNNING,
    TERMINATED,
    ResultReview,
    Trial,
)
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.device_use import add_up
from tunemq_shared.protocol.result_conditions import next_result

#: Frequent events that concern no trial in particular; if one changes a trial, commands follow.
_FREQUENT: Final = (m.Tick, m.BatchRead)


class TrialRunner(TrialActions):
    """The pure state machine of one experiment."""

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        self._usage = UsageTracker(self)

    def handle(self, event: m.Event, answers: Sequence[m.AlgorithmAnswer] = ()) -> list[c.Command]:
        """Apply an event and the algorithms' answers to it; return the commands that follow."""
        self.commands = []
        if type(event) is m.ResultReported:
            self._result_reported(event, answers)
        elif type(event) is m.ConfigSuggested:
            self._config_suggested(event, answers)
        elif type(event) is m.ExperimentResumed:
            resumed(self, event, answers)
        elif type(event) is m.ActionTaken:
            action_taken(self, event, answers)
        else:
            self._HANDLERS[type(event)](self, event)
        if self.awaited and (self.commands or self.away or type(event) not in _FREQUENT):
            review_awaited(self, getattr(event, "trial", None))
        return self.commands

    @classmethod
    def load(
        cls, settings: RunnerSettings, state: bytes, finished: Mapping[str, bytes]
    ) -> TrialRunner:
        """Load a runner from the output of `tunemq_scheduler.core.runner_snapshot.dump`.

        Args:
            settings: those of the journal's header; ``state`` contains the latest ones.
            state: the bytes of the dump.
            finished: the summaries of ended trials that were stored beside it.

        Raises:
            JournalError: another version wrote the state.
        """
        runner = cls(settings)
        restore(runner, state, finished)
        return runner

    def usage(self, configurations: int = ANY_NUMBER) -> OfferUsage:
        """Return what the experiment holds and wants; see `UsageTracker`."""
        return self._usage.usage(configurations)

    # --- results ----------------------------------------------------------------------------------

    def _result_reported(
        self, event: m.ResultReported, answers: Sequence[m.AlgorithmAnswer]
    ) -> None:
        review = self.review(event)
        if review is ResultReview.STALE:
            self.stale += 1
            return
        trial = self.live[event.trial]
        trial.restoring = ""
        if review is ResultReview.REPEATED:
            self.repeated += 1
            trial.repeated += 1
            trial.repeated_result = event
            return
        trial.story.append(event)
        failure_events.got_on(self, trial, event)
        trial.last_result, trial.repeated_result, trial.changes_since_result = event, None, 0
        if event.is_saved:
            trial.saved_step = event.step
        if review is ResultReview.FINAL:
            # The trial ends later, when its process has reported the fate of its last checkpoint.
            if not trial.ending:
                self._note_criterion(trial, event)
            trial.ending = trial.ending or REACHED_ITS_END
        elif review is ResultReview.DUE:
            self._decide(trial, event, answers)
        is_last, due = event.done or trial.is_finished, trial.take_due_decisions()
        self.commands.insert(0, c.NotifyResult(event.trial, event, is_last, due))

    def _note_criterion(self, trial: Trial, event: m.ResultReported) -> None:
        """Keep which stop criterion a trial's last result reached, if any."""
        criterion = reached(event, self.settings.stop)
        if criterion is not None:
            key, value = criterion.key, value_of(event, criterion.key)
            reason = f"{key} {value:g} has reached the stop criterion {criterion.bound:g}"
            self.decided(trial, m.STOP, reason)

    def _decide(
        self, trial: Trial, event: m.ResultReported, answers: Sequence[m.AlgorithmAnswer]
    ) -> None:
        trial.run_until = next_result(event.step)
        for answer in answers:
            match answer:
                case m.HorizonSet() if not reaches(event, answer.horizon):
                    trial.run_until = answer.horizon
                case m.DecisionMade(decision=m.STOP):
                    self.decided(trial, m.STOP, answer.reason)
                    self.end_early(trial, answer.reason)
                case m.DecisionMade(decision=m.PAUSE):
                    self.decided(trial, m.PAUSE, answer.reason)
                    self.pause(trial, answer.reason)
                case _:
                    pass
        if trial.status == RUNNING and not trial.pausing:
            self.commands.append(c.ContinueTrial(*self.where(trial), trial.run_until))

    # --- the life of a trial ----------------------------------------------------------------------

    def _config_suggested(
        self, event: m.ConfigSuggested, answers: Sequence[m.AlgorithmAnswer]
    ) -> None:
        if event.trial in self.live or event.trial in self.finished:
            raise BugError(f"trial {event.trial} was suggested twice")
        trial = Trial(
            trial_id=event.trial,
            number=event.n,
            config=event.config,
            tag=event.tag,
            resources=event.resources,
            checkpoints=CheckpointManager(self.settings.keep),
        )
        trial.run_until = next_result(0)
        for answer in answers:
            if isinstance(answer, m.HorizonSet):
                trial.run_until = answer.horizon
        trial.story.append(event)
        self.suggested += 1
        self.live[event.trial] = trial
        self.queue.follow(trial)
        self.counts[PENDING] += 1
        self.commands.append(c.NotifyTrialAdded(event.trial))

    def _search_exhausted(self, _event: m.SearchExhausted) -> None:
        self.exhausted = True

    def _trial_chosen(self, event: m.TrialChosen) -> None:
        trial = self.live[event.trial]
        trial.attempt = max(trial.attempt, self.attempts_from) + 1
        # It may have been pausing, or ending, when its run was interrupted.
        trial.ending = trial.pausing = ""
        trial.resuming = False
        trial.matched = {}
        slot = self.slots.take_on(trial, self.place_of(trial))
        if self.is_suspect(trial):
            self.keep_alone(slot.node, trial.trial_id)
        self.queue.served(trial)
        self.move(trial, RUNNING)
        trial.story.append(event)
        restore = self.book.begin(trial, slot.node)
        trial.restoring = restore[0].key if restore else ""
        self.take_over(trial)
        self.commands.append(
            c.StartTrial(
                trial=trial.trial_id,
                attempt=trial.attempt,
                instance_id=slot.node,
                number=trial.number,
                config=trial.config,
                resources=trial.resources,
                run_until=trial.run_until,
                last_step=trial.last_step,
                restore=restore,
                time_spent_s=trial.time_spent_s,
                devices=dict(slot.devices),
                is_complete=trial.is_complete,
            )
        )

    def _trial_started(self, event: m.TrialStarted) -> None:
        if not self.is_current(event.trial, event.attempt):
            self.stale += 1
            return
        trial = self.live[event.trial]
        trial.started = event
        trial.story.append(event)
        node = self.nodes.get(self.slots.node_at(event.trial, event.attempt) or "")
        name = node.node if node is not None else ""
        self.commands.append(c.NotifyTrialStart(event.trial, event, name))

    def _trial_waits(self, event: m.TrialWaits) -> None:
        if self.is_current(event.trial, event.attempt):
            self.live[event.trial].waits = (event.what, event.reason)

    def _trial_finished(self, event: m.TrialFinished) -> None:
        if self.is_current(event.trial, event.attempt):
            trial = self.live[event.trial]
            trial.story.append(event)
            self.end(trial, TERMINATED, trial.end_reason, early=trial.stop_ordered)
        else:
            self._ended_by_itself(event)

    def _ended_by_itself(self, event: m.TrialFinished | m.TrialPaused) -> None:
        """Note the end of a process whose trial had ended before, or has a newer one."""
        self.stale += 1
        trial = self.live.get(event.trial)
        if trial is not None and trial.is_finished and self.is_attempt(trial, event.attempt):
            trial.ending = ""

    def _attempt_failed(self, event: m.TrialFailed | m.TrialProcessDied) -> None:
        trial = self.live.get(event.trial)
        is_current = trial is not None and self.is_attempt(trial, event.attempt)
        if trial is None or not is_current or trial.status != RUNNING:
            self.stale += 1
            if trial is not None and is_current:
                self.process_gone(trial, event)
            return
        trial.story.append(event)
        if not self.end_if_due(trial, event):
            failure_events.failed(self, trial, event)

    def _trial_paused(self, event: m.TrialPaused) -> None:
        if not self.is_current(event.trial, event.attempt):
            self._ended_by_itself(event)
            return
        trial = self.live[event.trial]
        trial.story.append(event)
        if trial.ending:  # after its last result, or on a stop request
            self.end(trial, TERMINATED, trial.ending, early=trial.stop_ordered)
        elif trial.trial_id in self.giving_way:
            self.gave_way(trial)
        elif trial.status == RUNNING:
            trial.saves_nothing = trial.last_step > 0 and not (
                trial.saved_step or trial.has_checkpoint or trial.inherited
            )
            self.set_aside(trial)

    def _slot_freed(self, event: m.SlotFreed) -> None:
        if self._is_unreported(event):
            self._attempt_failed(failure_events.unreported(self.live[event.trial]))
        node = self.slots.give_back(event.trial, event.attempt)
        if node is None:
            return
        self.queue.slot_freed(self._keep_node)
        self.commands.append(c.ReleaseTrial(event.trial, event.attempt, node))
        self.commands += self.book.end(event.trial, event.attempt)
        trial = self.live.get(event.trial)
        if trial is None:  # it ended and was forgotten while the node was away
            return
        if trial.status != RUNNING or trial.attempt != event.attempt:
            if trial.attempt == event.attempt:
                self.process_gone(trial, None)
            self.forget_if_over(trial)
        elif self.end_if_due(trial, None):
            pass
        elif trial.trial_id in self.giving_way:
            self.gave_way(trial)
        elif trial.pausing:
            self.set_aside(trial)

    def _is_unreported(self, event: m.SlotFreed) -> bool:
        """Whether the process of a running trial is gone, and no event said how it ended."""
        trial = self.live.get(event.trial)
        return (
            trial is not None
            and trial.status == RUNNING
            and trial.attempt == event.attempt
            and self.slots.node_at(event.trial, event.attempt) is not None
            and not (trial.stop_ordered or trial.is_complete or trial.pausing)
            and trial.trial_id not in self.giving_way
        )

    def _devices_used(self, event: m.DevicesUsed) -> None:
        """Count used devices for any attempt, because abandoned attempts used them, too."""
        if (trial := self.live.get(event.trial)) is not None:
            trial.devices_used = add_up(trial.devices_used, event.devices)

    # --- stopping ---------------------------------------------------------------------------------

    def _stop_requested(self, event: m.StopRequested) -> None:
        if event.trial is None:
            self.stop_all(event.reason)
        elif (trial := self.live.get(event.trial)) is not None:
            self.stop(trial, event.reason)

    def _interrupted(self, event: m.RunInterrupted) -> None:
        self.interrupted = event.reason
        for trial in self.live.values():
            if trial.status == RUNNING and not trial.stop_ordered:
                self.commands.append(c.StopTrial(*self.where(trial)))
                self.move(trial, trial.status_without_process)

    # --- nodes and event batches ------------------------------------------------------------------

    def standing_orders(self) -> list[c.ReattachTrial]:
        """Return the commands for all that nodes must run, for a backend that starts empty."""
        return [node_events.standing_order(self, trial, n) for trial, n, _ in self.slots]

    def _batch_read(self, event: m.BatchRead) -> None:
        if event.instance_id in self.nodes or event.instance_id in self.away:
            self.acknowledged[event.instance_id] = event.last
        self.cursor = event.cursor

    def _tick(self, event: m.Tick) -> None:
        self.elapsed = event.elapsed
        self.queue.wake(event.elapsed)
        self.review_nodes()
        offer_events.end_grace_periods(self)
        node_events.end_overdue_uploads(self)

    #: How the runner handles the events to which algorithms give no answers.
    _HANDLERS: ClassVar[dict[type[Any], Callable[[Any, Any], None]]] = {
        m.CheckpointWritten: about_checkpoint,
        m.CheckpointCommitted: about_checkpoint,
        m.CheckpointLost: about_checkpoint,
        m.CheckpointDamaged: about_checkpoint,
        m.CheckpointsForgotten: about_checkpoint,
        m.TrialWaits: _trial_waits,
        m.TrialStarted: _trial_started,
        m.TrialFinished: _trial_finished,
        m.TrialFailed: _attempt_failed,
        m.TrialProcessDied: _attempt_failed,
        m.TrialPaused: _trial_paused,
        m.SlotFreed: _slot_freed,
        m.DevicesUsed: _devices_used,
        m.LogMatched: failure_events.matched,
        m.NodeWarned: lambda _runner, _event: None,
        m.Tick: _tick,
        m.BatchRead: _batch_read,
        m.NodeJoined: node_events.joined,
        m.NodeOffered: offer_events.offered,
        m.NodeLost: node_events.lost,
        m.NodeReturned: node_events.returned,
        m.DevicesWithheld: node_events.withheld,
        m.SearchExhausted: _search_exhausted,
        m.SearchStalled: lambda _runner, _event: None,
        m.TrialChosen: _trial_chosen,
        m.StopRequested: _stop_requested,
        m.RunInterrupted: _interrupted,
    }
