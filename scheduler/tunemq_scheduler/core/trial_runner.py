"""`TrialRunner`: the state machine of a search, which turns events into commands.

    handle(event, answers) -> commands

It reads no clock, draws no random numbers, and does no I/O. It contains no algorithms either: the
loop asks them and passes their answers with the event. So the same events and answers always give
the same state and commands, and the journal is a complete record of both.

The cost of an event does not grow with the number of trials: only live trials are objects, ended
ones are packed, and no code scans either.

Its state is in `tunemq_scheduler.core.runner_state`, its handling of checkpoints in
`tunemq_scheduler.core.events.checkpoint_events`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunemq_scheduler.core.allotments import OfferUsage
from tunemq_scheduler.core.commands import (
    Command,
    ContinueTrial,
    NotifyResult,
    NotifyTrialAdded,
    NotifyTrialEnd,
    NotifyTrialStart,
    PauseTrial,
    ReattachTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
    WarnTrialEnd,
)
from tunemq_scheduler.core.events.checkpoint_events import CheckpointEvent, CheckpointEventHandler
from tunemq_scheduler.core.events.failure_events import FailureActions, FailureEventHandler
from tunemq_scheduler.core.events.node_events import FailureEvent, NodeActions, NodeEventHandler
from tunemq_scheduler.core.events.offer_events import OfferEventHandler
from tunemq_scheduler.core.events.resume_events import ResumeActions, ResumeEventHandler
from tunemq_scheduler.core.metric_values import reaches
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_snapshot import restore, snapshot
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager
from tunemq_scheduler.core.trials.result_review import ResultReview
from tunemq_scheduler.core.trials.trial import (
    ERROR,
    PAUSED,
    PENDING,
    REACHED_ITS_END,
    RUNNING,
    TERMINATED,
    Trial,
)
from tunemq_scheduler.core.usage import ANY_NUMBER, UsageTracker
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.conditions import next_result
from tunemq_shared.protocol.device_use import add_up


class TrialRunner(RunnerState):
    """The pure state machine of one experiment."""

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        self._checkpoints = CheckpointEventHandler(self)
        self._failures = FailureEventHandler(
            self, FailureActions(self._try_again, self._end_in_error)
        )
        self._offers = OfferEventHandler(self, self._set_aside)
        self._usage = UsageTracker(self)
        self._nodes = NodeEventHandler(
            self,
            NodeActions(
                self._move, self._end_if_due, self._failures.lost_its_node, self._forget_if_over
            ),
            self._offers,
        )
        self._handlers: dict[type[Any], Callable[[Any], list[Command]]] = {
            m.CheckpointWritten: self._about_checkpoints,
            m.CheckpointCommitted: self._about_checkpoints,
            m.CheckpointLost: self._about_checkpoints,
            m.CheckpointDamaged: self._about_checkpoints,
            m.CheckpointsForgotten: self._about_checkpoints,
            m.TrialWaits: self._trial_waits,
            m.TrialStarted: self._trial_started,
            m.TrialFinished: self._trial_finished,
            m.TrialFailed: self._attempt_failed,
            m.TrialProcessDied: self._attempt_failed,
            m.TrialPaused: self._trial_paused,
            m.SlotFreed: self._slot_freed,
            m.DevicesUsed: self._devices_used,
            m.LogMatched: self._failures.matched,
            m.NodeWarned: lambda _event: [],
            m.Tick: self._tick,
            m.BatchRead: self._batch_read,
            m.NodeJoined: self._nodes.joined,
            m.NodeOffered: self._offers.offered,
            m.NodeLost: self._nodes.lost,
            m.NodeReturned: self._nodes.returned,
            m.DevicesWithheld: self._nodes.withheld,
            m.SearchExhausted: self._search_exhausted,
            m.TrialChosen: self._trial_chosen,
            m.StopRequested: self._stop_requested,
            m.RunInterrupted: self._interrupted,
        }
        turns = ResumeActions(self._set_aside, self._stop, self._end_if_due, self._nodes.lost)
        self._resuming = ResumeEventHandler(self, turns)

    def handle(self, event: m.Event, answers: Sequence[m.AlgorithmAnswer] = ()) -> list[Command]:
        """Apply an event and the algorithms' answers to it; return the commands that follow."""
        if type(event) is m.ResultReported:
            return self._result_reported(event, answers)
        if type(event) is m.ConfigSuggested:
            return self._config_suggested(event, answers)
        if type(event) is m.ExperimentResumed:
            return self._resuming.resumed(event, answers)
        return self._handlers[type(event)](event)

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
        """Return what the experiment holds and wants; see `tunemq_scheduler.core.usage`."""
        return self._usage.usage(configurations)

    def snapshot(self) -> bytes:
        """Return the state in canonical form; see `tunemq_scheduler.core.runner_snapshot`."""
        return snapshot(self)

    # --- results ----------------------------------------------------------------------------------

    def _result_reported(
        self, event: m.ResultReported, answers: Sequence[m.AlgorithmAnswer]
    ) -> list[Command]:
        review = self.review(event)
        if review is ResultReview.STALE:
            self.stale += 1
            return []
        trial = self.live[event.trial]
        trial.restoring = ""
        if review is ResultReview.REPEATED:
            self.repeated += 1
            trial.repeated += 1
            return self._stop_behind_end(trial, event)
        trial.story.append(event)
        self._failures.got_on(trial, event)
        trial.last_result = event
        if review is ResultReview.BEFORE_HORIZON:
            return [NotifyResult(event.trial, event, done=False)]
        commands: list[Command] = []
        if review is ResultReview.FINAL:
            # The trial ends later, when its process has reported the fate of its last checkpoint.
            trial.ending = trial.ending or REACHED_ITS_END
        else:
            self._decide(trial, event, answers, commands)
        return [NotifyResult(event.trial, event, done=event.done or trial.is_finished), *commands]

    def _decide(
        self,
        trial: Trial,
        event: m.ResultReported,
        answers: Sequence[m.AlgorithmAnswer],
        commands: list[Command],
    ) -> None:
        trial.run_until = next_result(event.step)
        for answer in answers:
            match answer:
                case m.HorizonSet() if not reaches(event, answer.horizon):
                    trial.run_until = answer.horizon
                case m.DecisionMade(decision=m.STOP):
                    commands.append(StopTrial(*self._where(trial)))
                    self._end(trial, TERMINATED, answer.reason, commands, early=True)
                case m.DecisionMade(decision=m.PAUSE):
                    trial.pausing = answer.reason or "it was paused"
                    if trial.status == RUNNING:
                        commands.append(PauseTrial(*self._where(trial)))
                    else:  # the run was interrupted: the process is already stopping
                        self._move(trial, PAUSED)
                case _:
                    pass
        if trial.status == RUNNING and not trial.pausing:
            commands.append(ContinueTrial(*self._where(trial), trial.run_until))

    def _stop_behind_end(self, trial: Trial, event: m.ResultReported) -> list[Command]:
        """Stop a trial that has all of its results and only ran on to save a checkpoint."""
        commands: list[Command] = []
        if trial.is_complete and event.step >= trial.last_step and not event.done:
            self._stop(trial, trial.end_reason, commands)
        return commands

    # --- the life of a trial ----------------------------------------------------------------------

    def _config_suggested(
        self, event: m.ConfigSuggested, answers: Sequence[m.AlgorithmAnswer]
    ) -> list[Command]:
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
        return [NotifyTrialAdded(event.trial)]

    def _search_exhausted(self, _event: m.SearchExhausted) -> list[Command]:
        self.exhausted = True
        return []

    def _trial_chosen(self, event: m.TrialChosen) -> list[Command]:
        trial = self.live.get(event.trial)
        if trial is None or (trial.is_finished and trial.is_complete):
            return []  # from an earlier version, which retried trials after their last result
        trial.attempt = max(trial.attempt, self.attempts_from) + 1
        # It may have been pausing, or ending, when its run was interrupted.
        trial.ending = trial.pausing = ""
        trial.matched = {}
        slot = self.slots.take_on(trial, self.place_of(trial))
        if self.is_suspect(trial):
            self.keep_alone(slot.node, trial.trial_id)
        self.queue.served(trial)
        self._move(trial, RUNNING)
        trial.story.append(event)
        restore = self.book.begin(trial, slot.node)
        trial.restoring = restore[0].key if restore else ""
        return [
            *self._nodes.taken_over(trial),
            StartTrial(
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
            ),
        ]

    def _trial_started(self, event: m.TrialStarted) -> list[Command]:
        if not self.is_current(event.trial, event.attempt):
            self.stale += 1
            return []
        trial = self.live[event.trial]
        trial.started = event
        trial.story.append(event)
        node = self.nodes.get(self.slots.node_at(event.trial, event.attempt) or "")
        return [NotifyTrialStart(event.trial, event, node.node if node is not None else "")]

    def _trial_waits(self, event: m.TrialWaits) -> list[Command]:
        if self.is_current(event.trial, event.attempt):
            self.live[event.trial].waits = (event.what, event.reason)
        return []

    def _about_checkpoints(self, event: CheckpointEvent) -> list[Command]:
        commands = self._checkpoints.handle(event)
        trial = self.live.get(event.trial)
        if trial is not None:
            self._forget_if_over(trial, commands)
        return commands

    def _trial_finished(self, event: m.TrialFinished) -> list[Command]:
        commands: list[Command] = []
        if self.is_current(event.trial, event.attempt):
            trial = self.live[event.trial]
            trial.story.append(event)
            self._end(trial, TERMINATED, trial.end_reason, commands, early=trial.stop_ordered)
        else:
            self.stale += 1
        return commands

    def _attempt_failed(self, event: m.TrialFailed | m.TrialProcessDied) -> list[Command]:
        trial = self.live.get(event.trial)
        is_current = trial is not None and self.is_attempt(trial, event.attempt)
        if trial is None or not is_current or trial.status != RUNNING:
            self.stale += 1
            return []
        trial.story.append(event)
        commands: list[Command] = []
        if not self._end_if_due(trial, event, commands):
            self._failures.failed(trial, event, commands)
        return commands

    def _end_if_due(
        self, trial: Trial, failure: FailureEvent | None, commands: list[Command]
    ) -> bool:
        """End a trial whose process is gone if it was due to end; return whether it was.

        Such a trial has all of its results. It has failed only if it reports that it could not save
        its last checkpoint.
        """
        if trial.stop_ordered:  # its log shows errors on the way
            self._end(trial, TERMINATED, trial.end_reason, commands, early=True)
            return True
        could_not_save = isinstance(failure, m.TrialFailed) and failure.kind == "storage"
        if not trial.is_complete or could_not_save:
            return False
        saved = max((one.step for one in trial.checkpoints if one.is_wanted), default=0)
        hostname = self.hostname_of(trial)
        commands.append(WarnTrialEnd(trial.trial_id, failure, hostname, trial.last_step, saved))
        self._end(trial, TERMINATED, trial.end_reason, commands)
        return True

    def _end_in_error(self, trial: Trial, reason: str, commands: list[Command]) -> None:
        self._end(trial, ERROR, reason, commands)
        if self.settings.fail_fast:
            self._stop_all(f"fail_fast: trial {trial.trial_id} failed", commands)

    def _trial_paused(self, event: m.TrialPaused) -> list[Command]:
        commands: list[Command] = []
        if not self.is_current(event.trial, event.attempt):
            self.stale += 1
            return commands
        trial = self.live[event.trial]
        trial.story.append(event)
        if trial.ending:  # after its last result, or on a stop request
            self._end(trial, TERMINATED, trial.ending, commands, early=trial.stop_ordered)
        elif trial.trial_id in self.giving_way:
            self._offers.gave_way(trial)
        elif trial.status == RUNNING:
            self._set_aside(trial)
        return commands

    def _set_aside(self, trial: Trial) -> None:
        """Queue a trial without a process: PAUSED if it was pausing, else PENDING.

        This holds however it lost its process, because the component that paused it does not expect
        its next result. The trial repeats all steps since its last checkpoint; the runner drops the
        recorded ones.
        """
        status = PAUSED if trial.pausing else PENDING
        trial.ending = trial.pausing = ""
        self._move(trial, status)

    def _try_again(self, trial: Trial) -> None:
        trial.back_off(self.elapsed)
        self._set_aside(trial)

    def _slot_freed(self, event: m.SlotFreed) -> list[Command]:
        node = self.slots.give_back(event.trial, event.attempt)
        if node is None:
            return []
        self.queue.slot_freed(self._keep_node)
        commands: list[Command] = [ReleaseTrial(event.trial, event.attempt, node)]
        commands += self.book.end(event.trial, event.attempt)
        trial = self.live.get(event.trial)
        if trial is None:  # it ended and was forgotten while the node was away
            return commands
        if trial.status != RUNNING or trial.attempt != event.attempt:
            self._forget_if_over(trial, commands)
        elif self._end_if_due(trial, None, commands):
            pass
        elif trial.trial_id in self.giving_way:
            self._offers.gave_way(trial)
        elif trial.pausing:
            self._set_aside(trial)
        else:
            raise BugError(f"the host of trial {event.trial} is gone and nothing said how it ended")
        return commands

    def _devices_used(self, event: m.DevicesUsed) -> list[Command]:
        """Count used devices for any attempt, because abandoned attempts used them, too."""
        if (trial := self.live.get(event.trial)) is not None:
            trial.devices_used = add_up(trial.devices_used, event.devices)
        return []

    def _end(
        self,
        trial: Trial,
        status: str,
        reason: str,
        commands: list[Command],
        *,
        early: bool = False,
    ) -> None:
        """End a trial; the only place that does so, and the transition table forbids a repeat."""
        had_run = trial.attempt > 0 and trial.status != PAUSED
        self._move(trial, status)
        trial.reason = reason
        commands.append(NotifyTrialEnd(trial.trial_id, status, reason, early, had_run))
        self._forget_if_over(trial, commands)

    def _forget_if_over(self, trial: Trial, commands: list[Command]) -> None:
        """Keep only the summary of an ended trial with no processes and no pending uploads."""
        is_over = trial.is_finished and not trial.checkpoints.uploading
        if is_over and not self.slots.has_any(trial):
            del self.live[trial.trial_id]
            self.keep_summary(trial.trial_id, trial.summary())
            commands += self._nodes.trial_over(trial.trial_id)
            commands += self.book.trial_over(trial)

    # --- stopping ---------------------------------------------------------------------------------

    def _stop_requested(self, event: m.StopRequested) -> list[Command]:
        commands: list[Command] = []
        if event.trial is None:
            self._stop_all(event.reason, commands)
        elif (trial := self.live.get(event.trial)) is not None:
            self._stop(trial, event.reason, commands)
        return commands

    def _stop_all(self, reason: str, commands: list[Command]) -> None:
        self.stopping = self.stopping or reason
        for trial in list(self.live.values()):
            self._stop(trial, reason, commands)

    def _stop(self, trial: Trial, reason: str, commands: list[Command]) -> None:
        """Stop a trial; a running one ends once its process has sent its remaining events."""
        if trial.is_finished or trial.stop_ordered:
            return
        if trial.status == RUNNING:
            commands.append(StopTrial(*self._where(trial)))
            trial.stop_ordered = True
            trial.ending = trial.ending or reason
        else:
            self._end(trial, TERMINATED, reason, commands, early=True)

    def _interrupted(self, event: m.RunInterrupted) -> list[Command]:
        self.interrupted = event.reason
        commands: list[Command] = []
        for trial in self.live.values():
            if trial.status == RUNNING and not trial.stop_ordered:
                commands.append(StopTrial(*self._where(trial)))
                self._move(trial, PAUSED if trial.pausing else PENDING)
        return commands

    # --- nodes and event batches ------------------------------------------------------------------

    def standing_orders(self) -> list[ReattachTrial]:
        """Return the commands for all that nodes must run, for a backend that starts empty."""
        return self._nodes.standing_orders()

    def _batch_read(self, event: m.BatchRead) -> list[Command]:
        if event.instance_id in self.nodes or event.instance_id in self.away:
            self.acknowledged[event.instance_id] = event.last
        self.cursor = event.cursor
        return []

    def _tick(self, event: m.Tick) -> list[Command]:
        self.elapsed = event.elapsed
        self.queue.wake(event.elapsed)
        self.review_nodes()
        commands = self._offers.tick() if self.giving_way else []
        return [*commands, *self._nodes.tick()] if self.away else commands

    # --- small things -----------------------------------------------------------------------------

    def _where(self, trial: Trial) -> tuple[str, int, str]:
        return trial.trial_id, trial.attempt, self.slots.node_of(trial)

    def _move(self, trial: Trial, status: str) -> None:
        before = trial.status
        trial.move_to(status)
        self.giving_way.pop(trial.trial_id, None)
        self.counts[before] -= 1
        self.counts[status] += 1
        self.queue.follow(trial)
