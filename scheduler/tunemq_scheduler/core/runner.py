"""`TrialRunner`: the state of a search, and what follows from each event.

    handle(event, answers) -> commands

Nothing in here reads a clock, draws a random number, or does I/O. Algorithms are not in here
either: the loop asks them, and what they answer comes in beside the event. So the same events and
answers always give the same state and commands, and the journal is a complete account of both.

The cost of an event does not grow with the number of trials: only live ones are held as objects,
finished ones are packed away, and nothing scans either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from tunemq_scheduler.core.commands import (
    Command,
    ContinueTrial,
    DeleteCheckpoint,
    DropNode,
    RecordCheckpoint,
    RecordEnd,
    RecordFailure,
    RecordResult,
    RecordStart,
    RecordTrialAdded,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.core.kept_checkpoints import KeptCheckpoints
from tunemq_scheduler.core.review import Review
from tunemq_scheduler.core.settings import RunnerSettings
from tunemq_scheduler.core.slots import Slots
from tunemq_scheduler.core.trial import (
    ERROR,
    FINISHED,
    PENDING,
    RUNNING,
    STATES,
    TERMINATED,
    Trial,
    TrialSummary,
)
from tunemq_scheduler.core.values import reaches
from tunemq_shared import messages as m
from tunemq_shared.conditions import next_result
from tunemq_shared.errors import BugError

#: Seconds to wait before the next try: at once, then growing while no new result comes.
MAX_BACK_OFF_S: Final = 60.0
#: The wait doubles no more often than this; it is at its longest long before.
_MOST_DOUBLINGS: Final = 10


class TrialRunner:
    """The pure state machine of one experiment."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self.slots = Slots()
        self.placement = self.slots.placement
        self.nodes: dict[str, m.NodeJoined] = {}
        self.live: dict[str, Trial] = {}
        self.finished: dict[str, bytes] = {}
        self.counts: dict[str, int] = dict.fromkeys(STATES, 0)
        self.elapsed = 0.0
        self.suggested = 0
        self.exhausted = False
        #: Why the experiment ends before its search does; empty while it does not.
        self.stopping = ""
        #: Why it is left as it is, to be resumed; empty while it is not.
        self.interrupted = ""
        self.stale = 0
        self.repeated = 0
        self.accepted: dict[str, int] = {}
        self.cursor = "0-0"
        self._pending: dict[str, Trial] = {}
        self._handlers: dict[type[Any], Callable[[Any, Sequence[m.Answer]], list[Command]]] = {
            m.ResultReported: self._result_reported,
            m.CheckpointCommitted: self._checkpoint_committed,
            m.TrialStarted: self._trial_started,
            m.TrialFinished: self._trial_finished,
            m.TrialFailed: self._incarnation_failed,
            m.HostDied: self._incarnation_failed,
            m.HostFreed: self._host_freed,
            m.NodeWarned: lambda _event, _answers: [],
            m.Tick: self._tick,
            m.BatchRead: self._batch_read,
            m.NodeJoined: self._node_joined,
            m.NodeLost: self._node_lost,
            m.ConfigSuggested: self._config_suggested,
            m.SearchExhausted: self._search_exhausted,
            m.TrialChosen: self._trial_chosen,
            m.StopRequested: self._stop_requested,
            m.Interrupted: self._interrupted,
        }

    # --- what the loop asks -----------------------------------------------------------------------

    def handle(self, event: m.Event, answers: Sequence[m.Answer] = ()) -> list[Command]:
        """Take in an event and what was answered about it; returns what is to be done."""
        return self._handlers[type(event)](event, answers)

    @property
    def is_finished(self) -> bool:
        """Whether every trial is over, its host gone, and no more are to come."""
        if self.interrupted:
            return not len(self.slots)
        return not self.live and (self.exhausted or bool(self.stopping))

    def review(self, result: m.ResultReported) -> Review:
        """What a reported result means, before it is handled."""
        trial = self.live.get(result.trial)
        if trial is None or result.epoch != trial.epoch or trial.status in FINISHED:
            return Review.STALE
        if result.step <= trial.last_step:
            return Review.REPEATED
        if result.done:
            return Review.FINAL
        is_due = not trial.ending and reaches(result, trial.run_until)
        return Review.DUE if is_due else Review.PASSING

    def is_current(self, trial: str, epoch: int) -> bool:
        """Whether facts of this incarnation still count."""
        live = self.live.get(trial)
        return live is not None and live.epoch == epoch and live.status not in FINISHED

    def wants_config(self) -> bool:
        """Whether one more configuration could start now."""
        ends = self.exhausted or self.stopping or self.interrupted
        if ends or not self.nodes:
            return False
        # Who waits for a slot comes first; who waits before the next try keeps nobody waiting.
        if any(trial.not_before <= self.elapsed for trial in self._pending.values()):
            return False
        unfinished = self.counts[PENDING] + self.counts[RUNNING] + self.counts["PAUSED"]
        if 0 < self.settings.max_concurrent <= unfinished:
            return False
        request = self.settings.request
        if request is None or self.placement.fit(request) is not None:
            return True
        # What no node can ever hold is suggested nevertheless: whoever adds the trial refuses it,
        # or it waits, in sight, for a bigger node.
        return self.placement.why_never(request) is not None

    def waiting(self) -> Iterator[Trial]:
        """Trials that could be placed now, the longest waiting first."""
        return (
            trial
            for trial in self._pending.values()
            if not self.interrupted
            and trial.not_before <= self.elapsed
            and self.placement.fit(trial.resources) is not None
        )

    def next_wake(self) -> float | None:
        """When a trial that waits to be tried again may go on, in elapsed seconds."""
        due = [t.not_before for t in self._pending.values() if t.not_before > self.elapsed]
        return min(due, default=None)

    def summary(self, trial: str) -> TrialSummary:
        """What is known of a trial, over or not.

        Raises:
            KeyError: there is no such trial.
        """
        packed = self.finished.get(trial)
        return self.live[trial].summary() if packed is None else _unpack_summary(packed)

    def snapshot(self) -> bytes:
        """The whole state in one canonical form: equal states give equal bytes.

        `elapsed` is left out: it is the clock's, and turns in which nothing happened move it on
        without a trace in the journal.
        """
        live = [
            (
                t.trial_id,
                t.summary(),
                t.run_until,
                t.repeated,
                (t.fruitless, t.not_before),
                (t.ending, t.stop_ordered),
            )
            for t in self.live.values()
        ]
        return m.encode(
            (
                live,
                list(self.finished.items()),
                sorted(self.counts.items()),
                [(node, self.accepted.get(node)) for node in sorted(self.nodes)],
                list(self.slots),
                list(self._pending),
                (self.suggested, self.exhausted, self.stopping, self.interrupted),
                (self.stale, self.repeated, self.cursor),
            )
        )

    # --- results ----------------------------------------------------------------------------------

    def _result_reported(
        self, event: m.ResultReported, answers: Sequence[m.Answer]
    ) -> list[Command]:
        review = self.review(event)
        if review is Review.STALE:
            self.stale += 1
            return []
        trial = self.live[event.trial]
        if review is Review.REPEATED:
            self.repeated += 1
            trial.repeated += 1
            return []
        trial.story.append(event)
        trial.last_result = event
        trial.fruitless = 0
        if review is Review.PASSING:
            return [RecordResult(event.trial, event, done=False)]
        commands: list[Command] = []
        if review is Review.FINAL:
            # Its end follows, when its host has said that the last checkpoint is kept, too.
            trial.ending = trial.ending or "it reached its end"
        else:
            self._decide(trial, event, answers, commands)
        return [RecordResult(event.trial, event, done=event.done or trial.is_finished), *commands]

    def _decide(
        self,
        trial: Trial,
        event: m.ResultReported,
        answers: Sequence[m.Answer],
        commands: list[Command],
    ) -> None:
        trial.run_until = next_result(event.step)
        for answer in answers:
            match answer:
                case m.HorizonSet() if not reaches(event, answer.horizon):
                    trial.run_until = answer.horizon
                case m.Decided(decision=m.STOP):
                    commands.append(self._stop_order(trial))
                    self._end(trial, TERMINATED, answer.reason, commands, early=True)
                case _:
                    pass
        if trial.status == RUNNING:
            order = (trial.trial_id, trial.epoch, self.slots.node_of(trial), trial.run_until)
            commands.append(ContinueTrial(*order))

    def _checkpoint_committed(
        self, event: m.CheckpointCommitted, _answers: Sequence[m.Answer]
    ) -> list[Command]:
        trial = self.live.get(event.trial)
        if trial is None or trial.epoch != event.epoch or event.step > trial.last_step:
            # Of an older incarnation, or of a result that was dropped behind the trial's end.
            self.stale += 1
            return [DeleteCheckpoint(event.trial, event.key)]
        trial.story.append(event)
        # A step that is repeated has been recorded long ago, with a result that is not kept here.
        is_newest = event.step == trial.last_step
        dropped = trial.checkpoints.add(event, trial.last_result if is_newest else None)
        commands: list[Command] = [RecordCheckpoint(event.trial, event)]
        commands += [DeleteCheckpoint(event.trial, old.key) for old in dropped]
        return commands

    # --- the life of a trial ----------------------------------------------------------------------

    def _config_suggested(
        self, event: m.ConfigSuggested, answers: Sequence[m.Answer]
    ) -> list[Command]:
        if event.trial in self.live or event.trial in self.finished:
            raise BugError(f"trial {event.trial} was suggested twice")
        trial = Trial(
            trial_id=event.trial,
            number=event.n,
            config=event.config,
            tag=event.tag,
            resources=event.resources,
            checkpoints=KeptCheckpoints(self.settings.keep),
        )
        trial.run_until = next_result(0)
        for answer in answers:
            if isinstance(answer, m.HorizonSet):
                trial.run_until = answer.horizon
        trial.story.append(event)
        self.suggested += 1
        self.live[event.trial] = self._pending[event.trial] = trial
        self.counts[PENDING] += 1
        return [RecordTrialAdded(event.trial)]

    def _search_exhausted(
        self, _event: m.SearchExhausted, _answers: Sequence[m.Answer]
    ) -> list[Command]:
        self.exhausted = True
        return []

    def _trial_chosen(self, event: m.TrialChosen, _answers: Sequence[m.Answer]) -> list[Command]:
        trial = self._pending[event.trial]
        trial.epoch += 1
        node = self.slots.take(trial)
        self._move(trial, RUNNING)
        trial.story.append(event)
        return [
            StartTrial(
                trial=trial.trial_id,
                epoch=trial.epoch,
                incarnation=node,
                number=trial.number,
                config=trial.config,
                resources=trial.resources,
                run_until=trial.run_until,
                last_step=trial.last_step,
                restore=trial.checkpoints.newest(),
            )
        ]

    def _trial_started(self, event: m.TrialStarted, _answers: Sequence[m.Answer]) -> list[Command]:
        if not self.is_current(event.trial, event.epoch):
            self.stale += 1
            return []
        trial = self.live[event.trial]
        trial.started = event
        trial.story.append(event)
        return [RecordStart(event.trial, event)]

    def _trial_finished(
        self, event: m.TrialFinished, _answers: Sequence[m.Answer]
    ) -> list[Command]:
        commands: list[Command] = []
        if self.is_current(event.trial, event.epoch):
            trial = self.live[event.trial]
            trial.story.append(event)
            reason = trial.ending or "it finished"
            self._end(trial, TERMINATED, reason, commands, early=trial.stop_ordered)
        return commands

    def _incarnation_failed(
        self, event: m.TrialFailed | m.HostDied, _answers: Sequence[m.Answer]
    ) -> list[Command]:
        trial = self.live.get(event.trial)
        if trial is None or trial.epoch != event.epoch or trial.status != RUNNING:
            self.stale += 1
            return []
        trial.story.append(event)
        commands: list[Command] = []
        if trial.stop_ordered:  # it failed while it was being stopped, which its log tells
            self._end(trial, TERMINATED, trial.ending, commands, early=True)
            return commands
        trial.num_failures += 1
        limit = self.settings.max_failures
        retried = (limit < 0 or trial.num_failures <= limit) and not self.stopping
        node = self.nodes.get(self.slots.node_of(trial))
        hostname = node.hostname if node is not None else ""
        commands.append(RecordFailure(event.trial, event, hostname, retried))
        if retried:
            self._try_again(trial)
        else:
            self._end(
                trial, ERROR, f"failure {trial.num_failures} of at most {limit + 1}", commands
            )
            if self.settings.fail_fast:
                self._stop_all(f"fail_fast: trial {trial.trial_id} failed", commands)
        return commands

    def _try_again(self, trial: Trial) -> None:
        doublings = min(trial.fruitless, _MOST_DOUBLINGS) - 1
        back_off = 0.0 if trial.fruitless == 0 else min(MAX_BACK_OFF_S, 2.0**doublings)
        trial.fruitless += 1
        trial.not_before = self.elapsed + back_off
        trial.ending = ""
        self._move(trial, PENDING)

    def _host_freed(self, event: m.HostFreed, _answers: Sequence[m.Answer]) -> list[Command]:
        node = self.slots.give_back(event.trial, event.epoch)
        if node is None:
            return []
        trial = self.live[event.trial]
        commands: list[Command] = [ReleaseTrial(event.trial, event.epoch, node)]
        if trial.status != RUNNING or trial.epoch != event.epoch:
            self._forget_if_over(trial)
        elif trial.stop_ordered:
            self._end(trial, TERMINATED, trial.ending, commands, early=True)
        else:
            raise BugError(f"the host of trial {event.trial} is gone and nothing said how it ended")
        return commands

    def _end(
        self,
        trial: Trial,
        status: str,
        reason: str,
        commands: list[Command],
        *,
        early: bool = False,
    ) -> None:
        """The one place where a trial finishes; it cannot finish twice, the table forbids it."""
        self._move(trial, status)
        trial.reason = reason
        commands.append(RecordEnd(trial.trial_id, status, reason, early))
        self._forget_if_over(trial)

    def _forget_if_over(self, trial: Trial) -> None:
        if trial.is_finished and not self.slots.has_any(trial):
            del self.live[trial.trial_id]
            self.finished[trial.trial_id] = m.encode(trial.summary())

    # --- stopping ---------------------------------------------------------------------------------

    def _stop_requested(
        self, event: m.StopRequested, _answers: Sequence[m.Answer]
    ) -> list[Command]:
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
        """Stop a trial; one that runs ends when its host has said what it still has to say."""
        if trial.is_finished or trial.stop_ordered:
            return
        if trial.status == RUNNING:
            commands.append(self._stop_order(trial))
            trial.stop_ordered = True
            trial.ending = trial.ending or reason
        else:
            self._end(trial, TERMINATED, reason, commands, early=True)

    def _stop_order(self, trial: Trial) -> StopTrial:
        return StopTrial(trial.trial_id, trial.epoch, self.slots.node_of(trial))

    def _interrupted(self, event: m.Interrupted, _answers: Sequence[m.Answer]) -> list[Command]:
        self.interrupted = event.reason
        commands: list[Command] = []
        for trial in self.live.values():
            if trial.status == RUNNING and not trial.stop_ordered:
                commands.append(self._stop_order(trial))
                self._move(trial, PENDING)
        return commands

    # --- nodes and the wire -----------------------------------------------------------------------

    def _node_joined(self, event: m.NodeJoined, _answers: Sequence[m.Answer]) -> list[Command]:
        if event.incarnation in self.nodes:
            return []
        self.nodes[event.incarnation] = event
        self.slots.add_node(event.incarnation, event.resources)
        return []

    def _node_lost(self, event: m.NodeLost, _answers: Sequence[m.Answer]) -> list[Command]:
        if self.nodes.pop(event.incarnation, None) is None:
            return []
        self.accepted.pop(event.incarnation, None)
        commands: list[Command] = [DropNode(event.incarnation)]
        for trial_id, epoch in self.slots.lose_node(event.incarnation):
            trial = self.live[trial_id]
            if trial.status != RUNNING or trial.epoch != epoch:
                self._forget_if_over(trial)
                continue
            trial.story.append(event)
            if trial.stop_ordered:
                self._end(trial, TERMINATED, trial.ending, commands, early=True)
            else:
                self._try_again(trial)
        return commands

    def _batch_read(self, event: m.BatchRead, _answers: Sequence[m.Answer]) -> list[Command]:
        if event.incarnation in self.nodes:
            self.accepted[event.incarnation] = event.last
        self.cursor = event.cursor
        return []

    def _tick(self, event: m.Tick, _answers: Sequence[m.Answer]) -> list[Command]:
        self.elapsed = event.elapsed
        return []

    # --- small things -----------------------------------------------------------------------------

    def _move(self, trial: Trial, status: str) -> None:
        before = trial.status
        trial.move_to(status)
        self.counts[before] -= 1
        self.counts[status] += 1
        if status == PENDING:
            self._pending[trial.trial_id] = trial
        else:
            self._pending.pop(trial.trial_id, None)


_unpack_summary = msgspec.msgpack.Decoder(TrialSummary).decode
