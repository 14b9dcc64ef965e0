"""PASHA, beside algorithm 1 of its paper."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.slot_search import SlotSearch
from tunemq_scheduler.schedulers import PASHA, create_scheduler
from tunemq_scheduler.schedulers.halving import soft_ranking
from tunemq_scheduler.schedulers.halving.soft_ranking import SoftRanking, crossing_distance
from tunemq_shared.base.errors import ConfigError


class Search(SlotSearch):
    """One with PASHA."""

    def __init__(self, slots: int, **options: Any) -> None:
        rungs = {"reduction_factor": 3, "max_t": 27, **options}
        super().__init__(slots, lambda: PASHA(metric="score", mode="max", **rungs))

    def observe(self, trial: Any, time_: float, score: Any) -> None:
        trial.last_result = {"training_iteration": time_, "score": score}
        self.scheduler.observe(self, trial, trial.last_result)

    @property
    def told(self) -> str:
        return self.scheduler.debug_string().splitlines()[-1]


def at_second_rung(count: int = 3, **options: Any) -> Search:
    """A search whose best trials, in their order t0, t1, ..., are on their way to rung 3."""
    search = Search(1, **options)
    for score in range(3 * count, 0, -1):
        search.report(search.add(), 1, float(score))
    for trial in search.trials[:count]:
        assert trial.status == "PENDING"
    return search


def test_next_rung_opens_when_two_trials_change_places() -> None:
    search = at_second_rung()
    t0, t1, t2 = search.trials[:3]
    assert search.report(t0, 3, 9.0) == "PAUSE"
    assert search.reasons["t0"] == (
        "rung 3 is the highest open one: its order of 1 trials agrees with that at rung 1 "
        "(epsilon 0)"
    )
    assert search.report(t1, 3, 8.0) == "PAUSE"
    assert search.told == "Open up to 3; epsilon 0."
    search.report(t2, 3, 8.5)
    assert search.told == "Open up to 9; epsilon 0."
    assert t0.status == "PENDING"
    assert search.reasons["t0"] == (
        "score 9 is among the best 1/3 of 3 trials at rung 3 (rank 1, the best 1 continue); rung 9 "
        "opened because the order of 3 trials is another at rung 3 than at rung 1 (epsilon 0)"
    )


def test_trials_with_the_same_order_go_no_further_and_stop_in_the_end() -> None:
    search = at_second_rung()
    for trial, score in zip(search.trials, (9.0, 8.0, 7.0), strict=False):
        assert search.report(trial, 3, score) == "PAUSE"
    search.call("on_search_exhausted")
    assert search.statuses() == "p" * 9
    search.call("on_stall")
    assert search.statuses() == "T" * 9
    assert "its order of 3 trials agrees with that at rung 1" in search.reasons["t0"]
    assert search.reasons["t8"] == (
        "score 1 is not among the best 1/3 of 9 trials at rung 1 (rank 9, the best 3 continue)"
    )


def test_trials_with_equal_values_have_the_same_order() -> None:
    search = at_second_rung()
    for trial in reversed(search.trials[:3]):
        search.report(trial, 3, 1.0)
    assert search.told == "Open up to 3; epsilon 0."


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_trial_that_diverges_at_the_highest_open_rung_ranks_last(value: float) -> None:
    search = at_second_rung()
    search.report(search.trials[1], 3, 8.0)
    search.report(search.trials[2], 3, value)
    assert search.told == "Open up to 3; epsilon 0."
    search.report(search.trials[0], 3, value)
    assert search.told == "Open up to 9; epsilon 0."


def test_trial_that_reports_too_rarely_to_be_compared_opens_the_next_rung() -> None:
    search = Search(1)
    first, second = search.add(), search.add()
    search.report(first, 5, 1.0)
    assert search.told == "Open up to 9; epsilon 0."
    search.report(second, 10, 1.0)
    assert search.told == "Open up to 27; epsilon 0."


def test_trial_that_completes_behind_max_t_opens_nothing() -> None:
    search = Search(1)
    trial = search.add()
    search.call("on_trial_complete", trial, {"training_iteration": 40, "score": 1.0})
    assert search.told == "Open up to 3; epsilon 0."


def test_second_rung_at_max_t_is_open_from_the_start() -> None:
    search = Search(1, max_t=3)
    assert search.told == "Open up to 3; epsilon 0."
    for score in (9.0, 8.0, 7.0):
        search.report(search.add(), 1, score)
    assert search.statuses() == "Ppp"
    assert search.report(search.trials[0], 3, 1.0) == "STOP"


def test_places_may_change_within_the_noise_of_the_learning_curves() -> None:
    search = at_second_rung(count=5)
    t0, t1, t2 = search.trials[:3]
    for trial, score in ((t0, 0.0), (t1, 1.5)):  # t0 was better, and will be better again
        search.observe(trial, 2, score)
    search.report(t0, 3, 14.0)
    search.report(t1, 3, 12.5)
    assert search.told == "Open up to 3; epsilon 1.5."
    search.report(t2, 3, 13.0)  # t1 and t2 differ by 1 at the first rung
    assert search.told == "Open up to 3; epsilon 1.5."
    search.report(search.trials[3], 3, 13.5)  # t1 and t3 differ by 2
    assert search.told == "Open up to 9; epsilon 1.5."


def test_curves_differ_by_noise_if_they_cross_twice() -> None:
    def distance(*differences: float) -> float | None:
        one = {float(time_): value for time_, value in enumerate(differences)}
        return crossing_distance(one, dict.fromkeys(one, 0.0))

    assert distance(1, -1, 2) == distance(-1, 1, 0, -2) == 2
    assert distance(1, -1, 0, 1, -3) == 3
    assert distance(1, -1) is distance(1, 0, 1) is distance(1, -1, 1, 0) is distance() is None
    assert crossing_distance({1: 1.0, 2: -1.0, 3: 1.0}, {2: 0.0, 3: 0.0, 4: 0.0}) is None


def test_restarted_trial_is_forgotten_and_open_rungs_stay_open() -> None:
    search, undisturbed = at_second_rung(), at_second_rung()
    search.report(search.trials[0], 3, 9.0)
    search.call("on_trial_error", search.trials[0])
    search.scheduler.on_trial_restart(search, search.trials[0])
    undisturbed.scheduler.on_trial_restart(undisturbed, undisturbed.trials[0])
    state, other = search.scheduler.get_state(), undisturbed.scheduler.get_state()
    assert state is not None
    assert other is not None
    del state["places"]["t1"], other["places"]["t0"], other["places"]["t1"]
    assert state == other


def test_curves_of_ended_trials_are_kept_only_while_they_are_compared() -> None:
    search = at_second_rung()
    first, *_, last = search.trials
    search.report(first, 3, 9.0)
    for trial in (first, last):
        search.call("on_trial_remove", trial)
    kept = search.scheduler.get_state()["curves"]  # type: ignore[index]
    assert "t0" in kept
    assert "t8" not in kept
    search.report(search.trials[1], 3, 9.5)
    assert "t0" not in search.scheduler.get_state()["curves"]  # type: ignore[index]


class Paper:
    """Algorithm 1 with the soft ranking of section 4.2 and the epsilon of section 4.3."""

    def __init__(self, eta: int, milestones: list[int], most: int) -> None:
        self.eta, self.milestones, self.most = eta, milestones, most
        self.rungs: list[dict[int, float]] = [{} for _ in milestones]
        self.promoted: list[set[int]] = [set() for _ in milestones]
        self.curves: dict[int, list[float]] = {}
        self.top, self.epsilon = 1, 0.0

    def report(self, trial: int, value: float) -> None:
        """A trial has reported its next value."""
        self.curves.setdefault(trial, []).append(value)
        step = len(self.curves[trial])
        if step not in self.milestones:
            return
        rung = self.milestones.index(step)
        self.rungs[rung][trial] = value
        if rung == self.top < len(self.milestones):
            best = self._ordered(self.top)[: self.most]
            distances = [
                abs(self.curves[one][step - 1] - self.curves[other][step - 1])
                for one, other in itertools.combinations(best, 2)
                if self._criss_cross(self.curves[one], self.curves[other], step - 1)
            ]
            if distances:
                self.epsilon = float(np.percentile(distances, 90))
            if not self._is_stable(best):
                self.top += 1

    def _ordered(self, rung: int) -> list[int]:
        values = self.rungs[rung]
        return sorted(values, key=lambda one: values[one], reverse=True)

    def _criss_cross(self, one: list[float], other: list[float], j: int) -> bool:
        for first, second in ((one, other), (other, one)):
            for k in range(j):
                for i in range(k):
                    if first[j] > second[j] and first[k] < second[k] and first[i] > second[i]:
                        return True
        return False

    def _is_stable(self, best: list[int]) -> bool:
        below = self.rungs[self.top - 1]
        before = [one for one in self._ordered(self.top - 1) if one in best]
        for now, then in zip(best, before, strict=True):
            group = {one for one in best if abs(below[one] - below[then]) <= self.epsilon}
            if now not in group:
                return False
        return True

    def promotable(self) -> int | None:
        for index in reversed(range(min(self.top, len(self.rungs)))):
            rung, promoted = self.rungs[index], self.promoted[index]
            for trial in self._ordered(index)[: len(rung) // self.eta]:
                if trial not in promoted:
                    promoted.add(trial)
                    return trial
        return None


def play(seed: int, most: int = 100) -> Paper:
    """Play a random search with both, and compare each decision."""
    rng = random.Random(seed)
    eta, max_t = rng.choice([(2, 8), (2, 16), (3, 27), (3, 20), (4, 64)])
    milestones = [one for one in (eta**power for power in range(7)) if one < max_t]
    noise, limit = rng.choice([0.0, 0.02, 0.1, 0.5]), rng.randint(20, 90)
    search = Search(rng.randint(1, 4), reduction_factor=eta, max_t=max_t)
    paper = Paper(eta, milestones, most)
    quality = [rng.random() for _ in range(limit + 10)]
    search.fill(limit)
    while len(search.trials) < limit:
        trial = rng.choice(search.running())
        value = quality[trial.number] + rng.gauss(0, noise)
        paper.report(trial.number, value)
        step = len(paper.curves[trial.number])
        if step not in milestones and step < max_t:
            search.observe(trial, step, value)
            continue
        search.report(trial, step, value)
        top = [*milestones, max_t][paper.top]
        assert search.told == f"Open up to {top}; epsilon {paper.epsilon:g}."
        expected = paper.promotable()
        promoted = [one.number for one in search.trials if one.status == "PENDING"]
        if trial.status == "RUNNING":
            promoted = [trial.number]
        assert promoted == ([] if expected is None else [expected])
        if rng.random() < 0.05:
            state = json.loads(json.dumps(search.scheduler.get_state()))
            search.scheduler = search.new_scheduler()
            search.scheduler.set_state(state)
            assert search.scheduler.get_state() == state
        search.fill(limit)
    return paper


@given(st.integers(0, 10**9))
def test_rungs_open_and_trials_continue_as_by_the_papers_algorithm(seed: int) -> None:
    play(seed)


@given(st.integers(0, 10**9), st.integers(2, 5))
def test_of_a_full_rung_only_the_best_are_compared(seed: int, most: int) -> None:
    with mock.patch.object(soft_ranking, "MOST_COMPARED", most):
        play(seed, most)


def test_compared_searches_open_few_and_many_rungs() -> None:
    papers = [play(seed) for seed in range(30)]
    assert {paper.top for paper in papers} >= {1, 2, 3}
    assert any(paper.epsilon for paper in papers)


def test_result_at_a_full_rung_costs_the_same_as_at_one_with_few_trials() -> None:
    def cost(others: int) -> float:
        ranking, rng = SoftRanking(), random.Random(1)
        curves = {
            f"t{number}": {float(step): rng.random() for step in range(27)}
            for number in range(others + 50)
        }
        costs = []
        for number, trial in enumerate(curves):
            begin = time.perf_counter()
            ranking.add(trial, rng.random(), rng.random(), curves)
            if number >= others:
                costs.append(time.perf_counter() - begin)
        return min(costs)

    few, many = cost(150), cost(1000)
    assert many < 3 * few, (few, many)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_t": 0}, r"PASHA\(max_t=0\)"),
        ({"grace_period": 9, "max_t": 3}, r"PASHA\(grace_period=9, max_t=3\).*not be above"),
        ({"reduction_factor": 1}, r"PASHA\(reduction_factor=1\).*above 1"),
        ({"mode": "best"}, "PASHA.*mode='best'"),
        ({"brackets": 2}, "PASHA takes no argument 'brackets'"),
    ],
)
def test_invalid_option_is_refused_with_its_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create_scheduler("pasha", **options)


def test_missing_metric_and_other_rungs_are_refused() -> None:
    trial = SimpleNamespace(trial_id="t0", number=0, last_result={})
    with pytest.raises(ConfigError, match=r"PASHA .*metric is missing"):
        PASHA().on_trial_add(None, trial)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rungs"):
        Search(1, max_t=99).scheduler.set_state(Search(1).scheduler.get_state())  # type: ignore[arg-type]
