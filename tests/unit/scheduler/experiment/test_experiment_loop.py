"""A turn of the loop: calls of the algorithms, then the journal, then the commands."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.unit.scheduler.scripted_loop import (
    NODE,
    PLAN,
    Loop,
    recorded,
    result,
    started,
)
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trials.trial import TrialSummary
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.schedulers import FIFOScheduler, Stop, TrialScheduler
from tunemq_scheduler.search import BasicVariantGenerator, SearchGenerator
from tunemq_scheduler.stopping.stopper import Stopper
from tunemq_shared.base.errors import JournalError, ResourceError, SearchFailed, TransportError
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import TO_THE_END, Condition, Horizon, lookup


@pytest.mark.parity(52, 57, 122, 139)
def test_loop_journals_a_turn_before_it_sends_orders_and_releases_it_after() -> None:
    loop = Loop()
    log = loop.turn(NODE)
    assert [line[0] for line in log] == ["journal", "start", "NotifyTrialAdded", "acknowledge"]


def test_loop_whose_journal_rejects_a_turn_sends_nothing_of_it() -> None:
    loop = Loop()
    loop.journal.is_full = True
    with pytest.raises(JournalError):
        loop.turn(NODE)
    assert loop.log == []
    assert not loop.loop.is_all_journalled


@pytest.mark.parity(126)
def test_loop_writes_nothing_in_an_idle_turn() -> None:
    loop = Loop()
    loop.turn(NODE)
    assert loop.turn() == []
    assert loop.loop.is_all_journalled


def test_loop_drops_repeated_events_by_their_numbers() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    assert recorded(loop.batch(1, started(), result(1))) == 0
    assert recorded(loop.batch(2, result(1), result(2))) == 1
    assert loop.runner.acknowledged == {"n.1": 3}
    assert loop.runner.repeated == 0, "the loop compares event numbers, not steps"


def test_loop_with_a_gap_in_the_event_numbers_fails() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    with pytest.raises(TransportError, match="sent event 4, 3 is missing"):
        loop.batch(4, result(3))


def test_loop_ignores_events_of_a_lost_node() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.turn(m.NodeLost("n.1", "its lease ran out"))
    assert recorded(loop.batch(3, result(2))) == 0


def test_loop_records_all_results_of_a_trial_that_ends_in_the_same_turn() -> None:
    loop = Loop()
    loop.turn(NODE)
    last = m.TrialFinished("t_00000", 1), m.SlotFreed("t_00000", 1)
    log = loop.batch(1, started(), result(1), result(2), result(3, done=True), *last)
    assert recorded(log) == 3
    assert ("NotifyTrialEnd", "t_00000") in log
    assert ("start", "t_00001", 1) in log


@pytest.mark.parity(55)
def test_search_ends_when_the_last_trial_process_is_gone() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1, done=True), m.TrialFinished("t_00000", 1))
    assert not loop.runner.is_finished
    loop.batch(4, m.SlotFreed("t_00000", 1))
    loop.turn()
    assert loop.runner.is_finished


@pytest.mark.parity(56)
def test_loop_does_nothing_in_a_turn_after_the_end() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    last = m.TrialFinished("t_00000", 1), m.SlotFreed("t_00000", 1)
    loop.batch(1, started(), result(1, done=True), *last)
    loop.turn()
    assert loop.runner.is_finished
    written = len(loop.journal.journal_records)
    assert loop.turn() == []
    assert len(loop.journal.journal_records) == written


@pytest.mark.parity(58)
def test_request_above_any_node_is_an_error_where_no_node_may_come() -> None:
    loop = Loop(resources={"cpu": 8.0})
    loop.runner.settings = RunnerSettings(request=None)
    with pytest.raises(ResourceError, match="cpu=8; the most on any node is 1"):
        loop.turn(NODE)


@pytest.mark.parity(61)
def test_request_above_any_node_waits_where_nodes_may_come() -> None:
    loop = Loop(resources={"cpu": 8.0}, nodes_may_come=True)
    loop.runner.settings = RunnerSettings(request=None)
    loop.turn(NODE)
    big = m.NodeJoined("big.1", "big", "host", "127.0.0.1", {"cpu": 8.0})
    assert ("start", "t_00000", 1) in loop.turn(big)


def test_node_warning_is_journalled_counted_and_reported() -> None:
    loop = Loop()
    loop.turn(NODE)
    log = loop.batch(1, m.NodeWarned("numpy is not preloaded"), started())
    assert ("notices", "numpy is not preloaded") in log
    assert log.index(("acknowledge", {"n.1": 2})) < log.index(("notices", "numpy is not preloaded"))
    assert recorded(loop.batch(3, result(1))) == 1
    assert ("notices", "numpy is not preloaded") not in loop.turn()


def test_checkpoints_lost_with_their_node_are_named() -> None:
    loop = Loop()
    loop.turn(NODE)
    key = "train_t_00000/checkpoint_1-000001"
    written = m.CheckpointWritten("t_00000", 1, 1, 1, key, "h", 10)
    loop.batch(1, started(), result(1), written)
    log = loop.turn(m.NodeLost("n.1", "its lease ran out"))
    (told,) = [text for kind, *text in log if kind == "notices"]
    assert "1 checkpoint was not in the store yet" in told[0]
    assert key in told[0]
    assert "its lease ran out" in told[0]


def test_node_warning_of_leftovers_has_the_store_searched() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.batch(1, m.NodeWarned("numpy is not preloaded"))
    assert not loop.loop.has_leftovers
    loop.batch(2, m.NodeWarned("the transfers process died", has_leftovers=True))
    loop.batch(3, m.NodeWarned("scipy is not preloaded"))
    assert loop.loop.has_leftovers


@pytest.mark.parity(54)
def test_time_budget_stops_running_trials() -> None:
    loop = Loop(time_budget_s=60.0)
    loop.turn(NODE)
    loop.now = 60.0
    assert ("stop", "t_00000") in loop.turn()
    assert loop.runner.stopping == "the time budget of 60 s is used up"


@pytest.mark.parity(73, 74)
def test_stop_request_for_one_trial_leaves_the_others() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.loop.request_stop("a user asked for it", trial="t_00000")
    assert ("stop", "t_00000") in loop.turn()
    assert ("start", "t_00001", 1) in loop.batch(1, m.SlotFreed("t_00000", 1))


def test_interrupted_search_ends_without_new_trials() -> None:
    loop = Loop()
    loop.turn(NODE)
    loop.loop.interrupt("SIGINT")
    assert ("stop", "t_00000") in loop.turn()
    loop.batch(1, m.SlotFreed("t_00000", 1))
    assert loop.runner.is_finished
    assert not any(line[:2] == ("start", "t_00001") for line in loop.log)


@pytest.mark.parity(55)
def test_limit_on_trials_ends_an_endless_search() -> None:
    loop = Loop(trials=-1, max_trials=1)
    loop.turn(NODE)
    last = m.TrialFinished("t_00000", 1), m.SlotFreed("t_00000", 1)
    loop.batch(1, started(), result(1, done=True), *last)
    assert loop.runner.is_finished
    assert len(loop.runner.finished) == 1


class Reluctant(BasicVariantGenerator):
    """Suggests a configuration only on request."""

    is_ready = False

    def suggest(self, trial_id: str) -> Any:
        return super().suggest(trial_id) if self.is_ready else None


@pytest.mark.parity(63)
def test_search_algorithm_that_waits_is_asked_again() -> None:
    search = Reluctant()
    loop = Loop(search=search)
    assert not any(line[0] == "start" for line in loop.turn(NODE))
    search.is_ready = True
    assert ("start", "t_00000", 1) in loop.turn()


@pytest.mark.parity(63)
def test_search_algorithm_that_waits_for_nothing_ends_the_search() -> None:
    loop = Loop(search=Reluctant())
    loop.turn(NODE)
    loop.now = 59.0
    loop.turn()
    loop.now = 61.0
    with pytest.raises(SearchFailed, match="Reluctant suggested no configuration for 60 s"):
        loop.turn()


class Raising(BasicVariantGenerator):
    def suggest(self, trial_id: str) -> Any:
        raise ZeroDivisionError("in my searcher")


def test_search_algorithm_that_raises_ends_the_search_with_its_traceback() -> None:
    loop = Loop(search=Raising())
    with pytest.raises(SearchFailed, match=r"(?s)ZeroDivisionError: in my searcher.*Traceback"):
        loop.turn(NODE)


class Confused(TrialScheduler):
    def on_trial_result(self, runner, trial, result):
        return "MAYBE"


@pytest.mark.parity(68)
def test_scheduler_answer_that_is_no_decision_is_rejected_with_its_name() -> None:
    loop = Loop(scheduler=Confused())
    loop.turn(NODE)
    with pytest.raises(SearchFailed, match=r"Confused.on_trial_result returned 'MAYBE'"):
        loop.batch(1, started(), result(1))


class Impatient(TrialScheduler):
    def choose_trial_to_run(self, runner):
        return object()


@pytest.mark.parity(62)
def test_trial_that_does_not_wait_cannot_be_chosen() -> None:
    loop = Loop(scheduler=Impatient())
    with pytest.raises(SearchFailed, match="not waiting for a slot"):
        loop.turn(NODE)


class Enough(Stopper):
    """Examines no result and ends the search on request."""

    is_enough = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.is_enough

    def horizon(self, trial_id: str) -> Horizon | None:
        return TO_THE_END


def test_stopper_that_examines_no_result_can_end_the_search() -> None:
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
    """Starts trials whose own status is PENDING."""

    def choose_trial_to_run(self, runner):
        return next((trial for trial in runner.waiting() if trial.status == "PENDING"), None)


def test_trials_of_a_lost_node_are_pending_for_the_scheduler() -> None:
    loop = Loop(scheduler=ByState(), trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.turn(m.NodeLost("n.1", "its lease ran out"))
    other = m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0})
    assert ("start", "t_00000", 2) in loop.turn(other)


class PausesAtOnce(TrialScheduler):
    def on_trial_result(self, runner, trial, result):
        return self.PAUSE


def test_trial_that_pauses_while_its_search_is_interrupted_is_shown_as_paused() -> None:
    loop = Loop(scheduler=PausesAtOnce(), trials=1)
    loop.turn(NODE)
    loop.batch(1, started())
    loop.loop.interrupt("Ctrl-C")
    assert ("stop", "t_00000") in loop.turn()
    assert loop.loop.trials["t_00000"].status == "PENDING"
    log = loop.batch(2, result(1))
    assert ("pause", "t_00000") not in log
    assert ("NotifyResult", "t_00000") in log
    assert loop.loop.trials["t_00000"].status == "PAUSED"
    assert loop.runner.summary("t_00000").status == "PAUSED"
    loop.batch(3, m.SlotFreed("t_00000", 1))
    assert loop.runner.is_finished
    loop.loop.resume(m.ExperimentResumed(2, 0.0))
    assert loop.loop.trials["t_00000"].status == "PAUSED"
    other = m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0})
    assert ("start", "t_00000", 2) in loop.turn(other)


class Curious(BasicVariantGenerator):
    """Records all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []

    def on_trial_result(self, trial_id, result):
        self.told.append(("result", result["training_iteration"]))

    def on_trial_complete(self, trial_id, result=None, error=False):
        self.told.append(("complete", result["training_iteration"]))


class StopsAtTwo(TrialScheduler):
    def on_trial_result(self, runner, trial, result):
        return self.STOP if result["training_iteration"] == 2 else self.CONTINUE


def test_search_algorithm_gets_the_result_that_stopped_a_trial_once() -> None:
    search = Curious()
    loop = Loop(search=search, scheduler=StopsAtTwo())
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.batch(3, result(2))
    assert search.told == [("result", 1), ("complete", 2)]


class FailsAtAnEnd(BasicVariantGenerator):
    def on_trial_complete(self, trial_id, result=None, error=False):
        raise ConnectionError("its database is away")


class StopsTheOther(TrialScheduler):
    def on_trial_complete(self, runner, trial, result):
        return [Stop(one, "the first is enough") for one in runner.get_trials()]


def test_actions_are_journalled_with_an_event_about_which_the_search_algorithm_raises() -> None:
    loop = Loop(search=FailsAtAnEnd(), scheduler=StopsTheOther())
    loop.turn(msgspec.structs.replace(NODE, resources={"cpu": 2.0}))
    loop.batch(1, started(), started("t_00001"), result(1))
    with pytest.raises(SearchFailed, match="its database is away"):
        loop.batch(4, m.TrialFinished("t_00000", 1))
    *_, end, action = [one.event for one in loop.journal.journal_records]
    assert end == m.TrialFinished("t_00000", 1)
    assert action == m.ActionTaken("t_00001", m.STOP, "the first is enough")


def test_nan_of_a_nested_metric_is_shown_as_the_worst_value() -> None:
    shown = []

    class Looks(TrialScheduler):
        def on_trial_result(self, runner, trial, result):
            shown.append(lookup(result, "val/loss"))
            return self.CONTINUE

    search = SearchGenerator(BasicVariantGenerator(), {}, 1)
    algorithms = AlgorithmDriver(
        search=search,
        scheduler=Looks(),
        metric="val/loss",
        mode="min",
        worst_for_nonfinite=True,
    )
    trial = TrialView("t", TrialSummary(0, pack_config({}), "", {"cpu": 1.0}), PLAN)
    algorithms.decide(trial, {"val": {"loss": math.nan}}, 1)
    assert shown == [math.inf]


def test_stop_key_that_the_first_result_lacks_is_named_once() -> None:
    stop = (Condition("training_iterations", 3), Condition("training_iteration", 9))
    loop = Loop(plan=msgspec.structs.replace(PLAN, stop=(*stop, Condition("val/los", 0.1))))
    loop.turn(NODE)
    (told,) = [line[1] for line in loop.batch(1, started(), result(1)) if line[0] == "notices"]
    assert told.startswith(
        "RunConfig(stop=...) compares 'training_iterations' and 'val/los', which the first result "
        "(trial t_00000) does not have; it has 'loss', 'done', 'training_iteration', "
    )
    assert not [line for line in loop.batch(3, result(2)) if line[0] == "notices"]


def test_f22_node_on_which_every_trial_dies_is_reported_and_set_aside_and_the_search_ends() -> None:
    loop = Loop(trials=7)
    loop.turn(NODE)
    told: list[str] = []
    for number in range(7):
        trial, first = f"t_{number:05d}", 3 * number + 1
        while not loop.runner.counts["RUNNING"]:
            loop.now += 0.5
            loop.turn()
        died = m.TrialProcessDied(trial, 1, 1, 11, None, 0.0)
        log = loop.batch(first, started(trial), died, m.SlotFreed(trial, 1))
        told += [line[1] for line in log if line[0] == "notices"]
    loop.now += 2.0
    loop.turn()

    (text,) = told
    assert text.startswith("node n on host is set aside for 1 s: 3 different trials in a row")
    assert loop.runner.is_finished
    assert loop.now == 4.0, "two pauses of a second each, and two seconds for the end"
