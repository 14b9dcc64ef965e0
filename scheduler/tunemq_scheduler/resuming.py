"""Telling fresh algorithms what the journal holds: then they know what those before them did.

`Retelling` goes through the turns as the loop did: the same calls, in the same order. Nobody is
asked for anything new: what was answered stands in the journal, and counts, whatever somebody whose
answers depend on more than what he is told may say this time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping

from tunemq_scheduler.algorithms import Algorithms
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.resuming import RESTART
from tunemq_scheduler.core.review import Review
from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.core.trial import PENDING
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.trial_view import TrialView
from tunemq_shared import messages as m

#: Takes what is a fact, and its trial.
Note = Callable[[c.RecordCommand, TrialView], None]


def _ignore(_command: c.RecordCommand, _trial: TrialView) -> None:
    """Nobody wants to know."""


class Retelling:
    """Brings a runner and algorithms to where the journal ends.

    Attributes:
        trials: the views of trials that are not over, or whose hosts may not be gone yet.
        leaving: those of them that are over.

    Args:
        runner: in the state before the first turn that is told.
        algorithms: the same; fresh, or with the state that a snapshot has.
        plan: of the experiment; what trials run is of no interest here.
        note: takes all that is to be recorded, behind each turn.
    """

    def __init__(
        self,
        runner: TrialRunner,
        algorithms: Algorithms,
        plan: ExperimentPlan,
        note: Note = _ignore,
    ) -> None:
        self.trials = {
            trial.trial_id: TrialView.alive(trial, plan) for trial in runner.live.values()
        }
        self.leaving = {trial.trial_id for trial in runner.live.values() if trial.is_finished}
        self._runner, self._algorithms, self._plan = runner, algorithms, plan
        self._note = note
        algorithms.view.trials = self.trials.values

    def tell(self, turns: Iterable[Iterable[m.Entry]]) -> None:
        """Go through these turns.

        Raises:
            SearchFailed: an algorithm raised.
        """
        for turn in turns:
            records: list[c.RecordCommand] = []
            for entry in turn:
                records += self._tell(entry)
            for command in records:
                self._record(command)
            for trial in [one for one in self.leaving if one not in self._runner.live]:
                self.leaving.discard(trial)
                del self.trials[trial]
        for view in self.trials.values():
            view.follow(self._runner.live[view.trial_id])

    def _tell(self, entry: m.Entry) -> list[c.RecordCommand]:
        runner, event = self._runner, entry.event
        match event:
            case m.ConfigSuggested():
                view = self.trials[event.trial] = TrialView(event, self._plan)
                self._algorithms.taken_up(view)
            case m.ResultReported():
                self._tell_result(event, entry.answers)
            case m.TrialStarted() if runner.is_current(event.trial, event.epoch):
                self.trials[event.trial].started(event)
            case m.ExperimentResumed():
                revive(runner, event, self._algorithms, self._plan, self.trials)
            case _:
                pass
        records: list[c.RecordCommand] = []
        for command in runner.handle(event, entry.answers):
            if isinstance(command, c.RecordEnd):
                self.leaving.add(command.trial)
                self._algorithms.over(self.trials[command.trial], command)
            if isinstance(command, c.RecordCommand):
                records.append(command)
        if isinstance(event, m.TrialWaits | m.TrialPaused | m.TrialChosen):
            self._follow(event.trial)
        if isinstance(event, m.ExperimentResumed):
            self.leaving = {trial for trial in self.trials if runner.is_leaving(trial)}
        return records

    def _tell_result(self, event: m.ResultReported, answers: Iterable[m.Answer]) -> None:
        review = self._runner.review(event)
        if review is Review.STALE or review is Review.REPEATED:
            return
        view = self.trials[event.trial]
        view.newest = event
        if review is Review.DUE:
            self._algorithms.decide(view, view.full_result(event), event.step)
            self._algorithms.decided(event.trial, answers)
        if review is not Review.FINAL:
            self._algorithms.told(view, event, answers)

    def _record(self, command: c.RecordCommand) -> None:
        view = self.trials.get(command.trial)
        if view is None:
            return
        view.learn(command, self._runner.live.get(command.trial))
        self._note(command, view)

    def _follow(self, trial: str) -> None:
        live = self._runner.live.get(trial)
        if live is not None and trial in self.trials:
            self.trials[trial].follow(live)


def revive(
    runner: TrialRunner,
    event: m.ExperimentResumed,
    algorithms: Algorithms,
    plan: ExperimentPlan,
    trials: MutableMapping[str, TrialView],
) -> list[m.Answer]:
    """Have views of trials that ended in ERROR and are to go on, before the runner handles that.

    Returns:
        how far each may run unasked.
    """
    answers: list[m.Answer] = []
    for trial in runner.revived_by(event):
        view = TrialView.of(trial, runner.summary(trial), plan)
        view.status = PENDING
        if event.errored == RESTART and trial not in event.also:
            view.begin_anew()
        trials[trial] = view
        answers += algorithms.taken_up(view)
    return answers
