"""`AlgorithmDriver`: calls a search's algorithms; the loop journals their answers.

Searchers, trial schedulers and stoppers are third-party code: one that raises ends its experiment
with `SearchFailed`, never the process (DESIGN: the core).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunemq_scheduler.base.plugin_calls import P, T, call_plugin
from tunemq_scheduler.core.commands import NotifyTrialEnd
from tunemq_scheduler.core.trials.trial import ERROR
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.schedulers import TrialScheduler, read_verdict
from tunemq_scheduler.search.algorithm_states import Stateful, pack_state, state_of, unpack_state
from tunemq_scheduler.search.search_generator import SearchGenerator, Suggestion
from tunemq_scheduler.search.searcher import innermost
from tunemq_scheduler.stopping.stopper import Stopper
from tunemq_shared.base.errors import ConfigError, SearchFailed
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import TO_THE_END, Horizon, lookup, next_result


def _ask_scheduler(call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    return call_plugin("the trial scheduler", call, *args, **more)


def _ask_search(call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    return call_plugin("the search algorithm", call, *args, **more)


def _none() -> Iterator[TrialView]:
    return iter(())


class RunnerView:
    """A trial scheduler's view of the search.

    Attributes:
        trials: returns the trials that have not ended; set by the loop.
        placeable: yields what `waiting` returns; the loop sets it while it calls
            `TrialScheduler.choose_trial_to_run`.
    """

    def __init__(self) -> None:
        self.trials: Callable[[], Iterable[TrialView]] = list
        self.placeable: Callable[[], Iterator[TrialView]] = _none

    def get_trials(self) -> list[TrialView]:
        """Return the trials that have not ended."""
        return list(self.trials())

    def waiting(self) -> Iterator[TrialView]:
        """Yield the trials that could be placed now, longest waiting first; evaluated lazily."""
        return self.placeable()


@dataclass(kw_only=True, eq=False)
class AlgorithmDriver:
    """The search algorithm, the trial scheduler and the stopper of one experiment.

    Attributes:
        search: suggests configurations and receives their results.
        scheduler: decides about trials at their horizons.
        stopper: ends trials or the experiment; None for none.
        metric: the metric to optimize; None if no algorithm needs one.
        mode: ``min`` or ``max``; None if no algorithm needs it.
        worst_for_nonfinite: replace NaN and infinite values of the metric with the worst possible
            value before the algorithms see them.
        lock_step: ask about every result, whatever horizons say (used to check a journal).
        view: the trial scheduler's view of the search.
    """

    search: SearchGenerator
    scheduler: TrialScheduler
    stopper: Stopper | None = None
    metric: str | None = None
    mode: str | None = None
    worst_for_nonfinite: bool = False
    lock_step: bool = False

    def __post_init__(self) -> None:
        """Begin without any trial."""
        self.view = RunnerView()
        self._stopped_by_scheduler: set[str] = set()

    @property
    def search_name(self) -> str:
        """The class name of the search algorithm inside all wrappers, for messages."""
        return type(innermost(self.search.searcher)).__name__

    # --- suggestions ------------------------------------------------------------------------------

    def suggest(self, n: int, trial_id: str) -> Suggestion | Literal["FINISHED"] | None:
        """Suggest a configuration; see `SearchGenerator.suggest`."""
        return _ask_search(self.search.suggest, n, trial_id)

    def added(self, trial: TrialView) -> list[m.AlgorithmAnswer]:
        """Announce a new trial; return the horizon up to which it may run."""
        _ask_scheduler(self.scheduler.on_trial_add, self.view, trial)
        return [m.HorizonSet(trial.trial_id, self._horizon(trial, 0))]

    def taken_up(self, trial: TrialView, *, is_continued: bool) -> list[m.AlgorithmAnswer]:
        """Announce a trial of an earlier run, or one that runs again; otherwise as `added`."""
        tell = self.search.on_trial_restored
        about = trial.number, trial.trial_id, trial.config
        _ask_search(tell, *about, is_continued=is_continued)
        return self.added(trial)

    def restarted(self, trial: TrialView) -> None:
        """Announce that a trial starts from scratch, before it is announced again.

        The search algorithm knows already that the trial failed.
        """
        _ask_scheduler(self.scheduler.on_trial_restart, self.view, trial)
        if self.stopper is not None:
            call_plugin("the stopper", self.stopper.on_trial_restart, trial.trial_id)

    def choose(self, placeable: Callable[[], Iterator[TrialView]]) -> TrialView | None:
        """Choose which of the placeable trials starts next; None for none."""
        first = next(placeable(), None)
        if first is None:
            return None
        self.view.placeable = placeable
        try:
            chosen = _ask_scheduler(self.scheduler.choose_trial_to_run, self.view)
        finally:
            self.view.placeable = _none
        if chosen is None:
            return None
        if chosen is first:
            return first
        for trial in placeable():
            if trial is chosen:
                return trial
        raise SearchFailed(
            f"the trial scheduler chose {chosen!r}, which is not waiting for a slot."
        )

    # --- results ----------------------------------------------------------------------------------

    def told(
        self, trial: TrialView, event: m.ResultReported, answers: Iterable[m.AlgorithmAnswer]
    ) -> None:
        """Pass a recorded result to the search algorithm.

        Args:
            trial: the trial's view.
            event: the result.
            answers: the decisions about it; `ended` reports a trial's last result.
        """
        is_last = any(isinstance(one, m.DecisionMade) and one.decision == m.STOP for one in answers)
        if self.search.wants_results and not is_last:
            shown = self._shown(trial.full_result(event))
            _ask_search(self.search.on_trial_result, trial.trial_id, shown)

    def decide(
        self, trial: TrialView, result: dict[str, Any], step: int
    ) -> list[m.AlgorithmAnswer]:
        """Decide about a trial whose result reached its horizon.

        A paused trial gets a horizon, too, for when it resumes.
        """
        answers: list[m.AlgorithmAnswer] = []
        stopper = self.stopper
        if stopper is not None and call_plugin(
            "the stopper", stopper, trial.trial_id, self._shown(result)
        ):
            reason = f"{type(stopper).__name__} stopped it"
            return [m.DecisionMade(trial.trial_id, step, m.STOP, reason)]
        scheduler = self.scheduler
        told = _ask_scheduler(scheduler.on_trial_result, self.view, trial, self._shown(result))
        verdict = read_verdict(scheduler, told)
        if verdict == m.STOP:
            self._stopped_by_scheduler.add(trial.trial_id)
            reason = verdict.reason or f"{type(scheduler).__name__} stopped it"
            return [m.DecisionMade(trial.trial_id, step, m.STOP, reason)]
        if verdict == m.PAUSE:
            reason = verdict.reason or f"{type(scheduler).__name__} paused it"
            answers.append(m.DecisionMade(trial.trial_id, step, m.PAUSE, reason))
        if not self.lock_step:
            answers.append(m.HorizonSet(trial.trial_id, self._horizon(trial, step)))
        return answers

    def enough(self) -> str:
        """Return why a stopper ends the whole experiment now; empty if it does not."""
        stopper = self.stopper
        if stopper is not None and call_plugin("the stopper", stopper.stop_all):
            return f"{type(stopper).__name__} stopped the experiment"
        return ""

    def ended(self, trial: TrialView, end: NotifyTrialEnd) -> None:
        """Report a trial's end to the algorithms, but not to a trial scheduler that stopped it."""
        scheduler = self.scheduler
        if trial.trial_id in self._stopped_by_scheduler:
            self._stopped_by_scheduler.discard(trial.trial_id)
        elif end.status == ERROR:
            _ask_scheduler(scheduler.on_trial_error, self.view, trial)
        elif not end.had_run:
            _ask_scheduler(scheduler.on_trial_remove, self.view, trial)
        else:
            result = self._shown(trial.last_result)
            _ask_scheduler(scheduler.on_trial_complete, self.view, trial, result)
        tell = self.search.on_trial_complete
        error = end.status == ERROR
        _ask_search(tell, trial.trial_id, self._shown(trial.last_result) or None, error, end.early)

    def decided(self, trial: str, answers: Iterable[m.AlgorithmAnswer]) -> None:
        """Follow the journalled decision, whatever the algorithm answered during replay."""
        if not any(isinstance(one, m.DecisionMade) and one.decision == m.STOP for one in answers):
            self._stopped_by_scheduler.discard(trial)

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, bytes] | None:
        """Return the state of all algorithms; None if one of them has no state to give."""
        states: dict[str, bytes] = {}
        for who, algorithm in self._all().items():
            state = call_plugin(f"the {who}", state_of, algorithm)
            if state is None:
                return None
            states[who] = pack_state(type(algorithm).__name__, state)
        return states

    def set_state(self, states: Mapping[str, bytes]) -> None:
        """Restore the state of fresh algorithms.

        Raises:
            ConfigError: the algorithms differ from those that gave the state, or are configured
                differently.
        """
        mine = self._all()
        if mine.keys() != states.keys():
            raise ConfigError(
                f"the experiment was run with a {', a '.join(states)}, and is resumed with a "
                f"{', a '.join(mine)}; resume it with the same."
            )
        for who, algorithm in mine.items():
            call_plugin(f"the {who}", algorithm.set_state, unpack_state(states[who]))

    def _all(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {
            "search algorithm": self.search,
            "trial scheduler": self.scheduler,
        }
        return found if self.stopper is None else {**found, "stopper": self.stopper}

    # --- small things -----------------------------------------------------------------------------

    def _horizon(self, trial: TrialView, step: int) -> Horizon:
        """Return how far a trial may run before the scheduler or the stopper must be asked."""
        if self.lock_step:
            return next_result(step)
        horizon = _ask_scheduler(self.scheduler.horizon, trial)
        parts = [horizon]
        if self.stopper is not None:
            parts.append(call_plugin("the stopper", self.stopper.horizon, trial.trial_id))
        if any(part is None for part in parts):
            return next_result(step)
        return tuple(condition for part in parts for condition in part or TO_THE_END)

    def _shown(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a result, which an algorithm may change."""
        shown = copy.deepcopy(result)
        if self.worst_for_nonfinite and self.metric is not None:
            value = lookup(result, self.metric)
            if isinstance(value, float) and not math.isfinite(value):
                shown[self.metric] = math.inf if self.mode == "min" else -math.inf
        return shown
