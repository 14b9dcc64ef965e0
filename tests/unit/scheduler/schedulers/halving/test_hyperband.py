"""HyperBand: brackets, halvings, and a reference written from the paper."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.schedulers import (
    HyperBandForBOHB,
    HyperBandScheduler,
    create_scheduler,
    read_answer,
)
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import Condition


class Population:
    """Trials and their states, which follow a scheduler's answers; also the runner that it sees."""

    def __init__(self, scheduler: HyperBandScheduler) -> None:
        self.scheduler = scheduler
        self.trials: dict[str, Any] = {}
        #: Trial and the progress at which it was stopped.
        self.stopped: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        scheduler.set_search_properties("score", "max", seed=0)

    def get_trials(self) -> list[Any]:
        return [one for one in self.trials.values() if one.status in ("PENDING", "PAUSED")]

    def waiting(self) -> list[Any]:
        return self.get_trials()

    def take(self, method: str, *args: Any, about: Any = None) -> str:
        answer = getattr(self.scheduler, method)(self, *args)
        decision, actions = read_answer(
            self.scheduler, method, answer, about.trial_id if about else ""
        )
        for action in actions:
            self._apply(self.trials[action.trial_id], action.word, action.reason)
        if about is not None and decision != "CONTINUE":
            self._apply(about, decision, decision.reason)
        return str(decision)

    def _apply(self, trial: Any, word: str, reason: str) -> None:
        trial.status = {"STOP": "TERMINATED", "PAUSE": "PAUSED", "RESUME": "PENDING"}[word]
        self.reasons[trial.trial_id] = reason
        if word == "STOP":
            self.stopped[trial.trial_id] = trial.last_result["training_iteration"]

    def add(self, number: int) -> Any:
        trial = SimpleNamespace(
            trial_id=f"t{number}", number=number, status="PENDING", last_result={}
        )
        self.trials[trial.trial_id] = trial
        self.take("on_trial_add", trial)
        return trial

    def report(self, trial: Any, step: float, score: Any) -> str:
        trial.status = "RUNNING"
        trial.last_result = {"training_iteration": step, "score": score}
        return self.take("on_trial_result", trial, trial.last_result, about=trial)

    def statuses(self) -> str:
        """The first letters of all states, those of TERMINATED and PAUSED as T and p."""
        letters = {"PAUSED": "p", "PENDING": "P", "RUNNING": "R", "TERMINATED": "T"}
        return "".join(letters[one.status] for one in self.trials.values())


def hyperband(**options: Any) -> Population:
    return Population(HyperBandScheduler(**{"max_t": 9, "reduction_factor": 3, **options}))


def filled(count: int, **options: Any) -> Population:
    """A population of ``count`` trials, after the three brackets of 3, 5 and 9 trials."""
    population = hyperband(**options)
    for number in range(count):
        population.add(number)
    return population


def sizes(scheduler: HyperBandScheduler) -> list[list[int]]:
    return scheduler.get_state()["sizes"]


def test_brackets_are_those_of_the_paper() -> None:
    # Table 1 for R = 81 and eta = 3: halvings, trials, first milestone.
    assert sizes(HyperBandScheduler(max_t=81, reduction_factor=3)) == [
        (0, 5, 81),
        (1, 8, 27),
        (2, 15, 9),
        (3, 34, 3),
        (4, 81, 1),
    ]
    assert sizes(HyperBandForBOHB(max_t=9))[0] == (2, 9, 1)


def test_trials_wait_at_the_milestone_until_their_bracket_is_there() -> None:
    population = filled(8)  # three trials run to the end, five have a milestone at 3
    trials = list(population.trials.values())[3:]
    assert population.report(trials[0], 2, 5.0) == "CONTINUE"
    assert population.scheduler.horizon(trials[0]) == (Condition("training_iteration", 3),)
    for one, score in zip(trials[:4], (5.0, 1.0, 4.0, 2.0), strict=True):
        assert population.report(one, 3, score) == "PAUSE"
        assert population.scheduler.horizon(one) == (Condition("training_iteration", 9),)
    assert population.reasons["t6"] == ("at milestone 3 of bracket 1 it waits for 1 of 5 trials")
    assert population.statuses()[3:] == "ppppP"
    assert population.scheduler.choose_trial_to_run(population) is population.trials["t0"]
    assert population.report(trials[4], 3, 3.0) == "STOP"
    assert population.statuses()[3:] == "PTPTT"
    assert population.reasons["t4"] == (
        "score 1 is not among the best 2 of 5 trials at milestone 3 of bracket 1 (cutoff 4)"
    )
    assert population.report(trials[0], 9, 5.0) == "STOP"
    assert population.reasons["t3"] == "milestone 9 is the last of bracket 1"


def test_last_to_arrive_continues_at_once_if_it_is_among_the_best() -> None:
    population = filled(8)
    trials = list(population.trials.values())[3:]
    for one in trials[:4]:
        population.report(one, 3, one.number)
    assert population.report(trials[4], 3, 100.0) == "CONTINUE"
    assert population.statuses()[3:] == "TTTPR"


def test_bracket_that_is_not_full_waits_for_more_trials_until_none_come() -> None:
    population = filled(6)
    trials = list(population.trials.values())[3:]
    assert [population.report(one, 3, one.number) for one in trials] == ["PAUSE"] * 3
    population.take("on_search_exhausted")
    assert population.statuses()[3:] == "TPP"


def test_bracket_that_can_never_be_full_continues_when_nothing_else_can_run() -> None:
    population = filled(6)
    trials = list(population.trials.values())[3:]
    for one in trials:
        population.report(one, 3, one.number)
    population.take("on_stall")
    assert population.statuses()[3:] == "TPP"


def test_trial_that_ended_keeps_its_place_in_its_bracket() -> None:
    population = filled(2)
    for name in ("t0", "t1"):
        population.report(population.trials[name], 9, 1.0)
    assert population.scheduler.horizon(population.add(2)) == (Condition("training_iteration", 9),)
    assert population.scheduler.horizon(population.add(3)) == (Condition("training_iteration", 3),)


def test_next_trial_after_a_halved_bracket_begins_another() -> None:
    population = filled(6)
    for one in list(population.trials.values())[3:]:
        population.report(one, 3, one.number)
    population.take("on_stall")
    late = population.add(6)
    assert population.scheduler.horizon(late) == (Condition("training_iteration", 1),)


@pytest.mark.parametrize("method", ["on_trial_error", "on_trial_remove", "on_trial_complete"])
def test_trial_that_ends_is_no_longer_waited_for(method: str) -> None:
    population = filled(8)
    trials = list(population.trials.values())[3:]
    for one in trials[:4]:
        population.report(one, 3, one.number)
    trials[4].status = "ERROR"
    more = ({"training_iteration": 2, "score": 9.0},) if method == "on_trial_complete" else ()
    population.take(method, trials[4], *more)
    trials[4].status = "TERMINATED"
    assert population.statuses()[3:] == "TTPPT"


def test_result_without_the_metric_or_the_time_is_passed_over() -> None:
    population = filled(4)
    trial = population.trials["t3"]
    trial.status = "RUNNING"
    for result in ({"training_iteration": 3}, {"score": 1.0}, {"training_iteration": 3, "x": 1}):
        assert population.take("on_trial_result", trial, result, about=trial) == "CONTINUE"
    assert population.report(trial, 4, 1.0) == "PAUSE"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_worse_than_any_other(value: float) -> None:
    population = filled(8)
    trials = list(population.trials.values())[3:]
    for one in trials[:3]:
        population.report(one, 3, -1e300)
    population.report(trials[3], 3, value)
    population.report(trials[4], 3, value)
    assert population.statuses()[3:] == "TPPTT"


def test_trial_far_beyond_its_milestone_waits_at_the_next_one() -> None:
    population = hyperband(max_t=27)
    for number in range(4 + 6 + 12):  # the third bracket halves at 3, 9 and 27
        population.add(number)
    trials = list(population.trials.values())[10:]
    for one in trials[:11]:
        population.report(one, 3, -one.number)
    assert population.report(trials[11], 10, 1.0) == "PAUSE"
    assert population.statuses()[10:] == "PPP" + "T" * 8 + "p"
    for one in trials[:3]:
        population.report(one, 9, -one.number)
    assert population.statuses()[10:] == "PTT" + "T" * 8 + "P"


def test_trials_may_run_beyond_max_t() -> None:
    population = filled(8, stop_last_trials=False)
    first, *others = list(population.trials.values())[3:]
    assert population.report(population.trials["t0"], 9, 1.0) == "CONTINUE"
    assert population.scheduler.horizon(population.trials["t0"]) == ()
    for one in others:
        population.report(one, 3, 0.0)
    assert population.report(first, 3, 1.0) == "CONTINUE"
    assert population.report(first, 9, 1.0) == "CONTINUE"
    assert population.scheduler.horizon(first) == ()


class Reference:
    """Successive halving as in the paper (algorithm 1, lines 3 to 9), for one bracket.

    It has all learning curves at hand: no trial reports, waits, or is told anything.
    """

    def __init__(self, curves: dict[str, list[float]], s: int, max_t: int, eta: int) -> None:
        n, r = len(curves), max_t / eta**s
        remaining = dict(curves)
        self.ended: dict[str, float] = {}
        for i in range(s + 1):
            r_i = round(r * eta**i)
            n_next = math.ceil(n / eta ** (i + 1)) if i < s else 0
            ranked = sorted(remaining, key=lambda one: remaining[one][r_i - 1], reverse=True)
            for one in ranked[n_next:]:
                self.ended[one] = r_i
                del remaining[one]


@given(st.integers(0, 10**9), st.sampled_from([(9, 3), (27, 3), (16, 2), (8, 2), (16, 4)]))
def test_every_trial_ends_where_the_papers_algorithm_ends_it(
    seed: int, shape: tuple[int, int]
) -> None:
    max_t, eta = shape
    rng = random.Random(seed)
    population = Population(HyperBandScheduler(max_t=max_t, reduction_factor=eta))
    brackets: list[list[str]] = []
    for _, size, _ in sizes(population.scheduler):
        brackets.append([population.add(len(population.trials)).trial_id for _ in range(size)])
    curves = {one: [rng.random() for _ in range(max_t)] for one in population.trials}
    while waiting := [one for one in population.trials.values() if one.status in "PENDING RUNNING"]:
        trial = rng.choice(waiting)
        step = trial.last_result.get("training_iteration", 0) + 1
        population.report(trial, step, curves[trial.trial_id][step - 1])
    for s, members in enumerate(brackets):
        expected = Reference({one: curves[one] for one in members}, s, max_t, eta).ended
        assert {one: population.stopped[one] for one in members} == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_t": 0}, r"max_t=0"),
        ({"max_t": 1.5}, r"max_t=1.5"),
        ({"max_t": "9"}, r"max_t='9'"),
        ({"max_t": math.nan}, r"max_t=nan"),
        ({"reduction_factor": 1}, r"reduction_factor=1\)"),
        ({"reduction_factor": None}, r"reduction_factor=None"),
        ({"reduction_factor": 1.0001}, r"more than 64 brackets"),
        ({"mode": "up"}, r"mode"),
    ],
)
def test_impossible_argument_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        create_scheduler("hyperband", **options)


def test_scheduler_without_a_metric_says_so() -> None:
    with pytest.raises(ConfigError, match=r"HyperBandForBOHB.*metric"):
        create_scheduler("hb_bohb").set_search_properties(None, None)


def test_state_of_other_brackets_is_refused() -> None:
    state = hyperband().scheduler.get_state()
    with pytest.raises(ConfigError, match="resume with the same max_t and reduction_factor"):
        hyperband(max_t=27).scheduler.set_state(state)


def test_debug_string_shows_each_bracket() -> None:
    population = filled(4)
    assert population.scheduler.debug_string().splitlines() == [
        "Using HyperBand: 0 trials stopped, 2 brackets.",
        "Bracket 0: 3 of at most 3 trials, 3 before milestone 9",
        "Bracket 1: 1 of at most 5 trials, 1 before milestone 3",
    ]
