"""Trial schedulers and search algorithms that wait, decline or never resume; all are finite."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    TrialScheduler,
)
from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    Searcher,
)
from tunemq_scheduler.stopping.stopper import Stopper

MAX_T: Final = 6


class Pausing(FIFOScheduler):
    """Pause each trial at every second step; resume the longest waiting first."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
        return self.PAUSE if result["training_iteration"] % 2 == 0 else self.CONTINUE

    def horizon(self, trial: Any) -> None:
        return None


class Forgetful(Pausing):
    """Pauses trials, and starts only new ones."""

    def choose_trial_to_run(self, runner: Any) -> Any:
        return next((one for one in runner.waiting() if one.status == "PENDING"), None)


class InStep(Pausing):
    """Pause all existing trials at a step before any of them resumes."""

    def choose_trial_to_run(self, runner: Any) -> Any:
        waiting = list(runner.waiting())
        pending = next((one for one in waiting if one.status == "PENDING"), None)
        if pending is not None:
            return pending
        steps = [one.last_result.get("training_iteration", 0) for one in runner.get_trials()]
        behind = [
            one
            for one in waiting
            if one.last_result.get("training_iteration", 0) == min(steps, default=0)
        ]
        return behind[0] if behind else None


class Declining(FIFOScheduler):
    """Lets nothing start that is not its first three trials."""

    def choose_trial_to_run(self, runner: Any) -> Any:
        return next((one for one in runner.waiting() if one.number < 3), None)


def asha() -> TrialScheduler:
    return ASHAScheduler(max_t=MAX_T, grace_period=1, reduction_factor=2)


def hyperband() -> TrialScheduler:
    return HyperBandScheduler(max_t=MAX_T, reduction_factor=2)


SCHEDULERS: Final[tuple[Callable[[], TrialScheduler], ...]] = (
    FIFOScheduler,
    FIFOScheduler,
    asha,
    Pausing,
    Forgetful,
    InStep,
    Declining,
)


class AfterSome(Stopper):
    """End a trial at its third step, or the whole experiment after a number of results."""

    def __init__(self, results: int) -> None:
        self._results, self._left = results, results

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self._left -= 1
        return self._results % 2 == 0 and result["training_iteration"] >= 3

    def stop_all(self) -> bool:
        return self._left <= 0


class Open(BasicVariantGenerator):
    """A search of unknown length: after ``most`` configurations it returns ``then``.

    With ``batch`` it suggests the next batch of two only when all earlier trials have ended; if
    ``is_stubborn``, it waits for ever for a batch in which a trial failed.
    """

    def __init__(self, most: int, then: str | None, batch: int = 0, is_stubborn: bool = False):
        super().__init__()
        self._most, self._then, self._batch, self._is_stubborn = most, then, batch, is_stubborn
        self._alive: set[str] = set()
        self._has_failed = False

    def suggest(self, trial_id: str) -> Any:
        if self._count >= self._most:
            return self._then
        waits = self._alive or (self._has_failed and self._is_stubborn)
        if self._batch and self._count % self._batch == 0 and waits:
            return None
        self._alive.add(trial_id)
        return super().suggest(trial_id)

    def on_trial_restored(self, trial_id: str, config: dict[str, Any], **spec: Any) -> bool:
        self._alive.add(trial_id)
        return super().on_trial_restored(trial_id, config, **spec)

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self._alive.discard(trial_id)
        self._has_failed |= error

    def get_state(self) -> None:
        return None


class Drawing(Searcher):
    """Draw ``most`` learning rates, then return ``then``."""

    def __init__(self, most: int, then: str | None, seed: int) -> None:
        super().__init__()
        self._left, self._then, self._rng = most, then, random.Random(seed)

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        if self._left <= 0:
            return self._then
        self._left -= 1
        return {"lr": self._rng.uniform(1e-4, 1.0)}

    def on_trial_restored(self, trial_id: str, config: dict[str, Any]) -> bool:
        self._left -= 1
        return True

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass


def draw_search(rng: random.Random, trials: int, seed: int) -> Callable[[], Searcher]:
    """Draw a search algorithm for `trials` trials."""
    limit, batch = rng.choice([1, 2, 3]), rng.random() < 0.3
    finished = Searcher.FINISHED if rng.random() < 0.6 else None
    then = Searcher.FINISHED if rng.random() < 0.6 else None
    stubborn = rng.random() < 0.5
    makes: tuple[Callable[[], Searcher], ...] = (
        BasicVariantGenerator,
        BasicVariantGenerator,
        lambda: ConcurrencyLimiter(BasicVariantGenerator(), limit),
        lambda: Open(trials, then),
        lambda: Open(trials, then, limit, stubborn),
        lambda: Open(0, then),
        lambda: Drawing(trials, finished, seed),
        lambda: ConcurrencyLimiter(Drawing(trials, finished, seed), limit, batch=batch),
    )
    return rng.choice(makes)
