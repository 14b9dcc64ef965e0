"""`ConcurrencyLimiter`: limits how many trials of a searcher are live at the same time."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.search.algorithm_states import state_of
from tunemq_scheduler.search.objective import Metric, Mode, accepted, check_count
from tunemq_scheduler.search.searcher import Searcher
from tunemq_shared.base.errors import ConfigError


class ConcurrencyLimiter(Searcher):
    """Let ``searcher`` suggest only while fewer than ``max_concurrent`` trials are live.

    Args:
        searcher: the search algorithm.
        max_concurrent: the most live trials, at least 1.
        batch: report ends to the searcher only when all live trials have ended; until then, ended
            trials count as live.
    """

    def __init__(self, searcher: Searcher, max_concurrent: int, batch: bool = False) -> None:
        if not isinstance(searcher, Searcher):
            raise ConfigError(f"ConcurrencyLimiter({searcher!r}): a Searcher is needed.")
        check_count("ConcurrencyLimiter", "max_concurrent", max_concurrent, least=1)
        self.searcher = searcher
        self.max_concurrent = max_concurrent
        self.batch = batch
        self._live: set[str] = set()
        self._ended: dict[str, tuple[dict[str, Any] | None, bool]] = {}
        self._limits = not searcher.set_max_concurrency(max_concurrent)

    @property
    def metric(self) -> Metric:
        """The searcher's metric."""
        return self.searcher.metric

    @property
    def mode(self) -> Mode:
        """The searcher's mode."""
        return self.searcher.mode

    @property
    def wants_results(self) -> bool:
        """Whether the searcher wants results."""
        return self.searcher.wants_results

    def set_search_properties(
        self, metric: Metric, mode: Mode, config: dict[str, Any], **spec: Any
    ) -> bool:
        """Pass the properties to the searcher."""
        hand_over = self.searcher.set_search_properties
        return hand_over(metric, mode, config, **accepted(hand_over, spec))

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Change the limit."""
        check_count("ConcurrencyLimiter", "max_concurrent", max_concurrent, least=1)
        self.max_concurrent = max_concurrent
        self._limits = not self.searcher.set_max_concurrency(max_concurrent)
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the searcher's suggestion, or None while the limit is reached."""
        if not self._limits:
            return self.searcher.suggest(trial_id)
        if len(self._live) + len(self._ended) >= self.max_concurrent:
            return None
        answer = self.searcher.suggest(trial_id)
        if isinstance(answer, dict):
            self._live.add(trial_id)
        return answer

    def on_trial_restored(self, trial_id: str, config: dict[str, Any], **spec: Any) -> bool:
        """Pass the trial to the searcher, and count it as live if the searcher accepts it."""
        tell = self.searcher.on_trial_restored
        known = tell(trial_id, config, **accepted(tell, spec))
        if known:
            self._live.add(trial_id)
        return known

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Pass the result to the searcher."""
        self.searcher.on_trial_result(trial_id, result)

    def on_trial_pause(self, trial_id: str) -> None:
        """Pass the pause to the searcher."""
        self.searcher.on_trial_pause(trial_id)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Pass the end to the searcher, immediately or at the end of the batch."""
        self._live.discard(trial_id)
        if not (self._limits and self.batch):
            self.searcher.on_trial_complete(trial_id, result=result, error=error)
            return
        self._ended[trial_id] = (result, error)
        if not self._live:
            ended, self._ended = self._ended, {}
            for trial, (last, failed) in ended.items():
                self.searcher.on_trial_complete(trial, result=last, error=failed)

    def add_evaluated_point(
        self,
        parameters: dict[str, Any],
        value: float,
        error: bool = False,
        pruned: bool = False,
        intermediate_values: list[float] | None = None,
    ) -> None:
        """Pass the point to the searcher."""
        self.searcher.add_evaluated_point(parameters, value, error, pruned, intermediate_values)

    def get_state(self) -> dict[str, Any] | None:
        """Return the searcher's state and the live trials; None in a batch or without a state."""
        searcher = None if self._ended else state_of(self.searcher)
        return None if searcher is None else {"searcher": searcher, "live": sorted(self._live)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self.searcher.set_state(state["searcher"])
        self._live = set(state["live"])

    def save(self, checkpoint_path: str) -> None:
        """Save the searcher."""
        self.searcher.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        """Restore the searcher."""
        self.searcher.restore(checkpoint_path)
