"""Population based training: who learns from whom, and how configurations change."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.schedulers.population.populations import VALUES, Population
from tunemq import CheckpointConfig, RunConfig, Trainable, TuneConfig, loguniform, uniform
from tunemq_scheduler.experiment.start_checks import prepare
from tunemq_scheduler.schedulers import (
    Exploit,
    PopulationBasedTraining,
    Resume,
    create_scheduler,
)
from tunemq_scheduler.schedulers.population.explore import Explorer, changes
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import Condition


def pbt(**options: Any) -> PopulationBasedTraining:
    return PopulationBasedTraining(
        **{
            "time_attr": "training_iteration",
            "perturbation_interval": 4,
            "hyperparam_mutations": {"lr": uniform(0, 1), "width": VALUES},
            **options,
        }
    )


def test_one_of_the_worst_continues_from_one_of_the_best_with_another_configuration() -> None:
    population = Population(pbt(), 4)
    for number in (1, 2, 3):
        assert population.report(f"t{number}", 4, number) == ("CONTINUE", [])
    decision, (action,) = population.report("t0", 4, 0)
    assert decision == "CONTINUE"
    assert (action.trial_id, action.source) == ("t0", "t3")
    assert action.config != {"lr": 0.4, "width": 8}
    assert action.reason.startswith(
        "score 3 against 0, which is among the worst 1 of 4 at training_iteration 4; lr 0.1 to "
    )


def test_trial_is_compared_once_each_interval_and_not_before_the_burn_in() -> None:
    scheduler = pbt(burn_in_period=6)
    population = Population(scheduler, 2)
    trial = population.trials["t0"]
    assert scheduler.horizon(trial) == (Condition("training_iteration", 6),)
    population.report("t1", 6, 1.0)
    assert population.report("t0", 5, 0.0) == ("CONTINUE", [])
    assert len(population.report("t0", 6, 0.0)[1]) == 1
    assert scheduler.horizon(trial) == (Condition("training_iteration", 10),)


def test_trial_that_continues_from_another_is_compared_an_interval_behind_that_ones_last() -> None:
    scheduler = pbt()
    population = Population(scheduler, 2)
    population.report("t1", 4, 1.0)
    population.report("t1", 8, 1.0)
    population.report("t0", 4, 0.0)
    assert scheduler.horizon(population.trials["t0"]) == (Condition("training_iteration", 12),)


@pytest.mark.parametrize("may_add", [True, False])
def test_trial_gives_its_slot_away_while_others_wait_or_may_come(may_add: bool) -> None:
    population = Population(pbt(), 2)
    population.may_add = may_add
    if not may_add:
        population.trials["t1"].status = "PENDING"
    decision, _ = population.report("t0", 4, 0.0)
    assert (decision, decision.reason) == (
        "PAUSE",
        "it gives its slot to the next trial (score 0, rank 1 of 1)",
    )


def test_synchronous_population_waits_for_its_slowest_and_then_continues() -> None:
    scheduler = pbt(synch=True)
    population = Population(scheduler, 4)
    for number in range(3):
        decision, _ = population.report(f"t{number}", 4, number)
        left = 3 - number
        assert decision == "PAUSE"
        assert decision.reason == f"it waits for {left} of 4 trials to reach training_iteration 4"
        population.trials[f"t{number}"].status = "PAUSED"
    assert scheduler.choose_trial_to_run(population) is None
    decision, actions = population.report("t3", 5, 3)
    assert decision == "CONTINUE"
    assert [(one.trial_id, one.source) for one in actions if isinstance(one, Exploit)] == [
        ("t0", "t3")
    ]
    assert [one.trial_id for one in actions if isinstance(one, Resume)] == ["t0", "t1", "t2"]
    assert scheduler.horizon(population.trials["t1"]) == (Condition("training_iteration", 9),)


@pytest.mark.parametrize("ended_at", [4, 7, 8, 9, 11])
def test_synchronous_population_that_is_extended_stays_synchronous(ended_at: int) -> None:
    scheduler = pbt(synch=True)
    population = Population(scheduler, 3)
    for trial in population.trials.values():
        trial.last_result = {"training_iteration": ended_at, "score": 1.0}
        scheduler.on_trial_complete(population, trial, trial.last_result)
    for trial in population.trials.values():
        scheduler.on_trial_add(population, trial)
    due = 8 if ended_at < 8 else 12
    for trial in population.trials.values():
        assert scheduler.horizon(trial) == (Condition("training_iteration", due),)
    for left, score in ((2, 5), (1, 3)):
        decision, actions = population.report(f"t{left}", due, score)
        told = f"it waits for {left} of 3 trials to reach training_iteration {due}"
        assert (decision, decision.reason, actions) == ("PAUSE", told, [])
    _, actions = population.report("t0", due, 9)
    assert [type(one) for one in actions] == [Exploit, Resume, Resume]
    assert scheduler.horizon(population.trials["t0"]) == (Condition("training_iteration", due + 4),)


def test_further_trials_of_a_synchronous_population_that_ended_are_perturbed() -> None:
    scheduler = pbt(synch=True)
    population = Population(scheduler, 2)
    population.report("t0", 4, 0)
    population.report("t1", 4, 1)
    for trial in population.trials.values():
        scheduler.on_trial_complete(population, trial, trial.last_result)
        trial.last_result = {}
    for trial in population.trials.values():
        scheduler.on_trial_add(population, trial)
    population.report("t0", 4, 0)
    assert [type(one) for one in population.report("t1", 4, 1)[1]] == [Exploit, Resume]


@pytest.mark.parametrize("steps_before", [0, 4])
def test_trials_that_follow_a_synchronous_population_one_by_one_are_perturbed(
    steps_before: int,
) -> None:
    """As with max_concurrent_trials, and fewer of them than trials."""
    scheduler = pbt(synch=True)
    population = Population(scheduler, 3)
    for step in (4, 8):
        for number in range(3):
            population.report(f"t{number}", step, number)
    old = list(population.trials.values())
    for trial in old:
        new = copy.copy(trial)
        new.trial_id, new.number, new.last_result = f"n{trial.number}", 3 + trial.number, {}
        scheduler.on_trial_complete(population, trial, trial.last_result)
        population.trials[new.trial_id] = new
        scheduler.on_trial_add(population, new)
        if steps_before and trial is old[0]:
            assert population.report("n0", steps_before, 0.0) == ("CONTINUE", [])
    step = 4 + steps_before
    population.report("n0", step, 0)
    population.report("n1", step, 1)
    assert [type(one) for one in population.report("n2", step, 2)[1]] == [Exploit, Resume, Resume]


@pytest.mark.parametrize("end", ["complete", "error", "remove"])
def test_synchronous_population_does_not_wait_for_a_trial_that_ended(end: str) -> None:
    scheduler = pbt(synch=True)
    population = Population(scheduler, 3)
    population.report("t0", 4, 0)
    population.report("t1", 4, 1)
    last = population.trials.pop("t2")
    args = (last, {}) if end == "complete" else (last,)
    answer = getattr(scheduler, f"on_trial_{end}")(population, *args)
    assert [type(one) for one in answer] == [Exploit, Resume, Resume]


def test_synchronous_population_continues_without_trials_that_cannot_come() -> None:
    scheduler = pbt(synch=True)
    population = Population(scheduler, 2)
    population.may_add = True
    assert population.report("t0", 4, 0)[0] == "PAUSE"
    assert population.report("t1", 4, 1)[0] == "PAUSE"
    assert [type(one) for one in scheduler.on_stall(population)] == [Exploit, Resume, Resume]
    population.report("t0", 8, 0)
    assert [type(one) for one in scheduler.on_stall(population)] == [Resume]


def test_state_continues_with_the_same_draws() -> None:
    one, other = (Population(pbt(), 6) for _ in range(2))
    rng = random.Random(1)
    history = [(f"t{rng.randrange(6)}", 4 * turn, rng.random()) for turn in range(1, 60)]
    for name, step, score in history[:30]:
        assert one.report(name, step, score) == other.report(name, step, score)
    fresh = pbt()
    fresh.set_search_properties("score", "max", seed=0)
    fresh.set_state(one.scheduler.get_state())
    one.scheduler = fresh
    for name, step, score in history[30:]:
        assert one.report(name, step, score) == other.report(name, step, score)
    assert fresh.get_state() == other.scheduler.get_state()


class Reference:
    """Section 3 of the paper: truncation selection among all that have a score."""

    def __init__(self, size: int, fraction: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fraction = fraction
        self.scores: dict[int, float] = {}
        self.due = dict.fromkeys(range(size), 4)

    def report(self, number: int, step: int, score: float) -> int | None:
        """Return the donor, if the trial is one of the worst."""
        if step < self.due[number]:
            return None
        self.scores[number] = score
        self.due[number] = step + 4
        order = sorted(self.scores, key=lambda one: (self.scores[one], one))
        size = min(math.ceil(self.fraction * len(order)), len(order) // 2)
        if number not in order[:size]:
            return None
        donor = self.rng.choice(order[-size:])
        for _ in range(2):  # resampling is off: one draw for each value, and one for its factor
            self.rng.random()
            self.rng.choice((0, 1))
        self.due[number] = self.due[donor]
        return donor


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=60),
    st.sampled_from([0.1, 0.25, 0.5]),
    st.integers(0, 10),
)
def test_pbt_takes_the_same_donors_as_a_reference(
    history: list[tuple[int, int]], fraction: float, seed: int
) -> None:
    population = Population(pbt(quantile_fraction=fraction, resample_probability=0), 6, seed)
    reference = Reference(6, fraction, seed)
    steps = dict.fromkeys(range(6), 0)
    for number, score in history:
        steps[number] += 2
        _, actions = population.report(f"t{number}", steps[number], score)
        donor = reference.report(number, steps[number], score)
        assert [one.source for one in actions] == ([] if donor is None else [f"t{donor}"])
        if donor is not None:
            steps[number] = reference.due[number] - 4


@given(st.integers(0, 10_000))
def test_explored_values_are_neighbours_or_scaled_or_drawn_anew(seed: int) -> None:
    config = {"lr": 0.1, "width": 4, "layers": 3, "inner": {"act": "relu"}, "kept": object}
    explorer = Explorer(
        {
            "lr": loguniform(1e-4, 1),
            "width": VALUES,
            "layers": lambda: 9.7,
            "inner": {"act": ("tanh", "relu")},
        },
        0.3,
        (1.5, 0.5),
        lambda new: {**new, "custom": True},
    )
    new = explorer.explore(config, random.Random(seed))
    assert config == {"lr": 0.1, "width": 4, "layers": 3, "inner": {"act": "relu"}, "kept": object}
    assert new["lr"] in {0.1 * 1.5, 0.1 * 0.5} or 1e-4 <= new["lr"] <= 1
    assert new["width"] in VALUES
    assert new["layers"] in {round(4.5), round(1.5), 10}
    assert isinstance(new["layers"], int)
    assert new["inner"]["act"] in {"tanh", "relu"}
    assert (new["kept"], new["custom"]) == (object, True)


def test_changes_name_each_value_with_its_old_and_its_new_one() -> None:
    before = {"lr": 0.01, "inner": {"act": "relu"}, "same": 1}
    after = {"lr": 0.012, "inner": {"act": "tanh"}, "same": 1}
    mutations = {"lr": uniform(0, 1), "inner": {"act": ["relu", "tanh"]}, "same": [1]}
    assert changes(before, after, mutations) == "lr 0.01 to 0.012, inner/act 'relu' to 'tanh'"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"perturbation_interval": 0.5}, "perturbation_interval=0.5.*at least 1"),
        ({"perturbation_interval": 0, "time_attr": "time_total_s"}, "a number above 0"),
        ({"burn_in_period": -1}, "burn_in_period=-1.*at least 0"),
        ({"burn_in_period": math.nan}, "burn_in_period=nan"),
        ({"quantile_fraction": 0.6}, "quantile_fraction=0.6.*from 0 to 0.5"),
        ({"resample_probability": 2}, "resample_probability=2.*from 0 to 1"),
        ({"perturbation_factors": (1.2,)}, "give two positive numbers"),
        ({"perturbation_factors": (1.2, -1)}, "give two positive numbers"),
        ({"hyperparam_mutations": {}}, "needs hyperparam_mutations"),
        ({"hyperparam_mutations": {"lr": []}}, r"hyperparam_mutations\['lr'\]=\[\]\) is empty"),
        ({"hyperparam_mutations": {"lr": 3}}, "give a domain such as"),
        ({"hyperparam_mutations": {"a": {"b": 3}}}, r"hyperparam_mutations\['a'\]\['b'\]=3"),
        ({"hyperparam_mutations": {"a": {}}}, "is empty: name the values"),
        ({"mode": "best"}, "mode"),
    ],
)
def test_invalid_argument_is_refused_with_the_fix(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        pbt(**options)


@pytest.mark.parametrize(
    ("mutations", "told"),
    [
        ({"rate": uniform(0, 1)}, "add 'rate' to param_space, which has 'lr', 'width'"),
        ({"lr": {"inner": [1]}}, "is a dict, and the configuration has 0.1"),
    ],
)
def test_mutation_of_a_value_that_is_not_in_the_space_is_refused(
    mutations: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Population(pbt(hyperparam_mutations=mutations), 1)


def test_result_without_the_metric_is_an_error_unless_it_may_lack() -> None:
    with pytest.raises(ConfigError, match="needs a number for score, and trial t0 reported"):
        Population(pbt(), 1).report("t0", 4, None)
    assert Population(pbt(require_attrs=False), 1).report("t0", 4, None) == ("CONTINUE", [])


def test_nan_is_worse_than_every_number() -> None:
    population = Population(pbt(), 2)
    population.report("t1", 4, -1e300)
    assert [one.source for one in population.report("t0", 4, math.nan)[1]] == ["t1"]


def test_scheduler_has_a_name() -> None:
    created = create_scheduler("pbt", hyperparam_mutations={"lr": [1, 2]}, log_config=True)
    assert isinstance(created, PopulationBasedTraining)


class Step(Trainable):
    def step(self) -> dict[str, Any]:
        return {"score": 1}


@pytest.mark.parametrize(("given", "taken"), [(0, 4), (3, 3)])
def test_class_saves_at_each_perturbation_unless_its_frequency_is_set(
    given: int, taken: int
) -> None:
    tune = TuneConfig(metric="score", mode="max", scheduler=pbt())
    run = RunConfig(checkpoint_config=CheckpointConfig(checkpoint_frequency=given))
    prepared = prepare(Step, {"lr": 1.0, "width": 1}, tune, run)
    assert prepared.run.checkpoint_config.checkpoint_frequency == taken


def test_class_without_checkpoints_is_refused_where_the_scheduler_knows_no_frequency() -> None:
    scheduler = pbt(time_attr="time_total_s")
    tune = TuneConfig(metric="score", mode="max", scheduler=scheduler)
    with pytest.raises(
        ConfigError, match=r"Step saves none: set time_attr=.training_iteration.*CheckpointConfig"
    ):
        prepare(Step, {"lr": 1.0, "width": 1}, tune, RunConfig())
