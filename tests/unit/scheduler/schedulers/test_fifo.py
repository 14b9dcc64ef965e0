"""First in, first out, and the methods that all trial schedulers inherit."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    SchedulerDecision,
    TrialScheduler,
    create_scheduler,
    make_scheduler,
    read_answer,
)
from tunemq_shared.base.errors import ConfigError, SearchFailed

TRIAL: Any = SimpleNamespace(trial_id="t0", number=0, config={}, status="PENDING", last_result={})


class Runner:
    def __init__(self, *trials: Any) -> None:
        self.trials = trials

    def waiting(self) -> Iterable[Any]:
        return iter(self.trials)


def waiting(status: str) -> Any:
    return SimpleNamespace(status=status)


class Custom(FIFOScheduler):
    """A scheduler as users write it for Ray."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        return "STOP" if result["loss"] > 3 else "CONTINUE"


def test_fifo_is_never_asked_about_a_result() -> None:
    scheduler = make_scheduler(None, "loss", "min", 0)
    assert isinstance(scheduler, FIFOScheduler)
    assert scheduler.horizon(TRIAL) == ()
    assert scheduler.metric is None


def test_fifo_subclass_that_decides_is_asked_about_every_result() -> None:
    scheduler = make_scheduler(Custom(), "loss", "min", 0)
    assert scheduler.horizon(TRIAL) is None
    assert scheduler.metric == "loss"
    assert scheduler.on_trial_result(Runner(), TRIAL, {"loss": 4}) == TrialScheduler.STOP


def test_scheduler_without_horizons_is_asked_about_every_result() -> None:
    assert TrialScheduler().horizon(TRIAL) is None


@pytest.mark.parity(62)
def test_fifo_starts_the_longest_waiting_trial_first() -> None:
    first, second = waiting("PENDING"), waiting("PENDING")
    assert FIFOScheduler().choose_trial_to_run(Runner(first, second)) is first
    assert FIFOScheduler().choose_trial_to_run(Runner()) is None


def test_fifo_resumes_paused_trials_when_no_other_waits() -> None:
    paused, later, pending = waiting("PAUSED"), waiting("PAUSED"), waiting("PENDING")
    assert FIFOScheduler().choose_trial_to_run(Runner(paused, later, pending)) is pending
    assert TrialScheduler().choose_trial_to_run(Runner(paused, later)) is paused


def test_verdict_equals_the_bare_word_and_has_a_reason() -> None:
    verdict = TrialScheduler.STOP.because("too slow")
    assert verdict == "STOP"
    assert {verdict: 1}["STOP"] == 1
    assert (verdict.reason, TrialScheduler.STOP.reason) == ("too slow", "")


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [("CONTINUE", "CONTINUE"), ("NOOP", "CONTINUE"), ("PAUSE", "PAUSE"), ("STOP", "STOP")],
)
def test_bare_words_are_accepted_as_verdicts(answer: str, meaning: str) -> None:
    verdict, actions = read_answer(FIFOScheduler(), "on_trial_result", answer, "t0")
    assert isinstance(verdict, SchedulerDecision)
    assert (verdict, actions) == (meaning, [])


@pytest.mark.parametrize("answer", [None, "stop", 1, ["stop"], [["STOP"]], {"STOP"}])
def test_answer_that_is_no_decision_is_an_error_that_names_the_scheduler(answer: object) -> None:
    with pytest.raises(SearchFailed, match=r"FIFOScheduler.*CONTINUE, PAUSE, STOP"):
        read_answer(FIFOScheduler(), "on_trial_result", answer, "t0")


def test_old_scheduler_without_keywords_can_be_set_up() -> None:
    class Old(TrialScheduler):
        def set_search_properties(self, metric: Any, mode: Any) -> bool:  # type: ignore[override]
            self._metric = metric
            return True

    assert make_scheduler(Old(), "loss", "min", 3).metric == "loss"


def test_mode_alone_means_the_metric_of_a_bare_number() -> None:
    assert make_scheduler(Custom(), None, "max", 0).metric == "_metric"


class Rejects(TrialScheduler):
    def set_search_properties(self, metric: Any, mode: Any, **spec: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: create_scheduler("lifo"), "'lifo'.*fifo, async_hyperband"),
        (lambda: create_scheduler("asha", graceperiod=3), "'graceperiod'; did you mean grace_per"),
        (lambda: create_scheduler("asha", zzz=3), "'zzz'; it takes time_attr, metric, mode, max_t"),
        (lambda: create_scheduler("fifo", max_t=3), "'max_t'; it takes none"),
        (lambda: make_scheduler(3, None, None, 0), "scheduler is 3"),
        (lambda: make_scheduler(FIFOScheduler, None, None, 0), r"make one: FIFOScheduler\(\)"),
        (lambda: make_scheduler(None, "loss", "down", 0), "mode='down'"),
        (lambda: make_scheduler(None, 3, "min", 0), "metric=3"),
        (lambda: make_scheduler("asha", "loss", None, 0), "mode is missing"),
        (lambda: make_scheduler("asha", None, None, 0), "metric is missing"),
        (lambda: make_scheduler(ASHAScheduler(mode="max"), "l", "min", 0), "'min'.*'max'"),
        (lambda: make_scheduler(ASHAScheduler(metric="a"), "b", "min", 0), "'b'.*'a'"),
        (lambda: make_scheduler(Rejects(), "b", "min", 0), "Rejects does not accept"),
    ],
)
def test_scheduler_with_invalid_input_names_it(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_same_objective_can_be_set_twice() -> None:
    scheduler = ASHAScheduler(metric="loss", mode="min")
    assert make_scheduler(scheduler, "loss", "min", 0).metric == "loss"
