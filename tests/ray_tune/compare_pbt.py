"""Feed the same histories to Ray Tune's population based training and to ours, with equal draws.

Compared are, after each result, who continues from whom, the new configuration, and the progress at
which each trial is perturbed next. The models of PB2 differ: there both keep the bounds. Run it by
`make parity`, or with Ray Tune and scikit-learn: ``python -m tests.ray_tune.compare_pbt``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
from types import SimpleNamespace
from typing import Any

from ray.tune import schedulers as ray
from ray.tune.schedulers import pb2 as ray_pb2

from tunemq_scheduler.schedulers import PB2, Exploit, PopulationBasedTraining, read_answer

#: A trial, the one from which it continues, and its new configuration.
Exploited = tuple[str, str, dict[str, Any]]


class Trial:
    """What both schedulers see of a trial."""

    def __init__(self, number: int, config: dict[str, Any]) -> None:
        self.number, self.trial_id, self.config = number, f"t{number}", dict(config)
        self.status, self.experiment_tag = "RUNNING", ""
        self.last_result: dict[str, Any] = {}
        self.evaluated_params: dict[str, Any] = {}
        manager = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
        self.run_metadata = SimpleNamespace(checkpoint_manager=manager)
        self.temporary_state = SimpleNamespace(saving_to=None)
        self.checkpoint = "checkpoint"

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag

    def is_finished(self) -> bool:
        return False


class RaySide:
    """Ray Tune's scheduler, and the controller that it sees."""

    search_alg = None

    def __init__(
        self, kind: type, options: dict[str, Any], configs: list[dict[str, Any]], seed: int
    ) -> None:
        self.scheduler = kind(log_config=False, **options)
        self.trials = [Trial(number, config) for number, config in enumerate(configs)]
        self.random = random.Random(seed).getstate()
        self.exploited: list[Exploited] = []
        exploit = self.scheduler._exploit

        def recorded(controller: Any, trial: Trial, source: Trial) -> None:
            exploit(controller, trial, source)
            self.exploited.append((trial.trial_id, source.trial_id, dict(trial.config)))

        self.scheduler._exploit = recorded
        for trial in self.trials:
            self.scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[Trial]:
        return self.trials

    get_live_trials = get_trials

    def pause_trial(self, trial: Trial, should_checkpoint: bool) -> None:
        trial.status = "PAUSED"

    def _schedule_trial_save(self, trial: Trial, result: Any) -> str:
        return "checkpoint"

    def report(self, number: int, result: dict[str, Any]) -> list[Exploited]:
        trial, self.exploited = self.trials[number], []
        trial.status, trial.last_result = "RUNNING", result
        for state in self.scheduler._trial_state.values():
            state.last_checkpoint = "checkpoint"  # each trial has saved one
        random.setstate(self.random)
        self.scheduler.on_trial_result(self, trial, dict(result))
        self.random = random.getstate()
        return self.exploited

    def times(self) -> list[tuple[float, float]]:
        """When each trial was perturbed last, and how far it had trained."""
        states = (self.scheduler._trial_state[trial] for trial in self.trials)
        return [(one.last_perturbation_time, one.last_train_time) for one in states]


class OurSide:
    """Our scheduler, and the runner that it sees."""

    def __init__(
        self, kind: type, options: dict[str, Any], configs: list[dict[str, Any]], seed: int
    ) -> None:
        self.scheduler = kind(**options)
        self.scheduler.set_search_properties(None, None, seed=seed)
        self.trials = [Trial(number, config) for number, config in enumerate(configs)]
        for trial in self.trials:
            self.scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[Trial]:
        return self.trials

    def get_trial(self, trial_id: str) -> Trial:
        return self.trials[int(trial_id[1:])]

    def has_waiting(self) -> bool:
        return False

    def expects_trials(self) -> bool:
        return False

    def waiting(self) -> list[Trial]:
        return []

    def report(self, number: int, result: dict[str, Any]) -> tuple[list[Exploited], str]:
        trial = self.trials[number]
        trial.last_result = result
        answer = self.scheduler.on_trial_result(self, trial, dict(result))
        decision, actions = read_answer(self.scheduler, "on_trial_result", answer, trial.trial_id)
        exploited = []
        for action in actions:
            if isinstance(action, Exploit):
                assert action.config is not None
                self.get_trial(action.trial_id).config = action.config
                exploited.append((action.trial_id, action.source, action.config))
        return exploited, str(decision)

    def times(self) -> list[tuple[float, float]]:
        members = self.scheduler.get_state()["members"]
        return [(members[one.trial_id][3], members[one.trial_id][2]) for one in self.trials]


class OurPB2(PB2):
    """PB2 whose model draws apart, so that the draws of donors are those of Ray Tune."""

    def _chosen(self, time: float, score: float | None) -> list[float]:
        kept, self._rng = self._rng, random.Random(time)
        try:
            return super()._chosen(time, score)
        finally:
            self._rng = kept


#: The bounds of PB2's values.
BOUNDS = {"lr": [0.0, 1.0], "layers": [1, 9]}


def drawn(rng: random.Random, *, is_pb2: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw the arguments of a scheduler, and the configurations of its trials."""
    options: dict[str, Any] = {
        "time_attr": "training_iteration",
        "metric": "score",
        "mode": rng.choice(["min", "max"]),
        "perturbation_interval": rng.choice([1, 2, 5]),
        "quantile_fraction": rng.choice([0.1, 0.25, 0.5]),
    }
    if is_pb2:
        configs = [
            {"lr": rng.random(), "layers": rng.randint(1, 9)} for _ in range(rng.randint(2, 8))
        ]
        return options | {"hyperparam_bounds": BOUNDS}, configs
    options |= {
        "burn_in_period": rng.choice([0, 0, 4]),
        "resample_probability": rng.choice([0.0, 0.25, 1.0]),
        "hyperparam_mutations": {
            "lr": lambda: 0.5,
            "width": [1, 2, 4, 8],
            "layers": lambda: 3,
            "inner": {"act": ("relu", "tanh"), "flag": lambda: True},
        },
    }
    configs = [
        {
            "lr": rng.random(),
            "width": rng.choice([1, 2, 4, 8, 16]),
            "layers": rng.randint(1, 9),
            "inner": {"act": "relu", "flag": rng.random() < 0.5},
        }
        for _ in range(rng.randint(1, 20))
    ]
    return options, configs


def within_bounds(exploited: list[Exploited]) -> list[tuple[str, str, bool]]:
    """Return whether each new configuration of PB2 keeps the bounds, in its place."""
    return [
        (trial, source, all(low <= config[name] <= high for name, (low, high) in BOUNDS.items()))
        for trial, source, config in exploited
    ]


def compare(seed: int, *, synch: bool, is_pb2: bool = False) -> int:
    """Play one history; return how many trials continued from another.

    Raises:
        AssertionError: a decision differs; the message has the history.
    """
    rng = random.Random(f"{synch}/{seed}")
    options, configs = drawn(rng, is_pb2=is_pb2)
    options["synch"] = synch
    count = len(configs)
    kinds = (
        (ray_pb2.PB2, OurPB2) if is_pb2 else (ray.PopulationBasedTraining, PopulationBasedTraining)
    )
    theirs, mine = (
        RaySide(kinds[0], options, configs, seed),
        OurSide(kinds[1], options, configs, seed),
    )
    steps, paused = [0] * count, set[int]()
    story: list[str] = []
    total = 0
    for _ in range(count * (10 if is_pb2 else 30)):
        number = rng.choice([one for one in range(count) if one not in paused])
        steps[number] += rng.choice([1, 1, 1, 2])
        score = rng.choice([rng.random(), float(rng.randint(0, 3))])
        result = {"training_iteration": steps[number], "score": score}
        told, (said, decision) = theirs.report(number, result), mine.report(number, result)
        story.append(f"{number} reports {steps[number]}: {score}")
        compared = (told, said)
        if is_pb2:
            compared = (within_bounds(told), within_bounds(said))
            assert all(one[2] for one in compared[1]), f"seed {seed}: beyond the bounds: {said}"
        assert (compared[0], theirs.times()) == (compared[1], mine.times()), (
            f"seed {seed}, synch={synch}: Ray Tune has {told} {theirs.times()}, we have {said} "
            f"{mine.times()}; {options}; history: {story}"
        )
        if decision == "PAUSE":
            paused.add(number)
        elif synch and paused:
            paused.clear()
        for trial, source, _ in said:
            steps[int(trial[1:])] = steps[int(source[1:])]
        total += len(said)
    return total


def main() -> None:
    """Compare both modes on a number of histories each; PB2, which is slow there, on a few."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    options = parser.parse_args()
    logging.disable()  # Ray Tune tells of each step
    failed = False
    for is_pb2, synch in itertools.product((False, True), (False, True)):
        name = f"{'PB2' if is_pb2 else 'PopulationBasedTraining'}(synch={synch})"
        count = -(-options.histories // 200) if is_pb2 else options.histories
        try:
            total = sum(compare(seed, synch=synch, is_pb2=is_pb2) for seed in range(count))
        except AssertionError as difference:
            failed = True
            print(difference)
        else:
            print(f"{name}: {count} histories, {total} exploits, all the same")
    sys.exit(failed)


if __name__ == "__main__":
    main()
