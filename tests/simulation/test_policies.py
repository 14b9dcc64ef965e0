"""Schedules of configurations that populations found: read from the runner, and replayed."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.faulty_farms import FaultySearch
from tests.simulation.scenarios import check, everything
from tunemq.testing.journal_replay import compare
from tunemq_scheduler.schedulers import PopulationBasedTrainingReplay
from tunemq_scheduler.schedulers.population.policies import PolicyStep, policy_of

#: The steps at which the replayed schedule changes, and its values.
SCHEDULE = {0: 0.5, 4: 0.1, 5: 0.9, 17: 0.3, 40: 0.7}
STEPS = 60


def in_effect(policy: list[PolicyStep], step: int) -> dict[str, Any]:
    """Return the configuration with which a step is done."""
    return next(one.config for one in reversed(policy) if one.step < step)


@pytest.mark.parametrize("scenario", ["pbt_with_everything", "pb2_with_everything"])
def test_policy_of_each_trial_gives_the_recorded_results_of_its_states(scenario: str) -> None:
    taken = 0
    for seed in range(16):
        search = check(scenario, seed)
        recorded = defaultdict(list)
        for _, step, metrics in search.outcome().records:
            recorded[step].append(metrics)
        for trial in search._runner.finished:
            summary = search._runner.summary(trial)
            policy = policy_of(search._runner, trial)
            assert [one.step for one in policy] == sorted({one.step for one in policy})
            inherited, last = summary.inherited, summary.last_result
            steps = 0 if last is None else last.step
            if inherited is not None and last is not None and last.attempt <= inherited.attempt:
                steps = inherited.step  # it ended before it continued
            for step in range(1, steps + 1):
                metrics = search.problem.metrics(in_effect(policy, step), step)
                assert metrics in recorded[step]
            taken += len(policy) - 1
    assert taken > 50


def replayed(seed: int, policy_file: Path) -> FaultySearch:
    """Run a replay with all faults at once."""

    def make() -> PopulationBasedTrainingReplay:
        return PopulationBasedTrainingReplay(str(policy_file))

    search = everything(3 * seed, make_scheduler=make, trials=1, max_t=STEPS)
    search.run()
    return search


def test_replay_with_all_faults_has_the_results_of_an_undisturbed_one(tmp_path: Path) -> None:
    file = tmp_path / "pbt_policy_1.txt"
    steps = [*SCHEDULE]
    rows = [
        [
            f"t{n + 1}",
            f"t{n}",
            99,
            steps[n + 1],
            {"lr": SCHEDULE[one]},
            {"lr": SCHEDULE[steps[n + 1]]},
        ]
        for n, one in enumerate(steps[:-1])
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    policy = [PolicyStep(step, {"lr": value}) for step, value in SCHEDULE.items()]
    lives = attempts = 0
    for seed in range(16):
        search = replayed(seed, file)
        compare(search.outcome(), search.outcome_in_lock_step())
        assert search.outcome().records == [
            ("t_00000", step, search.problem.metrics(in_effect(policy, step), step))
            for step in range(1, STEPS + 1)
        ]
        assert policy_of(search._runner, "t_00000") == policy
        lives += search.lives
        attempts += search._runner.summary("t_00000").attempt
    assert lives > 16
    assert attempts > 16 * len(SCHEDULE)
