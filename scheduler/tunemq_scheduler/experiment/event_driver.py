"""`EventDriver`: passes each event to the runner and the algorithms, in a fixed order.

While an experiment runs, it asks the algorithms and journals their answers with the event. After a
restart it replays the journal's events to fresh algorithms by the same calls in the same order,
which restores their state. The journalled answers count, even if an algorithm with hidden inputs
answers differently this time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.handlers.experiment_resumed import begins_anew
from tunemq_scheduler.core.handlers.inherited_states import state_of_source
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import PENDING, ResultReview, TrialSummary
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_shared.base.errors import TuneError
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import CONFIG_BYTES, check_size

#: The actions that change a trial's configuration or resources.
CHANGES: Final = frozenset((m.EXPLOIT, m.SET_CONFIG, m.SET_RESOURCES))
#: Called with a journalled notification and its trial.
Note = Callable[[c.NotifyCommand, TrialView], None]
#: The journalled answers to an event; None asks the algorithms.
Answers = Sequence[m.AlgorithmAnswer] | None


class EventDriver:
    """Takes a runner and algorithms from event to event.

    Attributes:
        trials: the views of trials that have not ended, or whose processes may not be gone yet.
        journal_records: this turn's events with the answers to them.
        commands: the runner's commands of this turn.

    Args:
        runner: the state; only this class passes events to it.
        algorithms: the algorithms; fresh, or restored from a snapshot.
        plan: the experiment's plan; this class does not use the trainable.
    """

    def __init__(
        self, runner: TrialRunner, algorithms: AlgorithmDriver, plan: ExperimentPlan
    ) -> None:
        self.runner, self.algorithms, self.plan = runner, algorithms, plan
        self.trials = {name: TrialView(name, one, plan) for name, one in runner.live.items()}
        self.journal_records: list[m.JournalRecord] = []
        self.commands: list[c.Command] = []
        #: Ended trials whose processes may not be gone yet.
        self._leaving = set(filter(runner.is_leaving, self.trials))
        #: The calls before the runner handles an event; each returns the answers to it.
        self._tells: dict[type, Callable[[Any, Answers], Sequence[m.AlgorithmAnswer]]] = {
            m.ConfigSuggested: self._added,
            m.ExperimentResumed: self._resumed,
            m.ResultReported: self._result,
            m.TrialStarted: self._started,
            m.ActionTaken: self._acted,
            m.SearchExhausted: self._exhausted,
            m.SearchStalled: self._stalled,
        }
        algorithms.view.trials = self.trials
        algorithms.view.is_any_unplaced = runner.has_unplaced_trial
        algorithms.view.may_add = runner.may_add_trial
        algorithms.view.placement = runner.placement

    def handle(self, event: m.Event, journalled: Answers = None) -> None:
        """Pass an event to the algorithms and the runner.

        Args:
            event: the event.
            journalled: the answers that count; None asks the algorithms.

        Raises:
            SearchFailed: an algorithm raised. If the event was handled, so are the other
                algorithms' answers to it, because a replay asks for none again.
        """
        tell = self._tells.get(type(event))
        answers = tell(event, journalled) if tell is not None else ()
        if journalled is not None:
            answers = journalled
        self.journal_records.append(m.JournalRecord(event, tuple(answers)))
        raised: list[TuneError] = []
        is_replayed = journalled is not None
        for command in self.runner.handle(event, answers):
            self.commands.append(command)
            if isinstance(command, c.NotifyTrialEnd):
                self._leaving.add(command.trial)
                try:
                    self.algorithms.ended(self.trials[command.trial], command)
                except TuneError as error:
                    raised.append(error)
            elif isinstance(command, c.WarnStateLost) and command.has_none and not is_replayed:
                action = m.ActionTaken(command.trial, m.EXPLOIT, "", command.source)
                raised.append(self.algorithms.refuse(action, _no_checkpoint(command.source)))
            elif isinstance(command, c.NotifyTrialAdded | c.NotifyTrialRevived):
                self._leaving.discard(command.trial)
                self.trials[command.trial].state = self.runner.live[command.trial]
        actions = self.algorithms.take_actions()
        if journalled is None:  # otherwise the journal has those that were taken
            for action in actions:
                try:
                    self._act(action)
                except TuneError as error:
                    raised.append(error)
        if raised:
            raise raised[0]

    def end_turn(self, note: Note = lambda _command, _trial: None) -> None:
        """Pass the turn's notifications to ``note``, and forget trials whose processes are gone."""
        for command in self.commands:
            if isinstance(command, c.NotifyCommand) and command.trial in self.trials:
                view = self.trials[command.trial]
                view.apply(command)
                note(command, view)
        for trial in [one for one in self._leaving if one not in self.runner.live]:
            self._leaving.discard(trial)
            del self.trials[trial]
        self.journal_records, self.commands = [], []

    def replay(
        self,
        turns: Iterable[Iterable[m.JournalRecord]],
        note: Note = lambda _command, _trial: None,
        after_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Replay the turns of a journal.

        Raises:
            SearchFailed: an algorithm raised.
        """
        for turn in turns:
            for entry in turn:
                self.handle(entry.event, entry.answers)
            self.end_turn(note)
            after_turn()

    def _act(self, action: m.ActionTaken) -> None:
        """Take a trial scheduler's action, unless its trial has ended."""
        runner = self.runner
        trial = runner.live.get(action.trial)
        for name in (action.trial, action.source):
            if name and name not in runner.live and name not in runner.finished:
                raise self.algorithms.refuse(action, f"this search has no trial {name!r}.")
        if action.action == m.EXPLOIT and not self._has_state(action):
            return
        check_size(action.trial, len(action.config), CONFIG_BYTES)
        is_final = action.resources and not runner.settings.nodes_may_come
        if is_final and (why := runner.placement.why_never(action.resources)):
            raise self.algorithms.refuse(action, f"{why}.")
        if trial is not None and not trial.is_finished:
            self.handle(action)

    def _has_state(self, action: m.ActionTaken) -> bool:
        """Whether the source of an EXPLOIT has a state; one that began again may have none yet.

        Raises:
            SearchFailed: it has never saved a checkpoint, or lacks the one that is named.
        """
        try:
            state = state_of_source(self.runner, action)
        except KeyError:
            told = f"trial {action.source} has no checkpoint {action.checkpoint!r} any more."
            raise self.algorithms.refuse(action, told) from None
        source = self.runner.live.get(action.source)
        if not state.step and (source is None or not source.lineage):
            raise self.algorithms.refuse(action, _no_checkpoint(action.source))
        return state.step > 0

    def _acted(self, event: m.ActionTaken, _journalled: Answers) -> Sequence[m.AlgorithmAnswer]:
        self.algorithms.acted(event)
        trial = self.runner.live.get(event.trial)
        is_over = trial is None or trial.is_finished or bool(trial.ending)
        if event.action in CHANGES and not is_over:
            self.trials[event.trial].changed(event)
            if event.action == m.EXPLOIT:
                step = state_of_source(self.runner, event).step
                return self.algorithms.exploits(self.trials[event.trial], step)
        return ()

    def _exhausted(
        self, _event: m.SearchExhausted, _journalled: Answers
    ) -> Sequence[m.AlgorithmAnswer]:
        self.algorithms.exhausted()
        return ()

    def _stalled(
        self, _event: m.SearchStalled, _journalled: Answers
    ) -> Sequence[m.AlgorithmAnswer]:
        self.algorithms.stalled()
        return ()

    def _started(self, event: m.TrialStarted, _journalled: Answers) -> Sequence[m.AlgorithmAnswer]:
        if self.runner.is_current(event.trial, event.attempt):
            self.trials[event.trial].started(event)
        return ()

    def _result(self, event: m.ResultReported, journalled: Answers) -> Sequence[m.AlgorithmAnswer]:
        review = self.runner.review(event)
        if review is ResultReview.STALE or review is ResultReview.REPEATED:
            return ()
        view, answers = self.trials[event.trial], journalled or ()
        view.newest = event
        if review is ResultReview.DUE:
            asked = self.algorithms.decide(view, view.full_result(event), event.step)
            if journalled is None:
                answers = asked
            else:
                self.algorithms.decided(event.trial, journalled)
        elif review is ResultReview.BEFORE_HORIZON and self.algorithms.observes:
            self.algorithms.observe(view, view.full_result(event))
        if review is not ResultReview.FINAL:
            self.algorithms.told(view, event, answers)
        return answers

    def _added(self, event: m.ConfigSuggested, journalled: Answers) -> Sequence[m.AlgorithmAnswer]:
        summary = TrialSummary(event.n, event.config, event.tag, event.resources)
        view = self.trials[event.trial] = TrialView(event.trial, summary, self.plan)
        if journalled is None:
            return self.algorithms.added(view)
        return self.algorithms.taken_up(view, is_continued=False)

    def _resumed(
        self, event: m.ExperimentResumed, _journalled: Answers
    ) -> Sequence[m.AlgorithmAnswer]:
        """Announce trials that run again to the algorithms; return their horizons."""
        answers: list[m.AlgorithmAnswer] = []
        for trial in self.runner.revived_by(event):
            summary = msgspec.structs.replace(self.runner.summary(trial), status=PENDING)
            is_anew = begins_anew(event, trial)
            if is_anew:
                summary = msgspec.structs.replace(
                    summary,
                    lineage=summary.lineage + 1,
                    started=None,
                    last_result=None,
                    checkpoints=(),
                    ranks=(),
                    inherited=None,
                )
            view = self.trials[trial] = TrialView(trial, summary, self.plan)
            if is_anew:
                self.algorithms.restarted(view)
            answers += self.algorithms.taken_up(view, is_continued=True)
        return answers


def _no_checkpoint(source: str) -> str:
    return (
        f"trial {source} has saved no checkpoint from which it could continue. Let the function "
        "report one, report(metrics, checkpoint=...), or set "
        "CheckpointConfig(checkpoint_frequency=...) for a class, so that each trial has saved one "
        "before such a decision."
    )
