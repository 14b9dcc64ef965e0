"""Opens an experiment: a new one, or one that an earlier scheduler left.

Both ways result in an open, locked journal, the runner in the state at the journal's end, and
algorithms that know its contents. Nothing has been decided yet: the first turn of a further run is
`ExperimentLoop.resume` with an event from `resumption`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.handlers.experiment_resumed import begins_anew
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import ERROR, TERMINATED
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_headers import JournalHeader, JournalSnapshot
from tunemq_scheduler.journal.journal_replay import begin
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.output.pending_fsyncs import UnsyncedFiles
from tunemq_scheduler.output.result_repair import ResultRepair
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.settings.saved_tuner import save_tuner
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition, first_that_holds

#: Makes the plan of an experiment from its journal's header.
MakePlan = Callable[[JournalHeader], ExperimentPlan]
#: Saves the experiment's Tuner for the run of this number.
KeepTuner = Callable[[int], None]

#: The increase of attempt numbers for each run if the journal may lack the last turns of the
#: previous run, which may have used the next numbers for checkpoints.
ATTEMPTS_BEYOND: Final = 1_000_000
#: The number of turns until algorithms that returned no state are asked again.
_TURNS_UNTIL_ASKED_AGAIN: Final = 100


class StopCriteria(msgspec.Struct, frozen=True, kw_only=True):
    """The stop criteria of an experiment's runs so far, and of the next one.

    Attributes:
        saved: those of the Tuner saved in its folder.
        saved_for: the run that this Tuner was saved for, which may not have begun.
        earlier: those of the runs before that.
        now: those of the next run; trials that meet them stay ended.
    """

    saved: tuple[Condition, ...]
    saved_for: int = 0
    earlier: tuple[Condition, ...] = ()
    now: tuple[Condition, ...] = ()

    def of(self, run: int) -> tuple[Condition, ...]:
        """Return those of a run that has begun."""
        return self.saved if run >= self.saved_for else self.earlier


class ResumeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to treat the trials of an earlier run.

    Attributes:
        unfinished: resume unfinished trials; otherwise they end in their current state.
        errored: trials in ERROR ``resume`` from their last checkpoint, ``restart``, or stay
            (empty).
        also: further trials in ERROR that resume.
        stops: if known, the stop criteria: trials that only those of the previous run ended resume.
    """

    unfinished: bool = True
    errored: Literal["", "resume", "restart"] = ""
    also: tuple[str, ...] = ()
    stops: StopCriteria | None = None

    def stopped_by(self, run: int) -> tuple[Condition, ...]:
        """Return the stop criteria of a run that has begun, if known."""
        return () if self.stops is None else self.stops.of(run)


def keeper_of(
    folder: str, kept: dict[str, Any], prepared: PreparedSearch, options: ResumeOptions | None
) -> KeepTuner:
    """Return a function that saves a search's Tuner in its folder for the run that begins.

    Args:
        folder: the experiment's folder.
        kept: the parts of the Tuner, as `pickle_tuner` returned them.
        prepared: the search.
        options: how it resumes; None if it is new.
    """

    def keep(run: int) -> None:
        save_tuner(
            folder,
            kept,
            name=prepared.trainable_name,
            seed=prepared.seed,
            run=run,
            stop=prepared.stop,
            stopped_by=() if options is None else options.stopped_by(run - 1),
        )

    return keep


@dataclass
class OpenExperiment:
    """An open experiment.

    Attributes:
        journal: stores its turns; the loop closes it.
        driver: its state, its algorithms, and its plan, which may lack the trainable.
        cut: the number of bytes of an incomplete turn that were cut off the journal's end.
        unsynced: the trials' files that must be on disk before a snapshot.
        was_exhausted: whether the search of the previous run was exhausted.
        repair: repairs trials' files; None for a new experiment.
    """

    journal: Journal
    driver: EventDriver
    cut: int = 0
    was_exhausted: bool = False
    unsynced: UnsyncedFiles = field(default_factory=UnsyncedFiles)
    repair: ResultRepair | None = None

    def __post_init__(self) -> None:
        """Start the clock at the elapsed time of the previous run."""
        self.runner, self.plan = self.driver.runner, self.driver.plan
        self._before = self.runner.elapsed
        self._began = time.monotonic()
        self._asked_again = 0

    def elapsed(self) -> float:
        """Return the seconds for which a scheduler ran this experiment, earlier runs included."""
        return self._before + time.monotonic() - self._began

    def take_snapshot(self) -> bool:
        """Write a snapshot, which shortens the journal, if it is due and would lose nothing.

        Called once a turn; returns whether it wrote one.

        Raises:
            StoreError: the trials' files cannot be synced to disk.
            JournalError: the snapshot cannot be written.
        """
        if not self.journal.wants_snapshot or self.journal.turn < self._asked_again:
            return False
        if self.unsynced.is_held:
            return False
        # First, because syncing many files would be wasted if an algorithm has no state.
        states = None if self.unsynced.is_settling else self.driver.algorithms.get_state()
        if states is None and not self.unsynced.is_settling:
            self._asked_again = self.journal.turn + _TURNS_UNTIL_ASKED_AGAIN
            self.unsynced.forget()
            return False
        if not self.unsynced.settle():
            return False
        states = states or self.driver.algorithms.get_state()
        if states is None:
            return False
        runner = self.runner
        taken = JournalSnapshot(state=dump(runner), algorithms=states)
        is_taken = self.journal.snapshot(taken, runner.changed_summaries())
        if is_taken:
            runner.forget_changes()
        return is_taken


def open_new(
    folder: Path, header: JournalHeader, prepared: PreparedSearch, plan: ExperimentPlan
) -> OpenExperiment:
    """Create an experiment in its own folder.

    Raises:
        JournalError: it cannot be written, or already exists.
    """
    journal = Journal.create(folder / FILE_NAME, header)
    driver = EventDriver(TrialRunner(header.settings), prepared.algorithms(), plan)
    return OpenExperiment(journal, driver)


def take_up(
    folder: Path,
    prepared: PreparedSearch,
    make_plan: MakePlan,
    keep: KeepTuner = lambda _: None,
    *,
    after_turn: Callable[[], None] = lambda: None,
) -> OpenExperiment:
    """Open an existing experiment: replay its journal to the algorithms and repair its files.

    Args:
        folder: the experiment's folder.
        prepared: the checked input, with algorithms that were not used yet.
        make_plan: makes the plan from the journal's header.
        keep: saves the Tuner; the journal is locked, and its state was recovered.
        after_turn: called after each replayed turn.

    Raises:
        JournalLocked: another process has it open.
        JournalError: it cannot be read or written.
        SearchFailed: an algorithm raised during replay.
        StoreError: the trials' files cannot be repaired.
    """
    journal, found = Journal.resume(folder / FILE_NAME)
    try:
        plan = make_plan(found.header)
        algorithms = prepared.algorithms()
        if found.snapshot is not None:
            algorithms.set_state(found.snapshot.algorithms)
        runner = begin(found)
        repair = ResultRepair(runner, plan)
        driver = EventDriver(runner, algorithms, plan)
        driver.replay(found.turns, repair.note, after_turn)
        repair.finish()
        keep(runner.run + 1)
    except BaseException:  # passed on to the script or the supervisor, which report it
        journal.close()
        raise
    return OpenExperiment(
        journal,
        driver,
        cut=found.cut,
        was_exhausted=runner.exhausted,
        unsynced=repair.unsynced,
        repair=repair,
    )


def resumption(
    opened: OpenExperiment,
    options: ResumeOptions,
    settings: RunnerSettings,
    *,
    is_cold: bool = True,
) -> m.ExperimentResumed:
    """Make the event with which a further run begins.

    Args:
        opened: the experiment.
        options: how to treat the trials of earlier runs.
        settings: the rules of this run; the retention policy and the checkpoints from which trials
            begin stay unchanged.
        is_cold: whether nothing is left of the previous run's nodes.

    Raises:
        StoreError: the files of ended trials that resume cannot be repaired.
    """
    runner, repair = opened.runner, opened.repair
    before = runner.settings
    settings = msgspec.structs.replace(settings, keep=before.keep, restore=before.restore)
    run = runner.run + 1
    also = (*_may_go_further(opened, options), *_tried_again(opened, options.also))
    if repair is not None:
        repair.follow(also)
    turns_were_lost = repair is not None and repair.turns_were_lost
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
    """Whether anything would run after this event; if not, there is nothing to start.

    Raises:
        ConfigError: trials in ERROR are to run again, and the whole search would stop at once, so
            that they would end without an error.
    """
    runner = opened.runner
    revived = runner.revived_by(event)
    again = [trial for trial in revived if runner.summary(trial).status == ERROR]
    restarted = [trial for trial in again if begins_anew(event, trial)]
    if again and (why := _enough(opened, prepared, restarted)):
        raise ConfigError(
            f"{len(again)} of the trials in ERROR cannot run again, because {why}. Nothing was "
            "changed. Allow more: Tuner.restore(..., tune_config=, run_config=)."
        )
    if event.also or again:
        return True
    # An ended trial that is still live waits for its process to end or a checkpoint to be saved.
    if any(event.unfinished or trial.is_finished for trial in runner.live.values()):
        return True
    total = prepared.trials
    if total is not None and runner.suggested >= total:
        return False
    # An algorithm without a fixed number of trials reported the end itself.
    is_over = opened.was_exhausted and total is None
    return not is_over and not _enough(opened, prepared)


def _enough(opened: OpenExperiment, prepared: PreparedSearch, restarted: Sequence[str] = ()) -> str:
    """Why the whole search would stop at once; empty if it would not."""
    budget_s = prepared.tune.budget_s
    if budget_s is not None and opened.elapsed() >= budget_s:
        return f"the search has used up its time budget (time_budget_s={budget_s:g})"
    why = opened.driver.algorithms.enough(restarted)
    return f"the search has reached its stop criterion ({why})" if why else ""


def _tried_again(opened: OpenExperiment, trials: tuple[str, ...]) -> tuple[str, ...]:
    """Return those in ERROR; the previous run may have retried the others already."""
    errored = opened.runner.errored() if trials else ()
    return tuple(trial for trial in trials if trial in errored)


def _may_go_further(opened: OpenExperiment, options: ResumeOptions) -> tuple[str, ...]:
    """Return the trials that only the previous run's stop criteria ended."""
    runner, found = opened.runner, []
    stopped_by = options.stopped_by(runner.run)
    if options.stops is None or not stopped_by or stopped_by == options.stops.now:
        return ()
    for trial in (*runner.finished, *runner.live):  # live ones: their processes may still exist
        summary = runner.summary(trial)
        last = summary.last_result
        if last is None or summary.status == ERROR:
            continue
        if summary.status != TERMINATED and not last.done:
            continue
        result = TrialView(trial, summary, opened.plan).full_result(last)
        if first_that_holds(stopped_by, result) is None:
            continue
        if first_that_holds(options.stops.now, result) is None:
            found.append((summary.number, trial))
    return tuple(trial for _, trial in sorted(found))
