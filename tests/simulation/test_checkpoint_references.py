"""Writers, commits, clones, deletions and collections in any order, on a slow store.

The runner and the code that uploads, deletes and collects are real; nodes are simulated one order,
one event and one store operation at a time, and hypothesis draws the next.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, Phase, settings

from tests.simulation.drawn_farm import MOST_TRIALS, Farm
from tunemq_shared.protocol import messages as m

Farm.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=150,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # to explain takes minutes
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)

TestReferences = Farm.TestCase


def walk(seed: int) -> None:
    """Hundreds of steps of which none is left out for long, as hypothesis seldom makes them."""
    rng, farm = random.Random(seed), Farm()
    farm.begin(rng.choice([1, 1, 2, None]), rng.choice([None, None, 2]), rng.random() < 0.5)
    try:
        for _ in range(400):
            which = rng.randrange(1000)
            match rng.randrange(20):
                case 0 if farm.runner.suggested < MOST_TRIALS:
                    farm.suggest()
                case 1 | 2 if any(farm.runner.waiting()):
                    damaged = rng.choice([0] * 8 + [1, 2])
                    farm.start(which, damaged, rng.randrange(1000), rng.random() < 0.5)
                case 3 | 4 | 5 if any(node.events for node in farm.nodes):
                    farm.read_event(which, rng.choice([None] * 20 + [m.PAUSE, m.STOP]))
                case 6:
                    farm.read_everything()
                case 7 | 8 if farm.removals:
                    farm.begin_removal(which)
                case 9 | 10 if farm.removing:
                    farm.continue_removing(which)
                case 11 if not (farm.removals or farm.removing):
                    farm.collect()
                case 12 | 13 | 14 if farm.processes():
                    farm.save(which, rng.randrange(4), rng.random(), 1)
                case 15 | 16 if farm.uploading():
                    farm.continue_uploading(which)
                case 17 if farm.uploading():
                    farm.upload_to_the_end(which)
                case 18 if farm.processes():
                    farm.end(which, rng.random() < 0.9, rng.random() < 0.4)
                case 19 if farm.runner.live and rng.random() < 0.2:
                    farm.forget(which, is_meant=True)
                case 19 if farm.late:
                    farm.arrive_late(which)
                case 19 if farm.uploading():
                    farm.give_up(which, rng.random() < 0.5, rng.random() < 0.3)
                case 19:
                    farm.lose_node(which, rng.random() < 0.5, rng.random() < 0.2)
                case _:
                    pass
            farm.nothing_that_is_kept_lacks_anything()
        farm.settle()
    finally:
        farm.scratch.cleanup()


def test_kept_checkpoints_lack_no_file_on_long_random_walks() -> None:
    for seed in range(15):
        walk(seed)
