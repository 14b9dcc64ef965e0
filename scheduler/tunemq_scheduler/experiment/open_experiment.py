"""Opening an experiment: a new one, or one that a scheduler before this one left.

Either way what comes of it is an open, locked journal, the runner in the state to which the journal
comes, and algorithms that know all that stands in it. Nothing has been decided yet: the first turn
of a further run is `ExperimentLoop.resume` with an event from `resumption`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import ERROR, TERMINATED
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.journal_replay import begin
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.journal import FILE_NAME, Journal, JournalHeader, JournalSnapshot
from tunemq_scheduler.output.log_repair import LogRepair
from tunemq_scheduler.output.unrecorded_rows import UnrecordedRows
from tunemq_scheduler.output.unsynced_files import UnsyncedFiles
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.conditions import Condition, first_that_holds

#: Makes the plan of an experiment from its journal's header.
MakePlan = Callable[[JournalHeader], ExperimentPlan]

#: Where the journal may lack the last turns of the run before, trials start with epochs that are
#: greater by so much for each run: that run may have used the next ones for checkpoints.
ATTEMPTS_BEYOND: Final = 1_000_000
#: So many turns pass before algorithms that had no state to give are asked again.
_TURNS_UNTIL_ASKED_AGAIN: Final = 100


class ResumeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of an earlier run's trials.

    Attributes:
        unfinished: trials that were not over go on; else they end where they are.
        errored: trials in ERROR: ``resume`` from their last checkpoint, ``restart``, or stay so.
        also: further trials that go on, although they are in ERROR.
        stopped_by: the criteria of the run before, where they are others now: who ended only for
            them goes on.
        stops_now: the criteria of this run, where they changed; trials that meet them stay ended.
    """

    unfinished: bool = True
    errored: Literal["", "resume", "restart"] = ""
    also: tuple[str, ...] = ()
    stopped_by: tuple[Condition, ...] | None = None
    stops_now: tuple[Condition, ...] = ()


@dataclass
class OpenExperiment:
    """An experiment that is open.

    Attributes:
        journal: where its turns go; closed with the loop.
        driver: its state, its algorithms, and its plan, in which what trials run may be missing.
        unsynced: the files of trials that have to be on the disk before a snapshot.
        was_exhausted: whether the run before came to the end of its search.
        unrecorded: compares trials' files with the journal; None for a new experiment.
    """

    journal: Journal
    driver: EventDriver
    cut: int = 0
    was_exhausted: bool = False
    unsynced: UnsyncedFiles = field(default_factory=UnsyncedFiles)
    unrecorded: UnrecordedRows | None = None

    def __post_init__(self) -> None:
        """Start the clock; it goes on from where the run before was."""
        self.runner, self.plan = self.driver.runner, self.driver.plan
        self._before = self.runner.elapsed
        self._began = time.monotonic()
        self._asked_again = 0

    def elapsed(self) -> float:
        """Seconds for which a scheduler ran this experiment, earlier runs included."""
        return self._before + time.monotonic() - self._began

    def take_snapshot(self) -> None:
        """Shorten the journal where it is due and nothing would be lost; once a turn.

        Raises:
            StoreError: the trials' files cannot be brought to the disk.
            JournalError: the disk refuses the snapshot.
        """
        if not self.journal.wants_snapshot or self.journal.turn < self._asked_again:
            return
        if self.unsynced.is_held:
            return
        # Asked first, for many files are brought to the disk in vain where nobody has a state.
        states = None if self.unsynced.is_settling else self.driver.algorithms.get_state()
        if states is None and not self.unsynced.is_settling:
            self._asked_again = self.journal.turn + _TURNS_UNTIL_ASKED_AGAIN
            self.unsynced.forget()
            return
        if not self.unsynced.settle():
            return
        states = states or self.driver.algorithms.get_state()
        if states is None:
            return
        runner = self.runner
        taken = JournalSnapshot(state=dump(runner), algorithms=states)
        if self.journal.snapshot(taken, runner.changed_summaries()):
            runner.forget_changes()


def open_new(
    folder: Path, header: JournalHeader, prepared: PreparedSearch, plan: ExperimentPlan
) -> OpenExperiment:
    """Begin an experiment in its own folder.

    Raises:
        JournalError: it cannot be written, or there is one.
    """
    journal = Journal.create(folder / FILE_NAME, header)
    driver = EventDriver(TrialRunner(header.settings), prepared.algorithms(), plan)
    return OpenExperiment(journal, driver)


def take_up(
    folder: Path,
    prepared: PreparedSearch,
    make_plan: MakePlan,
    when_locked: Callable[[], None] = lambda: None,
) -> OpenExperiment:
    """Go on with an experiment: its algorithms are told what happened, its files made good.

    Args:
        prepared: fresh; nothing was asked of its algorithms.
        when_locked: called when nobody else can have it open any more.

    Raises:
        JournalLocked: another process has it open.
        JournalError: it cannot be read or written.
        SearchFailed: an algorithm raised at what it was told.
        StoreError: the trials' files cannot be made good.
    """
    journal, found = Journal.resume(folder / FILE_NAME)
    try:
        when_locked()
        plan = make_plan(found.header)
        algorithms = prepared.algorithms()
        if found.snapshot is not None:
            algorithms.set_state(found.snapshot.algorithms)
        runner = begin(found)
        log_repair = LogRepair(runner)
        driver = EventDriver(runner, algorithms, plan)
        driver.replay(found.turns, log_repair.note)
        log_repair.finish()
        unrecorded = UnrecordedRows(runner, plan, log_repair.unsynced, log_repair.rebuild)
        unrecorded.remove()
    except BaseException:
        journal.close()
        raise
    return OpenExperiment(
        journal,
        driver,
        cut=found.cut,
        was_exhausted=runner.exhausted,
        unsynced=log_repair.unsynced,
        unrecorded=unrecorded,
    )


def resumption(
    opened: OpenExperiment,
    options: ResumeOptions,
    settings: RunnerSettings,
    *,
    is_cold: bool = True,
) -> m.ExperimentResumed:
    """The event with which a further run begins.

    Args:
        settings: the rules of this run; which checkpoints are kept, and what trials begin from,
            stays as it was.

    Raises:
        StoreError: the files of trials that ended, and continue, cannot be made good.
    """
    runner, unrecorded = opened.runner, opened.unrecorded
    before = runner.settings
    settings = msgspec.structs.replace(settings, keep=before.keep, restore=before.restore)
    run = runner.run + 1
    also = (*_may_go_further(opened, options), *_tried_again(opened, options.also))
    if unrecorded is not None:
        unrecorded.remove_from(also)
    turns_were_lost = unrecorded is not None and unrecorded.turns_were_lost
    return m.ExperimentResumed(
        run=run,
        at=time.time(),
        unfinished=options.unfinished,
        errored=options.errored,
        is_cold=is_cold,
        settings=b"" if settings == before else m.encode(settings),
        also=also,
        attempts_from=run * ATTEMPTS_BEYOND if turns_were_lost else 0,
    )


def has_work(opened: OpenExperiment, event: m.ExperimentResumed, prepared: PreparedSearch) -> bool:
    """Whether anything would run after this event; where not, nothing need be started."""
    runner, tune = opened.runner, prepared.tune
    if event.also or (event.errored and runner.errored()):
        return True
    # Whoever is over and still there waits for a host to go, or for a checkpoint to be kept.
    if any(event.unfinished or trial.is_finished for trial in runner.live.values()):
        return True
    total = prepared.trials
    if total is not None and runner.suggested >= total:
        return False
    if tune.budget_s is not None and opened.elapsed() >= tune.budget_s:
        return False
    # An algorithm without a number of trials said by itself that it had no more.
    is_over = opened.was_exhausted and total is None
    return not is_over and not opened.driver.algorithms.enough()


def _tried_again(opened: OpenExperiment, trials: tuple[str, ...]) -> tuple[str, ...]:
    """Those that are in ERROR; the run before may have tried the others again already."""
    errored = opened.runner.errored() if trials else ()
    return tuple(trial for trial in trials if trial in errored)


def _may_go_further(opened: OpenExperiment, options: ResumeOptions) -> tuple[str, ...]:
    """The trials that ended by the criteria of the run before and do not meet this run's."""
    if not options.stopped_by:
        return ()
    runner, found = opened.runner, []
    for trial in (*runner.finished, *runner.live):  # whose hosts may not have been gone yet
        summary = runner.summary(trial)
        last = summary.last_result
        if last is None or summary.status == ERROR:
            continue
        if summary.status != TERMINATED and not last.done:
            continue
        result = TrialView(trial, summary, opened.plan).full_result(last)
        if first_that_holds(options.stopped_by, result) is None:
            continue
        if first_that_holds(options.stops_now, result) is None:
            found.append((summary.number, trial))
    return tuple(trial for _, trial in sorted(found))
