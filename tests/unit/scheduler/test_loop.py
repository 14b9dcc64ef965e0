"""A turn of the loop: what is asked, what is journalled first, what is carried out after it."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest

from tunemq_scheduler.algorithms import Algorithms
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.kept_checkpoints import KeepRule
from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.core.settings import RunnerSettings
from tunemq_scheduler.executors.executor import TrialExecutor
from tunemq_scheduler.loop import ExperimentLoop
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.schedulers import FIFOScheduler, TrialScheduler
from tunemq_scheduler.search import (
    WAIT,
    BasicVariantGenerator,
    SearchAlgorithm,
    SearchSetup,
    Suggestion,
)
from tunemq_scheduler.stopper import Stopper
from tunemq_scheduler.trial_view import TrialView
from tunemq_shared import messages as m
from tunemq_shared.conditions import TO_THE_END, Horizon, lookup
from tunemq_shared.errors import JournalError, ResourceError, SearchFailed, WireError
from tunemq_shared.packing import pack_config

NODE = m.NodeJoined("n.1", "n", "host", "127.0.0.1", {"cpu": 1.0})
PLAN = ExperimentPlan(
    experiment="x",
    experiment_id="0",
    events_key="",
    folder="/nowhere",
    trainable_name="train",
    code=m.BlobRef("", 0, ""),
    environment=m.Environment("", (), {}, ()),
)


class ScriptedExecutor(TrialExecutor):
    """States what the test gives it, and writes down what it is told, with the journal's length."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.facts: deque[list[m.Event]] = deque()
        self.log = log

    def poll(self, timeout: float) -> list[m.Event]:
        return self.facts.popleft() if self.facts else []

    def start_trial(self, order: c.StartTrial) -> None:
        self.log.append(("start", order.trial, order.epoch))

    def continue_training(self, order: c.ContinueTrial) -> None:
        self.log.append(("continue", order.trial))

    def stop_trial(self, order: c.StopTrial) -> None:
        self.log.append(("stop", order.trial))

    def pause_trial(self, order: c.PauseTrial) -> None:
        self.log.append(("pause", order.trial))

    def release(self, accepted: dict[str, int]) -> None:
        self.log.append(("release", dict(accepted)))


class LoggedJournal:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log
        self.entries: list[m.Entry] = []
        self.is_full = False

    def append(self, entries):
        if self.is_full:
            raise JournalError("no space")
        self.entries += entries
        self.log.append(("journal", len(entries)))

    def close(self) -> None:
        pass


class LoggedRecords:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def record(self, command, trial) -> None:
        self.log.append((type(command).__name__, command.trial))

    def trial_waits(self, trial) -> None:
        self.log.append(("waits", trial.trial_id, *trial.waits))

    def turn_began(self) -> None:
        pass

    def turn_ended(self) -> None:
        pass

    def news(self, text) -> None:
        self.log.append(("news", text))


class Loop:
    """A loop, and the log of all that it did, in order."""

    def __init__(
        self,
        *,
        search: SearchAlgorithm | None = None,
        scheduler: TrialScheduler | None = None,
        resources: dict[str, float] | None = None,
        trials: int = 2,
        **options: Any,
    ) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.now = 0.0
        search = search or BasicVariantGenerator()
        search.set_up(SearchSetup({"x": 1}, trials))
        self.executor = ScriptedExecutor(self.log)
        self.journal = LoggedJournal(self.log)
        self.runner = TrialRunner(RunnerSettings(request=resources or {"cpu": 1.0}))
        self.loop = ExperimentLoop(
            runner=self.runner,
            plan=PLAN,
            algorithms=Algorithms(search=search, scheduler=scheduler or FIFOScheduler()),
            executor=self.executor,
            journal=self.journal,
            records=LoggedRecords(self.log),
            resources_for=lambda _config: resources or {"cpu": 1.0},
            trial_prefix="t",
            clock=lambda: self.now,
            discard=lambda removal: self.log.append(("discard", removal)),
            **options,
        )

    def turn(self, *facts: m.Event) -> list[tuple[Any, ...]]:
        """One turn with these facts; returns what was done in it."""
        self.executor.facts.append(list(facts))
        before = len(self.log)
        self.loop.step()
        return self.log[before:]

    def batch(self, first: int, *events: m.NodeEvent) -> list[tuple[Any, ...]]:
        read = m.BatchRead("n.1", first, first + len(events) - 1, f"{first}-0")
        return self.turn(read, *events)


def started(trial: str = "t_00000") -> m.TrialStarted:
    return m.TrialStarted(trial, 1, 1, "host", "127.0.0.1", 0.0)


def result(step: int, trial: str = "t_00000", *, done: bool = False) -> m.ResultReported:
    return m.ResultReported(trial, 1, step, {"loss": 1.0}, 0.0, 1.0, 1.0, 1.0, step, done=done)


def recorded(log: list[tuple[Any, ...]]) -> int:
    return sum(line[0] == "RecordResult" for line in log)


@pytest.mark.parity(52, 57, 122, 139)
def test_a_turn_is_journalled_before_any_order_leaves_and_released_after_it() -> None:
    loop = Loop()
    log = loop.turn(NODE)
    assert [line[0] for line in log] == ["journal", "start", "RecordTrialAdded", "release"]


def test_when_the_journal_refuses_a_turn_nothing_of_it_is_done() -> None:
    loop = Loop()
    loop.journal.is_full = True
    with pytest.raises(JournalError):
        loop.turn(NODE)
    assert loop.log == []


@pytest.mark.parity(126)
def test_a_turn_in_which_nothing_happened_writes_nothing() -> None:
    loop = Loop()
    loop.turn(NODE)
    assert loop.turn() == []


def test_events_that_came_before_are_dropped_by_their_numbers() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    assert recorded(loop.batch(1, started(), result(1))) == 0
    assert recorded(loop.batch(2, result(1), result(2))) == 1
    assert loop.runner.accepted == {"n.1": 3}
    assert loop.runner.repeated == 0, "numbers, not steps, told them apart"


def test_a_gap_in_the_numbers_is_an_error() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    with pytest.raises(WireError, match="sent event 4, 3 is missing"):
        loop.batch(4, result(3))


def test_what_a_node_says_that_is_lost_is_not_heard() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.turn(m.NodeLost("n.1", "its lease ran out"))
    assert recorded(loop.batch(3, result(2))) == 0


def test_several_results_of_a_trial_that_ends_in_the_same_turn_are_all_recorded() -> None:
    loop = Loop()
    loop.turn(NODE)
    last = m.TrialFinished("t_00000", 1), m.HostFreed("t_00000", 1)
    log = loop.batch(1, started(), result(1), result(2), result(3, done=True), *last)
    assert recorded(log) == 3
    assert ("RecordEnd", "t_00000") in log
    assert ("start", "t_00001", 1) in log


@pytest.mark.parity(55)
def test_the_search_ends_when_the_last_host_is_gone() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1, done=True), m.TrialFinished("t_00000", 1))
    assert not loop.runner.is_finished
    loop.batch(4, m.HostFreed("t_00000", 1))
    loop.turn()
    assert loop.runner.is_finished


@pytest.mark.parity(56)
def test_a_turn_after_the_end_does_nothing() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    last = m.TrialFinished("t_00000", 1), m.HostFreed("t_00000", 1)
    loop.batch(1, started(), result(1, done=True), *last)
    loop.turn()
    assert loop.runner.is_finished
    written = len(loop.journal.entries)
    assert loop.turn() == []
    assert len(loop.journal.entries) == written


@pytest.mark.parity(58)
def test_more_than_any_node_has_is_an_error_where_no_node_may_come() -> None:
    loop = Loop(resources={"cpu": 8.0})
    loop.runner.settings = RunnerSettings(request=None)
    with pytest.raises(ResourceError, match="cpu=8, the most that any node has is 1"):
        loop.turn(NODE)


@pytest.mark.parity(61)
def test_more_than_any_node_has_waits_where_nodes_may_come() -> None:
    loop = Loop(resources={"cpu": 8.0}, nodes_may_come=True)
    loop.runner.settings = RunnerSettings(request=None)
    loop.turn(NODE)
    big = m.NodeJoined("big.1", "big", "host", "127.0.0.1", {"cpu": 8.0})
    assert ("start", "t_00000", 1) in loop.turn(big)


def test_what_a_node_warns_of_is_journalled_counted_and_told() -> None:
    loop = Loop()
    loop.turn(NODE)
    log = loop.batch(1, m.NodeWarned("numpy is not preloaded"), started())
    assert ("news", "numpy is not preloaded") in log
    assert log.index(("release", {"n.1": 2})) < log.index(("news", "numpy is not preloaded"))
    assert recorded(loop.batch(3, result(1))) == 1
    assert ("news", "numpy is not preloaded") not in loop.turn()


@pytest.mark.parity(54)
def test_the_time_budget_stops_what_runs() -> None:
    loop = Loop(time_budget_s=60.0)
    loop.turn(NODE)
    loop.now = 60.0
    assert ("stop", "t_00000") in loop.turn()
    assert loop.runner.stopping == "the time budget of 60 s is used up"


@pytest.mark.parity(73, 74)
def test_a_request_to_stop_one_trial_leaves_the_others() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.loop.request_stop("somebody said so", trial="t_00000")
    assert ("stop", "t_00000") in loop.turn()
    assert ("start", "t_00001", 1) in loop.batch(1, m.HostFreed("t_00000", 1))


def test_an_interrupted_search_ends_without_new_trials() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.loop.interrupt("SIGINT")
    assert ("stop", "t_00000") in loop.turn()
    loop.batch(1, m.HostFreed("t_00000", 1))
    assert loop.runner.is_finished
    assert not any(line[:2] == ("start", "t_00001") for line in loop.log)


@pytest.mark.parity(55)
def test_a_limit_on_trials_ends_an_endless_search() -> None:
    loop = Loop(trials=-1, max_trials=1)
    loop.turn(NODE)
    last = m.TrialFinished("t_00000", 1), m.HostFreed("t_00000", 1)
    loop.batch(1, started(), result(1, done=True), *last)
    assert loop.runner.is_finished
    assert len(loop.runner.finished) == 1


class Reluctant(BasicVariantGenerator):
    """Has a configuration only when told to."""

    is_ready = False

    def next_config(self, n: int, trial_id: str) -> Any:
        return super().next_config(n, trial_id) if self.is_ready else WAIT


@pytest.mark.parity(63)
def test_a_search_algorithm_that_waits_is_asked_again() -> None:
    search = Reluctant()
    loop = Loop(search=search)
    assert not any(line[0] == "start" for line in loop.turn(NODE))
    search.is_ready = True
    assert ("start", "t_00000", 1) in loop.turn()


@pytest.mark.parity(63)
def test_a_search_algorithm_that_waits_for_nothing_is_given_up() -> None:
    loop = Loop(search=Reluctant())
    loop.turn(NODE)
    loop.now = 599.0
    loop.turn()
    loop.now = 601.0
    with pytest.raises(SearchFailed, match="no configuration for 600 s"):
        loop.turn()


class Raising(BasicVariantGenerator):
    def next_config(self, n: int, trial_id: str) -> Suggestion:
        raise ZeroDivisionError("in my searcher")


def test_an_algorithm_that_raises_ends_the_search_with_its_traceback() -> None:
    loop = Loop(search=Raising())
    with pytest.raises(SearchFailed, match=r"(?s)ZeroDivisionError: in my searcher.*Traceback"):
        loop.turn(NODE)


class Confused(TrialScheduler):
    def on_trial_result(self, runner, trial, result):
        return "MAYBE"


@pytest.mark.parity(68)
def test_an_answer_that_is_no_decision_is_refused_by_name() -> None:
    loop = Loop(scheduler=Confused())
    loop.turn(NODE)
    with pytest.raises(SearchFailed, match=r"Confused.on_trial_result returned 'MAYBE'"):
        loop.batch(1, started(), result(1))


class Impatient(TrialScheduler):
    def choose_trial_to_run(self, runner):
        return object()


@pytest.mark.parity(62)
def test_a_trial_that_does_not_wait_cannot_be_chosen() -> None:
    loop = Loop(scheduler=Impatient())
    with pytest.raises(SearchFailed, match="not waiting for a slot"):
        loop.turn(NODE)


class Enough(Stopper):
    """Needs to see no result, and ends the search when it is told to."""

    is_enough = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.is_enough

    def horizon(self, trial_id: str) -> Horizon | None:
        return TO_THE_END


def test_a_stopper_that_looks_at_no_result_may_end_the_search_all_the_same() -> None:
    loop = Loop()
    loop.loop.algorithms.stopper = stopper = Enough()
    loop.turn(NODE)
    assert ("stop", "t_00000") not in loop.batch(1, started(), result(1))
    stopper.is_enough = True
    log = loop.turn()
    assert ("stop", "t_00000") in log
    assert loop.runner.stopping == "Enough stopped the experiment"
    assert not any(line[0] == "start" for line in log)


class ByState(FIFOScheduler):
    """Starts what is PENDING, as its trials say themselves."""

    def choose_trial_to_run(self, runner):
        return next((trial for trial in runner.waiting() if trial.status == "PENDING"), None)


def test_trials_of_a_lost_node_are_shown_as_pending_to_who_chooses_the_next() -> None:
    loop = Loop(scheduler=ByState(), trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.turn(m.NodeLost("n.1", "its lease ran out"))
    other = m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0})
    assert ("start", "t_00000", 2) in loop.turn(other)


class Curious(BasicVariantGenerator):
    """Notes all that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []

    @property
    def wants_results(self) -> bool:
        return True

    def told_result(self, trial_id, result):
        self.told.append(("result", result["training_iteration"]))

    def told_complete(self, trial_id, result, error=False, early_terminated=False):
        self.told.append(("complete", result["training_iteration"]))


class StopsAtTwo(TrialScheduler):
    def on_trial_result(self, runner, trial, result):
        return self.STOP if result["training_iteration"] == 2 else self.CONTINUE


def test_a_search_algorithm_is_told_once_of_the_result_at_which_a_trial_was_stopped() -> None:
    search = Curious()
    loop = Loop(search=search, scheduler=StopsAtTwo())
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.batch(3, result(2))
    assert search.told == [("result", 1), ("complete", 2)]


def test_not_a_number_under_a_nested_metric_is_shown_as_the_worst_value() -> None:
    shown = []

    class Looks(TrialScheduler):
        def on_trial_result(self, runner, trial, result):
            shown.append(lookup(result, "val/loss"))
            return self.CONTINUE

    search = BasicVariantGenerator()
    search.set_up(SearchSetup({}, 1))
    algorithms = Algorithms(
        search=search,
        scheduler=Looks(),
        metric="val/loss",
        mode="min",
        worst_for_nonfinite=True,
    )
    suggested = m.ConfigSuggested(0, "t", pack_config({}), "", {"cpu": 1.0})
    algorithms.decide(TrialView(suggested, PLAN), {"val": {"loss": math.nan}}, 1)
    assert shown == [math.inf]


# --- pausing --------------------------------------------------------------------------------------


class PausesAtOne(TrialScheduler):
    """Pauses each trial once, and lets it go on when told to."""

    may_go_on = True

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def on_trial_result(self, runner, trial, result):
        return self.PAUSE.because("enough") if result["training_iteration"] == 1 else self.CONTINUE

    def on_trial_remove(self, runner, trial):
        self.ends.append(("remove", trial.trial_id))

    def on_trial_complete(self, runner, trial, result):
        self.ends.append(("complete", trial.trial_id))

    def choose_trial_to_run(self, runner):
        fresh = (one for one in runner.waiting() if self.may_go_on or one.status == "PENDING")
        return next(fresh, None)


def paused_once(loop: Loop) -> list[tuple[Any, ...]]:
    """Let the first trial report, pause and free its slot; returns what was done in that turn."""
    loop.turn(NODE)
    assert ("pause", "t_00000") in loop.batch(1, started(), result(1))
    return loop.batch(3, m.TrialPaused("t_00000", 1), m.HostFreed("t_00000", 1))


@pytest.mark.parity(68, 172)
def test_a_trial_is_paused_with_a_reason_and_goes_on_in_a_new_incarnation() -> None:
    loop = Loop(scheduler=PausesAtOne(), trials=1)
    assert ("start", "t_00000", 2) in paused_once(loop)
    (decided,) = [
        answer
        for entry in loop.journal.entries
        for answer in entry.answers
        if isinstance(answer, m.Decided)
    ]
    assert decided == m.Decided("t_00000", 1, m.PAUSE, "enough")


@pytest.mark.parity(68)
def test_a_new_trial_gets_the_slot_of_one_that_is_paused() -> None:
    loop = Loop(scheduler=PausesAtOne(), trials=2)
    loop.loop.algorithms.scheduler.may_go_on = False
    assert ("start", "t_00001", 1) in paused_once(loop)
    assert loop.loop.trials["t_00000"].status == "PAUSED"


def test_a_search_whose_paused_trials_are_never_chosen_ends_and_says_so() -> None:
    loop = Loop(scheduler=PausesAtOne(), trials=1)
    loop.loop.algorithms.scheduler.may_go_on = False
    paused_once(loop)
    with pytest.raises(SearchFailed, match=r"all 1 trials .* are PAUSED, and PausesAtOne lets"):
        loop.turn()


def test_a_paused_trial_that_is_stopped_is_told_as_removed() -> None:
    scheduler = PausesAtOne()
    loop = Loop(scheduler=scheduler, trials=2)
    scheduler.may_go_on = False
    paused_once(loop)
    loop.loop.request_stop("somebody said so", trial="t_00000")
    loop.turn()
    assert scheduler.ends == [("remove", "t_00000")]


# --- the store ------------------------------------------------------------------------------------


def test_that_a_trial_waits_for_the_store_is_told_after_the_journal_has_it() -> None:
    loop = Loop()
    loop.turn(NODE)
    log = loop.batch(1, started(), m.TrialWaits("t_00000", 1, "save", "connection refused"))
    assert log[-1] == ("waits", "t_00000", "save", "connection refused")
    assert log[0][0] == "journal"
    log = loop.batch(3, m.TrialWaits("t_00000", 1, "", ""))
    assert log[-1] == ("waits", "t_00000", "", "")


@pytest.mark.parity(103)
def test_a_damaged_checkpoint_is_news_that_names_it_and_the_one_taken_instead() -> None:
    loop = Loop()
    loop.turn(NODE)
    damaged = m.CheckpointDamaged("t_00000", 1, "a/checkpoint_1-2", "one bit.", "a/checkpoint_1-1")
    log = loop.batch(1, damaged, started())
    (told,) = [line[1] for line in log if line[0] == "news"]
    assert "a/checkpoint_1-2" in told
    assert "goes on from a/checkpoint_1-1 instead" in told
    assert loop.loop.has_leftovers


def test_a_checkpoint_that_is_lost_is_news_and_its_remains_are_discarded() -> None:
    loop = Loop()
    loop.turn(NODE)
    written = m.CheckpointWritten("t_00000", 1, 1, 1, "a/checkpoint_1-1", "0" * 64, 10)
    loop.batch(1, started(), result(1), written)
    lost = m.CheckpointLost("t_00000", 1, "a/checkpoint_1-1", "the store was away.", 0.0)
    log = loop.batch(4, lost)
    (told,) = [line[1] for line in log if line[0] == "news"]
    assert "a/checkpoint_1-1" in told
    assert "the store was away" in told


def test_what_is_not_kept_is_discarded_after_the_journal_has_it() -> None:
    loop = Loop()
    loop.runner.settings = RunnerSettings(request={"cpu": 1.0}, keep=KeepRule(num_to_keep=1))
    loop.turn(NODE)
    kept = [
        m.CheckpointCommitted("t_00000", 1, n, n, f"a/checkpoint_1-{n}", "0" * 64, 10)
        for n in (1, 2)
    ]
    log = loop.batch(1, started(), result(1), kept[0], result(2), kept[1])
    discarded = [line[1] for line in log if line[0] == "discard"]
    assert discarded == [c.DeleteCheckpoint("t_00000", "a/checkpoint_1-1")]
    assert log[0][0] == "journal"
