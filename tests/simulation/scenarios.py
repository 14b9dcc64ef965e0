"""The faults of each simulated search, by scenario name; runs one search:

python -m tests.simulation.scenarios everything 1234
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.simulation.faulty_farms import LOCAL, FaultySearch
from tunemq.testing.journal_replay import compare
from tunemq.testing.simulated_faults import FaultSettings
from tunemq.testing.simulated_uploads import UploadSettings
from tunemq_scheduler.schedulers import (
    PB2,
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from tunemq_scheduler.search.domains import loguniform
from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition

MAX_T: Final = 9
#: Seeds that once failed, which every run repeats. A line is a scenario, a seed, and its failure.
SEEDS: Final = Path(__file__).with_name("seeds.txt")

SLOW = UploadSettings(upload_s=10.0, unchanged=0.5)
BAD = UploadSettings(upload_s=3.0, unchanged=0.5, lost=0.03, damaged=0.1)


def asha() -> TrialScheduler:
    return ASHAScheduler(max_t=MAX_T, grace_period=1, reduction_factor=3)


def hyperband() -> TrialScheduler:
    return HyperBandScheduler(max_t=MAX_T, reduction_factor=3)


class Pausing(FIFOScheduler):
    """Pause each trial at every third step; resume the longest waiting first."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        return self.PAUSE if result["training_iteration"] % 3 == 0 else self.CONTINUE

    def horizon(self, trial: Any) -> Any:
        done = trial.last_result.get("training_iteration", 0)
        return (Condition("training_iteration", done - done % 3 + 3),)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


SCHEDULERS: Final = (FIFOScheduler, asha, Pausing)
#: Numbers of trials that make more than 300 events with each scheduler.
TRIALS: Final = (13, 36, 11)


def _search(seed: int, faults: FaultSettings, **options: Any) -> FaultySearch:
    """One with a trial scheduler and uploads that depend on the seed, unless these are given."""
    kind = seed % 3
    make = options.pop("make_scheduler", SCHEDULERS[kind])
    trials = options.pop("trials", TRIALS[kind])
    options.setdefault("uploads", (LOCAL, SLOW, BAD)[seed // 3 % 3])
    options.setdefault("max_t", MAX_T)
    return FaultySearch(make, seed=seed, faults=faults, trials=trials, **options)


def undisturbed(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings())


def f01_nodes_die(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(node_deaths=5, until_s=25.0))


def f02_trial_processes_die(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(process_deaths=12, until_s=25.0))


def f03_schedulers_die(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(until_s=25.0), scheduler_deaths=4)


def f04_power_cuts(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(until_s=25.0), power_cuts=3)


def f06_wipes(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(wipes=5, lost=0.1, until_s=25.0), scheduler_deaths=1)


def f08_cut_off(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(cut_offs=6, outages=1, until_s=25.0))


def f11_zombies_of_a_lineage(seed: int) -> FaultySearch:
    """Trials of lost nodes end in ERROR and restart; then the nodes come back."""
    faults = FaultSettings(cut_offs=9, cut_off_s=20.0, until_s=25.0)
    options: dict[str, Any] = {"scheduler_deaths": 3, "errored": "restart"}
    return _search(seed, faults, **options, max_node_losses=0)


def f02_trial_processes_die_at_the_end(seed: int) -> FaultySearch:
    """Processes, nodes and schedulers die while trials clean up after their last checkpoint."""
    faults = FaultSettings(
        cleanup_s=3.0, process_deaths=12, node_deaths=3, cut_offs=2, linger_s=0.5, until_s=40.0
    )
    return _search(seed, faults, max_t=8, scheduler_deaths=1, power_cuts=1, interrupts=1)


def f12_doubled(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(doubled=0.5))


def f13_late_and_lost(seed: int) -> FaultySearch:
    return _search(seed, FaultSettings(lost=0.2, late=0.4, late_s=3.0))


def f14_behind_the_end(seed: int) -> FaultySearch:
    faults = FaultSettings(latency_s=1.5, late=0.3, linger_s=1.0, until_s=25.0)
    return _search(seed, faults, stops=5)


def f15_clocks(seed: int) -> FaultySearch:
    faults = FaultSettings(skew_s=3600.0, cut_offs=2, until_s=25.0)
    return _search(seed, faults, clock_jumps=3, scheduler_deaths=1)


def f22_poison(seed: int) -> FaultySearch:
    """Trials end in ERROR, and a scheduler that resumes the search retries them, or not."""
    faults = FaultSettings(process_deaths=8, node_deaths=2, cut_offs=3, until_s=25.0)
    return _search(
        seed,
        faults,
        scheduler_deaths=2,
        interrupts=1,
        errored=("", "resume", "restart")[seed // 2 % 3],
        max_failures=1,
        max_node_losses=1,
        max_storage_failures=0,
    )


def f23_bad_devices(seed: int) -> FaultySearch:
    """GPUs are withheld, and used again, while nodes and schedulers come and go."""
    faults = FaultSettings(
        bad_devices=12, node_deaths=2, cut_offs=3, late=0.2, linger_s=0.5, until_s=25.0
    )
    gpus = tuple(
        tuple(m.Gpu(f"{kind}{node}-{place}", "A100", 80e9) for place in range(2))
        for node, kind in enumerate(("GPU-", "MIG-", "GPU-"))
    )
    request = {"cpu": 1.0, "gpu": (0.5, 1.0, 2.0)[seed // 3 % 3]}
    return _search(seed, faults, gpus=gpus, request=request, cpus=4.0, scheduler_deaths=2)


def hyperband_with_everything(seed: int) -> FaultySearch:
    """All faults at once, while trials pause, and others resume and stop them."""
    return everything(seed, make_scheduler=hyperband, trials=36)


def bohb_with_everything(seed: int) -> FaultySearch:
    """All faults at once, while a model of all results suggests configurations."""

    def hyperband_for_bohb() -> TrialScheduler:
        return HyperBandForBOHB(max_t=MAX_T, reduction_factor=3)

    return everything(seed, make_scheduler=hyperband_for_bohb, make_search=TuneBOHB, trials=36)


def pbt_with_everything(seed: int) -> FaultySearch:
    """All faults at once, while trials take over the states of others."""

    def pbt() -> TrialScheduler:
        mutations = {"lr": loguniform(1e-4, 1.0)}
        return PopulationBasedTraining(
            "training_iteration",
            perturbation_interval=3,
            hyperparam_mutations=mutations,
            synch=bool(seed % 2),
        )

    return everything(seed, make_scheduler=pbt, trials=16)


def pb2_with_everything(seed: int) -> FaultySearch:
    """All faults at once, while a model of all trials chooses configurations."""

    def pb2() -> TrialScheduler:
        return PB2(
            "training_iteration",
            perturbation_interval=3,
            hyperparam_bounds={"lr": [1e-4, 1.0]},
            synch=bool(seed % 2),
        )

    return everything(seed, make_scheduler=pb2, trials=16)


def everything(seed: int, **options: Any) -> FaultySearch:
    """All at once, more of this or of that; of a FIFO search nothing is stopped or given up."""
    rng = random.Random(f"{seed}/everything")
    faults = FaultSettings(
        latency_s=rng.choice([0.0, 0.05, 0.5]),
        lost=rng.choice([0.0, 0.05, 0.2]),
        doubled=rng.choice([0.0, 0.05, 0.2]),
        late=rng.choice([0.0, 0.1, 0.3]),
        node_deaths=rng.randrange(4),
        process_deaths=rng.randrange(5),
        cut_offs=rng.randrange(5),
        outages=rng.randrange(2),
        wipes=rng.randrange(3),
        linger_s=rng.choice([0.0, 0.1, 2.0]),
        skew_s=3600.0,
        until_s=25.0,
        cleanup_s=rng.choice([0.0, 0.0, 2.0]),
    )
    if seed % 3:
        options |= {
            "stops": rng.randrange(3),
            "max_failures": rng.choice([-1, 1]),
            "max_node_losses": rng.choice([-1, 1]),
            "max_storage_failures": rng.choice([-1, 0]),
            "errored": rng.choice(["", "resume", "restart"]),
        }
    return _search(
        seed,
        faults,
        nodes=rng.choice([2, 3, 4]),
        cpus=rng.choice([1.0, 2.0]),
        scheduler_deaths=rng.randrange(3),
        power_cuts=rng.choice([0, 0, 1]),
        interrupts=rng.choice([0, 0, 1]),
        clock_jumps=rng.choice([0, 1]),
        **options,
    )


SCENARIOS: Final[dict[str, Callable[[int], FaultySearch]]] = {
    make.__name__: make
    for make in (
        undisturbed,
        f01_nodes_die,
        f02_trial_processes_die,
        f02_trial_processes_die_at_the_end,
        f03_schedulers_die,
        f04_power_cuts,
        f06_wipes,
        f08_cut_off,
        f11_zombies_of_a_lineage,
        f12_doubled,
        f13_late_and_lost,
        f14_behind_the_end,
        f15_clocks,
        f22_poison,
        f23_bad_devices,
        everything,
        hyperband_with_everything,
        bohb_with_everything,
        pbt_with_everything,
        pb2_with_everything,
    )
}


def check(scenario: str, seed: int) -> FaultySearch:
    """Run one search with all invariants after each event, and check its outcome.

    The lock-step replay shows that its decisions are those of an undisturbed search with the same
    results; and if the algorithms decide nothing, that the results themselves are the same.
    """
    search = SCENARIOS[scenario](seed)
    try:
        search.run()
        compare(search.outcome(), search.outcome_in_lock_step())
        if search.is_exact:
            assert search.results() == search.expected(), "I10: results are missing, or others"
    except Exception as error:
        error.add_note(f"once more: python -m tests.simulation.scenarios {scenario} {seed}")
        raise
    return search


def kept_seeds() -> list[tuple[str, int]]:
    """The seeds that once failed."""
    lines = [line.partition("#")[0].split() for line in SEEDS.read_text().splitlines()]
    return [(line[0], int(line[1])) for line in lines if line]


if __name__ == "__main__":
    found = check(sys.argv[1], int(sys.argv[2]))
    print(f"{found.auditor.events} events, {found.lives} schedulers: all invariants held")
