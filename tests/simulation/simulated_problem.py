"""The problem of simulated searches: a learning rate, and curves of different height and speed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from tests.support.searches.plans import PLAN
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.schedulers import TrialScheduler
from tunemq_scheduler.search import (
    BasicVariantGenerator,
    Searcher,
    SearchGenerator,
    loguniform,
)
from tunemq_scheduler.stopping.stopper import Stopper
from tunemq_shared.protocol.result_conditions import Condition

SPACE: Final = {"lr": loguniform(1e-4, 1.0)}


def noise(*parts: object) -> float:
    """A number in [0, 1) that depends on ``parts`` only."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class Problem:
    """A search problem: `trials` trials of up to ``max_t`` steps each, and its algorithms.

    Attributes:
        plan: the arguments that open the search's executor.
    """

    def __init__(
        self,
        make_scheduler: Callable[[], TrialScheduler],
        *,
        seed: int,
        trials: int,
        max_t: int,
        make_search: Callable[[], Searcher] = BasicVariantGenerator,
        make_stopper: Callable[[], Stopper | None] = lambda: None,
    ) -> None:
        stop = (Condition("training_iteration", max_t),)
        self.plan = msgspec.structs.replace(PLAN, stop=stop, checkpoint_frequency=2)
        self._make_scheduler = make_scheduler
        self._make_search, self._make_stopper = make_search, make_stopper
        self._seed, self._trials = seed, trials
        self._curve = functools.cache(self._find_curve)

    def algorithms(self, *, lock_step: bool = False) -> AlgorithmDriver:
        """Fresh ones, which have decided nothing yet."""
        search = SearchGenerator(
            self._make_search(), SPACE, self._trials, "loss", "min", self._seed
        )
        scheduler = self._make_scheduler()
        scheduler.set_search_properties("loss", "min", seed=self._seed)
        return AlgorithmDriver(
            search=search,
            scheduler=scheduler,
            stopper=self._make_stopper(),
            metric="loss",
            mode="min",
            lock_step=lock_step,
        )

    def metrics(self, config: dict[str, Any], step: int) -> dict[str, Any]:
        """The metrics of a trial with this configuration at a step."""
        level, speed = self._curve(config["lr"])
        return {"loss": level + (1 + speed) / step + 0.05 * noise(self._seed, config["lr"], step)}

    def _find_curve(self, lr: float) -> tuple[float, float]:
        """Where a configuration's losses end, and how far above that they begin."""
        return noise(self._seed, "level", lr), noise(self._seed, lr)

    def step_time(self, config: dict[str, Any], step: int) -> float:
        """For how many seconds it trains until then, from the step before."""
        return 0.5 + noise(self._seed, "time", config["lr"], step)
