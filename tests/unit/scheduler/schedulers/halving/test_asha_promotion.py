"""ASHA's promotions, beside the algorithm of its paper."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.slot_search import SlotSearch
from tunemq_scheduler.schedulers import ASHAScheduler, create_scheduler
from tunemq_shared.base.errors import ConfigError


class Search(SlotSearch):
    """One with ASHA's promotions."""

    def __init__(self, slots: int, **options: Any) -> None:
        rungs = {"grace_period": 1, "reduction_factor": 3, "max_t": 27, **options}
        super().__init__(
            slots, lambda: ASHAScheduler(metric="score", mode="max", type="promotion", **rungs)
        )


def test_best_third_of_a_rung_continues_as_soon_as_it_is_known() -> None:
    search = Search(1)
    first, second, third = (search.add() for _ in range(3))
    assert search.report(first, 1, 5.0) == "PAUSE"
    assert search.reasons["t0"] == (
        "score 5 is not among the best 1/3 of 1 trials at rung 1 (rank 1, the best 0 continue)"
    )
    assert search.report(second, 1, 9.0) == "PAUSE"
    assert search.report(third, 1, 1.0) == "PAUSE"
    assert search.statuses() == "pPp"
    assert search.reasons["t1"] == (
        "score 9 is among the best 1/3 of 3 trials at rung 1 (rank 1, the best 1 continue)"
    )
    for score in (2.0, 3.0):
        search.report(search.add(), 1, score)
    assert search.report(search.add(), 1, 8.0) == "CONTINUE", "itself the best that waits"
    assert search.statuses() == "pPpppR"


def test_trial_among_the_best_that_waits_for_an_equal_one_says_so() -> None:
    search = Search(3)
    t0, t1, t2 = (search.add() for _ in range(3))
    search.report(t1, 1, 9.0)
    search.report(t2, 1, 1.0)
    assert search.report(t0, 1, 9.0) == "PAUSE"
    assert search.reasons["t0"] == (
        "score 9 is among the best 1/3 of 3 trials at rung 1 (rank 1, the best 1 continue); "
        "another trial continues first"
    )


def test_trial_may_continue_much_later() -> None:
    search = Search(1)
    for score in (9.0, 8.0, 1.0):
        search.report(search.add(), 1, score)
    assert search.statuses() == "Ppp"
    for _ in range(3):
        search.report(search.add(), 1, 0.0)
    assert search.statuses() == "PPpppp"


def test_highest_rung_comes_first() -> None:
    search = Search(1)
    for score in (9.0, 8.0, 7.0, 3.0, 2.0, 1.0, 1.0, 1.0):
        search.report(search.add(), 1, score)
    t0, t1, t2 = search.trials[:3]
    assert search.statuses() == "PPpppppp"
    assert search.report(t0, 3, 1.0) == "PAUSE"
    assert search.report(t1, 3, 2.0) == "PAUSE"
    search.report(search.add(), 1, 0.0)
    assert t2.status == "PENDING"
    assert search.report(t2, 3, 3.0) == "CONTINUE"


def test_trial_stops_at_max_t_and_frees_its_slot_for_another() -> None:
    search = Search(1)
    for score in (9.0, 8.0, 1.0):
        search.report(search.add(), 1, score)
    assert search.report(search.trials[0], 27, 9.0) == "STOP"
    assert "max_t 27" in search.reasons["t0"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_never_promoted(value: float) -> None:
    search = Search(1)
    for _ in range(6):
        search.report(search.add(), 1, value)
    assert search.statuses() == "pppppp"
    search.call("on_stall")
    assert search.statuses() == "TTTTTT"


def test_trials_left_when_nothing_runs_are_stopped_with_the_reason() -> None:
    search = Search(1)
    for score in (9.0, 8.0, 1.0):
        search.report(search.add(), 1, score)
    search.call("on_search_exhausted")
    assert search.statuses() == "Ppp"
    search.report(search.trials[0], 27, 9.0)
    search.call("on_stall")
    assert search.statuses() == "TTT"
    assert search.reasons["t2"] == (
        "score 1 is not among the best 1/3 of 3 trials at rung 1 (rank 3, the best 1 continue)"
    )


def test_failed_trial_that_waits_no_longer_is_not_promoted() -> None:
    search = Search(1)
    trials = [search.add() for _ in range(4)]
    for trial, score in zip(trials, (5.0, 9.0), strict=False):
        search.report(trial, 1, score)
    trials[1].status = "TERMINATED"
    search.call("on_trial_remove", trials[1])
    search.report(trials[2], 1, 1.0)
    search.report(trials[3], 1, 1.0)
    assert search.statuses() == "pTpp", "its value still is the best of the rung"


class Paper:
    """Algorithm 2 of the paper: which job a free worker gets."""

    def __init__(self, eta: int, rungs: int) -> None:
        self.eta = eta
        self.rungs: list[dict[int, float]] = [{} for _ in range(rungs)]
        self.promoted: list[set[int]] = [set() for _ in range(rungs)]

    def record(self, trial: int, rung: int, value: float) -> None:
        self.rungs[rung][trial] = value

    def promotable(self) -> int | None:
        for rung, promoted in zip(reversed(self.rungs), reversed(self.promoted), strict=True):
            best = sorted(rung, key=lambda one: rung[one], reverse=True)[: len(rung) // self.eta]
            for trial in best:
                if trial not in promoted:
                    promoted.add(trial)
                    return trial
        return None


@given(st.integers(0, 10**9))
def test_each_free_slot_gets_the_trial_that_the_papers_algorithm_gives_it(seed: int) -> None:
    rng = random.Random(seed)
    eta, depth = rng.choice([(2, 4), (3, 3), (4, 2)])
    most, slots = rng.randint(5, 60), rng.randint(1, 5)
    search = Search(slots, reduction_factor=eta, max_t=eta**depth)
    paper = Paper(eta, depth)
    reached: dict[int, int] = {}
    search.fill(most)
    for _ in range(400):
        if len(search.trials) >= most:
            return  # from here on idle slots wait, and the paper has no word on that
        trial = rng.choice(search.running())
        rung, value = reached.get(trial.number, 0), rng.random()
        reached[trial.number] = rung + 1
        before = [one for one in search.trials if one.status == "PENDING"]
        assert not before, "a resumed trial had a free slot at once"
        search.report(trial, eta**rung, value)
        if rung < depth:
            paper.record(trial.number, rung, value)
        expected = paper.promotable()
        promoted = [one.number for one in search.trials if one.status == "PENDING"]
        if trial.status == "RUNNING":
            promoted = [trial.number]
        assert promoted == ([] if expected is None else [expected])
        if rng.random() < 0.05:
            state = json.loads(json.dumps(search.scheduler.get_state()))
            search.scheduler = search.new_scheduler()
            search.scheduler.set_state(state)
        search.fill(most)


def test_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"type='promote'.*promotion"):
        create_scheduler("asha", type="promote")
