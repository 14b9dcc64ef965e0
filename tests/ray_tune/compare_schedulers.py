"""Feed the same histories to Ray Tune's trial schedulers and to ours, and compare each decision.

After each result of a random trial both must have left all trials in the same states. Run it by
`make parity`, or with Ray Tune installed: ``python -m tests.ray_tune.compare_schedulers``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ray.tune import schedulers as ray

from tunemq_scheduler import schedulers as ours
from tunemq_scheduler.schedulers import TrialScheduler, read_answer

PENDING, RUNNING, PAUSED, TERMINATED = "PENDING", "RUNNING", "PAUSED", "TERMINATED"
_STATUS = {"STOP": TERMINATED, "PAUSE": PAUSED, "RESUME": PENDING}


class Trial:
    """What both schedulers see of a trial."""

    is_saving = False

    def __init__(self, number: int) -> None:
        self.number, self.trial_id = number, f"t{number}"
        self.status = PENDING
        self.config: dict[str, Any] = {}
        self.last_result: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{self.trial_id} {self.status}"


class Side:
    """A scheduler and its own copies of the trials; also the runner that it sees."""

    def __init__(self, scheduler: Any, trials: int) -> None:
        self.scheduler = scheduler
        self.trials = [Trial(number) for number in range(trials)]
        self.reset()

    def reset(self) -> None:
        """Announce the trials."""

    def get_trials(self) -> list[Trial]:
        return self.trials

    def get_live_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status != TERMINATED]

    def states(self) -> list[str]:
        """The states of all trials; PENDING is one that may start."""
        return [trial.status for trial in self.trials]


class RaySide(Side):
    """Ray Tune's scheduler."""

    def reset(self) -> None:
        for trial in self.trials:
            self.scheduler.on_trial_add(self, trial)

    def stop_trial(self, trial: Trial) -> None:
        """As Ray's controller does for a trial that is not running."""
        trial.status = TERMINATED
        self.scheduler.on_trial_remove(self, trial)

    def report(self, number: int, result: dict[str, Any]) -> None:
        trial = self.trials[number]
        trial.status = RUNNING
        trial.last_result = result
        decision = self.scheduler.on_trial_result(self, trial, dict(result))
        if decision in _STATUS:
            trial.status = _STATUS[decision]

    def complete(self, number: int, result: dict[str, Any]) -> None:
        trial = self.trials[number]
        trial.status, trial.last_result = TERMINATED, result
        self.scheduler.on_trial_complete(self, trial, dict(result))

    def states(self) -> list[str]:
        return [self._state(trial) for trial in self.trials]

    def _state(self, trial: Trial) -> str:
        if trial.status != PAUSED or not isinstance(self.scheduler, ray.HyperBandScheduler):
            return trial.status
        bracket, _ = self.scheduler._trial_info[trial]
        if trial in bracket.trials_to_unpause:
            return PENDING
        # Ray pauses trials at their last milestone until all are there, and then stops them.
        return TERMINATED if bracket._halves == 0 else PAUSED


class OurSide(Side):
    """Our scheduler."""

    scheduler: TrialScheduler

    def reset(self) -> None:
        for trial in self.trials:
            self._call("on_trial_add", trial)
        self._call("on_search_exhausted")

    def _call(self, method: str, *args: Any, about: Trial | None = None) -> None:
        told = getattr(self.scheduler, method)(self, *args)
        decision, actions = read_answer(
            self.scheduler, method, told, "" if about is None else about.trial_id
        )
        if about is not None and decision in _STATUS:
            about.status = _STATUS[decision]
        for action in actions:
            trial = self.trials[int(action.trial_id[1:])]
            trial.status = _STATUS[action.word]

    def report(self, number: int, result: dict[str, Any]) -> None:
        trial = self.trials[number]
        trial.status = RUNNING
        trial.last_result = result
        self._call("on_trial_result", trial, result, about=trial)

    def complete(self, number: int, result: dict[str, Any]) -> None:
        trial = self.trials[number]
        trial.status, trial.last_result = TERMINATED, result
        self._call("on_trial_complete", trial, result)


class Case(NamedTuple):
    """Two schedulers with the same arguments, and for how many trials."""

    rays: Any
    ours: TrialScheduler
    trials: int
    #: The most results of a trial, which then completes.
    steps: int


def asha(rng: random.Random) -> Case:
    options = {
        "grace_period": rng.choice([1, 2]),
        "max_t": rng.choice([10, 20, 50]),
        "reduction_factor": rng.choice([2, 3, 4]),
        "stop_last_trials": rng.random() < 0.8,
    }
    return _case(rng, ray.AsyncHyperBandScheduler, ours.AsyncHyperBandScheduler, options, 55)


def hyperband(rng: random.Random) -> Case:
    max_t, factor = rng.choice([(9, 3), (27, 3), (16, 2), (8, 2), (16, 4), (20, 3)])
    options = {"max_t": max_t, "reduction_factor": factor}
    return _case(rng, ray.HyperBandScheduler, ours.HyperBandScheduler, options, max_t + 1)


def median(rng: random.Random) -> Case:
    options = {
        "time_attr": "training_iteration",
        "grace_period": rng.choice([1, 2, 4]),
        "min_samples_required": rng.choice([1, 2, 3]),
        "min_time_slice": rng.choice([0, 0, 2]),
        "hard_stop": rng.random() < 0.7,
    }
    return _case(rng, ray.MedianStoppingRule, ours.MedianStoppingRule, options, 12)


def _case(rng: random.Random, rays: Any, mine: Any, options: dict[str, Any], steps: int) -> Case:
    mode = rng.choice(["min", "max"])
    their = rays(metric="score", mode=mode, **options)
    our = mine(metric="score", mode=mode, **options)
    our.set_search_properties(None, None, seed=0)
    return Case(their, our, rng.randint(1, 40), steps)


CASES: dict[str, Callable[[random.Random], Case]] = {
    "AsyncHyperBandScheduler": asha,
    "HyperBandScheduler": hyperband,
    "MedianStoppingRule": median,
}


def compare(name: str, seed: int) -> int:
    """Play one history; return how many decisions other than CONTINUE it had.

    Raises:
        AssertionError: a decision differs; the message has the history.
    """
    rng = random.Random(f"{name}/{seed}")
    case = CASES[name](rng)
    theirs, mine = RaySide(case.rays, case.trials), OurSide(case.ours, case.trials)
    steps = [0] * case.trials
    # After its first halving, Ray's HyperBand waits for ever for a trial that has completed.
    completes = rng.random() < 0.5 and name != "HyperBandScheduler"
    story: list[str] = []
    decisions = 0
    while numbers := list(_may_report(theirs)):
        number = rng.choice(numbers)
        steps[number] += 1
        step, score = steps[number], rng.choice([rng.random(), float(rng.randint(0, 3))])
        before = mine.states()
        result = {"training_iteration": step, "score": score}
        is_last = step > case.steps or (completes and rng.random() < 0.02)
        for side in (theirs, mine):
            (side.complete if is_last else side.report)(number, result)
        story.append(f"{number} {'completes with' if is_last else 'reports'} {step}: {score}")
        told, said = theirs.states(), mine.states()
        assert told == said, (
            f"{name}, seed {seed}: Ray Tune has {told}, we have {said}; "
            f"{case.ours.__dict__}; history: {story}"
        )
        changes = zip(before, said, strict=True)
        decisions += sum(now not in (was, RUNNING) for was, now in changes)
    return decisions


def _may_report(side: Side) -> Iterator[int]:
    for number, status in enumerate(side.states()):
        if status in (PENDING, RUNNING) or (
            status == PAUSED and isinstance(side.scheduler, ray.MedianStoppingRule)
        ):
            yield number


def main() -> None:
    """Compare all schedulers on a number of histories each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    options = parser.parse_args()
    failed = False
    for name in CASES:
        try:
            total = sum(compare(name, seed) for seed in range(options.histories))
        except AssertionError as difference:
            failed = True
            print(difference)
        else:
            print(f"{name}: {options.histories} histories, {total} decisions, all the same")
    sys.exit(failed)


if __name__ == "__main__":
    main()
