"""Population based bandits: who learns from whom, what the bandit is told, and what it chooses."""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.schedulers.population.populations import Population
from tunemq_scheduler.schedulers import PB2, Exploit, create_scheduler, make_scheduler
from tunemq_scheduler.schedulers.population import gaussian_process
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import Condition

BOUNDS = {"lr": [0.05, 0.25], "width": [1, 9]}


def pb2(**options: Any) -> PB2:
    return PB2(
        **{
            "time_attr": "training_iteration",
            "perturbation_interval": 4,
            "hyperparam_bounds": BOUNDS,
            **options,
        }
    )


class Reference:
    """Algorithm 1 of the paper, as far as it does not depend on the model.

    Attributes:
        intervals: the number of trial intervals of which the gain is known.
    """

    def __init__(self, size: int, fraction: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fraction = fraction
        self.scores: dict[int, float] = {}
        self.due = dict.fromkeys(range(size), 4)
        self.intervals = 0

    def report(self, number: int, step: int, score: float) -> int | None:
        """Return the donor, if the trial is one of the worst."""
        if step < self.due[number]:
            return None
        self.intervals += number in self.scores
        self.scores[number] = score
        self.due[number] = step + 4
        order = sorted(self.scores, key=lambda one: (self.scores[one], one))
        size = min(math.ceil(self.fraction * len(order)), len(order) // 2)
        if number not in order[:size]:
            return None
        donor = self.rng.choice(order[-size:])
        self.rng.getrandbits(32)  # the seed of the candidates
        if not self.intervals:
            _ = [self.rng.random() for _ in BOUNDS]
        self.due[number] = self.due[donor]
        return donor


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=60),
    st.sampled_from([0.1, 0.25, 0.5]),
    st.integers(0, 10),
)
def test_pb2_takes_the_same_donors_as_a_reference_and_stays_within_the_bounds(
    history: list[tuple[int, int]], fraction: float, seed: int
) -> None:
    population = Population(pb2(quantile_fraction=fraction), 6, seed)
    reference = Reference(6, fraction, seed)
    steps = dict.fromkeys(range(6), 0)
    for number, score in history:
        steps[number] += 2
        _, actions = population.report(f"t{number}", steps[number], score)
        donor = reference.report(number, steps[number], score)
        assert [one.source for one in actions] == ([] if donor is None else [f"t{donor}"])
        for action in actions:
            assert 0.05 <= action.config["lr"] <= 0.25
            assert action.config["width"] in range(1, 10)
        if donor is not None:
            steps[number] = reference.due[number] - 4
    assert len(population.scheduler.get_state()["ended"]) == min(reference.intervals, 150)


def test_model_is_told_the_gain_of_each_interval_and_what_others_try_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    class Recorded(gaussian_process.Bandit):
        def __init__(self, steps: Any) -> None:
            super().__init__(steps)
            told.append(steps)

        def propose(self, time: float, context: float, pending: Any, seed: int) -> list[float]:
            told.append((time, context, pending))
            return [1.0, 0.5]

    monkeypatch.setattr(gaussian_process, "Bandit", Recorded)
    population = Population(pb2(), 4)
    for number in range(1, 4):
        population.report(f"t{number}", 4, number)
    population.report("t3", 8, 5)
    population.report("t2", 10, 8)  # later than due: 6 instead of 4
    (action,) = population.report("t0", 4, 0)[1]
    assert (action.source, action.config) == ("t2", {"lr": 0.25, "width": 5})
    (steps, (time, context, pending)) = told
    assert [(one.time, one.context, one.value) for one in steps] == [(1, 3, 2), (1, 2, 4)]
    assert steps[0].inputs == pytest.approx([(0.4 - 0.05) / 0.2, 7 / 8])
    assert (time, context) == (2.5, 8)
    assert [(one.time, one.context) for one in pending] == [(2.5, 8), (2, 5), (1, 1)]
    assert action.reason.startswith(
        "score 8 against 0, which is among the worst 1 of 4 at training_iteration 4; lr 0.1 to 0.25"
    )
    # The interval of t0 begins at the state that it took over.
    told.clear()
    population.report("t0", 14, 9)
    assert population.scheduler.get_state()["ended"][-1] == [10, 8, [0.25, 5], 1]


def test_model_forgets_the_oldest_intervals_and_trials_that_ended() -> None:
    scheduler = pb2(quantile_fraction=0)
    population = Population(scheduler, 2)
    for step in range(4, 800, 4):
        population.report("t0", step, step)
    state = scheduler.get_state()
    assert (len(state["ended"]), state["ended"][-1][0]) == (150, 792)
    scheduler.on_trial_complete(population, population.trials["t0"], {})
    assert scheduler.get_state()["begun"] == {}


def test_score_that_is_no_number_and_configuration_of_another_do_not_reach_the_model() -> None:
    scheduler = pb2(quantile_fraction=0)
    population = Population(scheduler, 2)
    population.report("t0", 4, 1.0)
    population.report("t0", 8, math.nan)
    population.report("t0", 12, 1.0)
    assert scheduler.get_state()["ended"] == []
    population.trials["t0"].config = {"lr": 0.2, "width": 2}
    population.report("t0", 16, 2.0)
    assert scheduler.get_state()["ended"] == []
    population.report("t0", 20, 4.0)
    assert scheduler.get_state()["ended"] == [[16, 2.0, [0.2, 2.0], 2.0]]


def test_lower_scores_are_better_in_mode_min() -> None:
    scheduler = pb2(metric="score", mode="min")
    scheduler.set_search_properties(None, None, seed=1)
    population = Population.__new__(Population)
    vars(population).update(vars(Population(pb2(), 2)), scheduler=scheduler)
    for trial in population.trials.values():
        scheduler.on_trial_add(population, trial)
    population.report("t0", 4, 1.0)
    population.report("t0", 8, 0.5)
    assert scheduler.get_state()["ended"][0][3] == 0.5
    assert [one.source for one in population.report("t1", 4, 3.0)[1]] == ["t0"]


def test_synchronous_population_chooses_different_values_for_each_of_its_worst() -> None:
    population = Population(pb2(synch=True, quantile_fraction=0.5), 6)
    for step in (4, 8):
        for number in range(6):
            _, actions = population.report(f"t{number}", step, number)
            for trial in population.trials.values():
                trial.status = "RUNNING"
    exploits = [one for one in actions if isinstance(one, Exploit)]
    assert [one.trial_id for one in exploits] == ["t0", "t1", "t2"]
    assert len({(one.config["lr"], one.config["width"]) for one in exploits}) > 1
    assert population.scheduler.horizon(population.trials["t1"]) == (
        Condition("training_iteration", 12),
    )


def test_state_continues_with_the_same_choices() -> None:
    one, other = (Population(pb2(), 6) for _ in range(2))
    rng = random.Random(1)
    history = [(f"t{rng.randrange(6)}", 4 * turn, rng.random()) for turn in range(1, 60)]
    for name, step, score in history[:30]:
        assert one.report(name, step, score) == other.report(name, step, score)
    fresh = pb2()
    fresh.set_search_properties("score", "max", seed=0)
    fresh.set_state(json.loads(json.dumps(one.scheduler.get_state())))
    one.scheduler = fresh
    for name, step, score in history[30:]:
        assert one.report(name, step, score) == other.report(name, step, score)
    assert fresh.get_state() == other.scheduler.get_state()


def test_nested_values_are_chosen_and_customised() -> None:
    scheduler = pb2(
        hyperparam_bounds={"lr": [0.1, 1], "inner": {"rate": (2, 5)}},
        custom_explore_fn=lambda config: {**config, "lr": 0.5},
    )
    population = Population.__new__(Population)
    vars(population).update(vars(Population(pb2(), 2)), scheduler=scheduler)
    scheduler.set_search_properties("score", "max", seed=3)
    for trial in population.trials.values():
        trial.config = {"lr": 0.2, "inner": {"rate": 3.0, "kept": "x"}}
        scheduler.on_trial_add(population, trial)
    population.report("t1", 4, 1.0)
    (action,) = population.report("t0", 4, 0.0)[1]
    assert action.config["lr"] == 0.5
    assert 2 <= action.config["inner"].pop("rate") <= 5
    assert action.config["inner"] == {"kept": "x"}
    assert population.trials["t1"].config["inner"]["rate"] == 3.0


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        (None, "hyperparam_bounds=None.*give the bounds of each hyperparameter"),
        ({}, "hyperparam_bounds={}"),
        ({"inner": {}}, r"hyperparam_bounds\['inner'\]={}"),
        ({"lr": 0.1}, r"hyperparam_bounds\['lr'\]=0.1.*give the least and the greatest value"),
        ({"lr": [0.1]}, r"hyperparam_bounds\['lr'\]=\[0.1\]"),
        ({"lr": [0.1, "1"]}, r"hyperparam_bounds\['lr'\]=\[0.1, '1'\]"),
        ({"lr": [0, math.inf]}, "give the least and the greatest value"),
        ({"a": {"b": [2, 2]}}, r"hyperparam_bounds\['a'\]\['b'\].*must be below the second"),
        ({"lr": [2, 1]}, "must be below the second"),
    ],
)
def test_invalid_bounds_are_refused_with_the_fix(bounds: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        pb2(hyperparam_bounds=bounds)


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"rate": [0, 1]}, r"hyperparam_bounds\['rate'\].*add 'rate' to param_space"),
        ({"lr": {"inner": [0, 1]}}, r"hyperparam_bounds\['lr'\]\) is a dict"),
    ],
)
def test_bounds_of_a_value_that_is_not_in_the_space_are_refused(bounds: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Population(pb2(hyperparam_bounds=bounds), 1)


@pytest.mark.parametrize("value", ["fast", None, True, math.nan])
def test_value_that_is_no_number_is_refused(value: Any) -> None:
    scheduler = pb2(custom_explore_fn=lambda config: {**config, "lr": value})
    population = Population(scheduler, 2)
    population.report("t1", 4, 1.0)
    with pytest.raises(ConfigError, match=r"PB2\(hyperparam_bounds\['lr'\]\) bounds a number"):
        population.report("t0", 4, 0.0)


def test_other_arguments_are_checked_as_those_of_pbt() -> None:
    with pytest.raises(ConfigError, match=r"PB2\(quantile_fraction=0.6\)"):
        pb2(quantile_fraction=0.6)


def test_missing_numpy_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ConfigError, match=r"PB2 needs numpy.*pip install 'numpy>=2'"):
        make_scheduler(pb2(), "score", "max", 1)


def test_scheduler_has_a_name() -> None:
    assert isinstance(create_scheduler("pb2", hyperparam_bounds=BOUNDS, log_config=False), PB2)
