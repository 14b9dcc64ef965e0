"""`AlgorithmDriver`: calls a search's algorithms; the loop journals their answers.

Searchers, trial schedulers and stoppers are third-party code: one that raises ends its experiment
with `SearchFailed`, never the process (DESIGN: the core).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tunemq_scheduler.base.plugin_calls import P, T, call_plugin
from tunemq_scheduler.core.commands import NotifyTrialEnd
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.core.trials.trial import ERROR
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.schedulers import SchedulerDecision, TrialScheduler, read_answer
from tunemq_scheduler.schedulers.decisions import reason_text
from tunemq_scheduler.search.algorithm_states import Stateful, pack_state, state_of, unpack_state
from tunemq_scheduler.search.search_generator import SearchGenerator, Suggestion
from tunemq_scheduler.search.searcher import innermost
from tunemq_scheduler.stopping.stopper import CombinedStopper, Stopper, reason_of
from tunemq_shared.base.errors import ConfigError, SearchFailed
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import (
    TO_THE_END,
    Horizon,
    first_that_holds,
    lookup,
    next_result,
)

_IMMUTABLE: Final = frozenset({str, int, float, bool, type(None)})


def _ask_scheduler(call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    return call_plugin("the trial scheduler", call, *args, **more)


def _ask_search(call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    return call_plugin("the search algorithm", call, *args, **more)


def _none() -> Iterator[TrialView]:
    return iter(())


class RunnerView:
    """A trial scheduler's view of the search.

    Attributes:
        trials: the trials that have not ended, or ended lately; the driver of events sets it.
        is_any_unplaced: whether a trial waits for a slot or is paused; ``may_add``: whether the
            search may add a trial.
        placement: the nodes' resources, of which it only reads; the driver of events sets it.
        placeable: yields what `waiting` returns; the loop sets it while it calls
            `TrialScheduler.choose_trial_to_run`.
    """

    def __init__(self) -> None:
        self.trials: Mapping[str, TrialView] = {}
        self.is_any_unplaced: Callable[[], bool] = bool
        self.may_add: Callable[[], bool] = bool
        self.placement = Placement()
        self.placeable: Callable[[], Iterator[TrialView]] = _none

    def get_trials(self) -> list[TrialView]:
        """Return the trials that have not ended, by number."""
        return [trial for trial in self.trials.values() if not trial.is_finished]

    def get_trial(self, trial_id: str) -> TrialView | None:
        """Return a trial that has not ended; None if there is none with this id."""
        trial = self.trials.get(trial_id)
        return None if trial is None or trial.is_finished else trial

    def has_waiting(self) -> bool:
        """Return whether trials wait for a slot or are paused, or further ones may come."""
        return self.is_any_unplaced() or self.may_add()

    def expects_trials(self) -> bool:
        """Return whether the search may add trials while those that it has are unfinished."""
        return self.may_add()

    def total_resources(self) -> dict[str, float]:
        """Return all nodes' resources together."""
        return self.placement.total

    def capacity(self, resources: dict[str, float]) -> int:
        """Return how many trials with this request all nodes could run if they ran no others."""
        return self.placement.capacity(resources)

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
        self._actions: list[m.ActionTaken] = []
        #: In lock-step: the horizon of each trial that was asked for last.
        self._declared: dict[str, Horizon | None] = {}

    @property
    def search_name(self) -> str:
        """The class name of the search algorithm inside all wrappers, for messages."""
        return _name_of(self.search)

    # --- suggestions ------------------------------------------------------------------------------

    def suggest(self, n: int, trial_id: str) -> Suggestion | Literal["FINISHED"] | None:
        """Suggest a configuration; see `SearchGenerator.suggest`."""
        return _ask_search(self.search.suggest, n, trial_id)

    def added(self, trial: TrialView) -> list[m.AlgorithmAnswer]:
        """Announce a new trial; return the horizon up to which it may run."""
        self._call_scheduler("on_trial_add", trial)
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

    def exhausted(self) -> None:
        """Announce that no further trials come."""
        self._call_scheduler("on_search_exhausted")

    def stalled(self) -> None:
        """Announce that no trial runs and none was chosen."""
        self._call_scheduler("on_stall")

    # --- results ----------------------------------------------------------------------------------

    def told(
        self, trial: TrialView, event: m.ResultReported, answers: Iterable[m.AlgorithmAnswer]
    ) -> None:
        """Pass a recorded result to the search algorithm, and whether it pauses the trial.

        Args:
            trial: the trial's view.
            event: the result.
            answers: the decisions about it; `ended` reports a trial's last result.
        """
        decisions = {one.decision for one in answers if isinstance(one, m.DecisionMade)}
        if self.search.wants_results and m.STOP not in decisions:
            shown = self._shown(trial.full_result(event))
            _ask_search(self.search.on_trial_result, trial.trial_id, shown)
        if m.PAUSE in decisions:
            _ask_search(self.search.on_trial_pause, trial.trial_id)

    @property
    def observes(self) -> bool:
        """Whether the trial scheduler wants to see results before a horizon."""
        return type(self.scheduler).observe is not TrialScheduler.observe

    def observe(self, trial: TrialView, result: dict[str, Any]) -> None:
        """Show a result before the trial's horizon to the trial scheduler."""
        _ask_scheduler(self.scheduler.observe, self.view, trial, self._shown(result))

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
            reason = reason_text(reason_of(stopper, "it"))
            return [m.DecisionMade(trial.trial_id, step, m.STOP, reason)]
        if self.lock_step and self.observes and not self._is_due(trial, result):
            self.observe(trial, result)
            return []
        verdict = self._call_scheduler(
            "on_trial_result", trial, self._shown(result), about=trial.trial_id
        )
        if verdict == m.STOP:
            self._stopped_by_scheduler.add(trial.trial_id)
            reason = reason_text(verdict.reason) or f"{type(self.scheduler).__name__} stopped it"
            return [m.DecisionMade(trial.trial_id, step, m.STOP, reason)]
        if verdict == m.PAUSE:
            reason = reason_text(verdict.reason) or f"{type(self.scheduler).__name__} paused it"
            answers.append(m.DecisionMade(trial.trial_id, step, m.PAUSE, reason))
        horizon = self._horizon(trial, step)
        if not self.lock_step:
            answers.append(m.HorizonSet(trial.trial_id, horizon))
        return answers

    def enough(self, restarted: Iterable[str] = ()) -> str:
        """Return why a stopper ends the whole experiment now; empty if it does not.

        With ``restarted``: whether it would once these trials are restarted from scratch.
        """
        stopper = self.stopper
        if stopper is not None and restarted:
            stopper = call_plugin("the stopper", copy.deepcopy, stopper)
            for trial in restarted:
                call_plugin("the stopper", stopper.on_trial_restart, trial)
        if stopper is not None and call_plugin("the stopper", stopper.stop_all):
            return reason_text(reason_of(stopper, "the experiment"))
        return ""

    def ended(self, trial: TrialView, end: NotifyTrialEnd) -> None:
        """Report a trial's end to the algorithms, but not to a trial scheduler that stopped it."""
        if trial.trial_id in self._stopped_by_scheduler:
            self._stopped_by_scheduler.discard(trial.trial_id)
        elif end.status == ERROR:
            self._call_scheduler("on_trial_error", trial)
        elif not end.had_run:
            self._call_scheduler("on_trial_remove", trial)
        else:
            self._call_scheduler("on_trial_complete", trial, self._shown(trial.last_result))
        if self.stopper is not None:
            shown = self._shown(trial.last_result)
            call_plugin("the stopper", self.stopper.on_trial_complete, trial.trial_id, shown)
        tell = self.search.on_trial_complete
        error = end.status == ERROR
        _ask_search(tell, trial.trial_id, self._shown(trial.last_result) or None, error, end.early)

    def decided(self, trial: str, answers: Iterable[m.AlgorithmAnswer]) -> None:
        """Follow the journalled decision, whatever the algorithm answered during replay."""
        if not any(isinstance(one, m.DecisionMade) and one.decision == m.STOP for one in answers):
            self._stopped_by_scheduler.discard(trial)

    # --- actions ----------------------------------------------------------------------------------

    def take_actions(self) -> list[m.ActionTaken]:
        """Return the actions that the trial scheduler answered since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def refuse(self, action: m.ActionTaken, why: str) -> SearchFailed:
        """Return the error for an action that the search cannot take."""
        return SearchFailed(
            f"{type(self.scheduler).__name__} answered {action.action} for trial {action.trial!r}: "
            f"{why}"
        )

    def acted(self, event: m.ActionTaken) -> None:
        """Note an action before the runner handles it."""
        if event.action == m.STOP:
            self._stopped_by_scheduler.add(event.trial)

    def exploits(self, trial: TrialView, step: int) -> list[m.AlgorithmAnswer]:
        """Return the horizon of a trial that continues from the state of another, at ``step``."""
        return [m.HorizonSet(trial.trial_id, self._horizon(trial, step))]

    def _call_scheduler(self, method: str, *args: Any, about: str = "") -> SchedulerDecision:
        """Call a method of the trial scheduler; keep the actions that it returns.

        ``about`` is the trial about which it decides, if any.
        """
        scheduler = self.scheduler
        answer = _ask_scheduler(getattr(scheduler, method), self.view, *args)
        decision, actions = read_answer(scheduler, method, answer, about)
        default_reason = f"{type(scheduler).__name__} decided it"
        self._actions += [one.event(default_reason) for one in actions]
        return decision

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, bytes] | None:
        """Return the state of all algorithms; None if one of them has no state to give."""
        states: dict[str, bytes] = {}
        for who, algorithm in self._all().items():
            state = call_plugin(f"the {who}", state_of, algorithm)
            if state is None:
                return None
            name = _name_of(algorithm)
            states[who] = pack_state(name, {"algorithm": name, "state": state})
        return states

    def set_state(self, states: Mapping[str, bytes]) -> None:
        """Restore the state of fresh algorithms.

        Raises:
            ConfigError: the algorithms differ from those that gave the state, or are configured
                differently.
        """
        mine = self._all()
        saved = {who: unpack_state(state) for who, state in states.items()}
        for who in (*mine, *(saved.keys() - mine.keys())):
            before = saved[who]["algorithm"] if who in saved else "none"
            now = _name_of(mine[who]) if who in mine else "none"
            if now != before:
                raise ConfigError(
                    f"the {who} of this experiment was {before}, and it is resumed with {now}; "
                    "resume it with the same."
                )
        for who, algorithm in mine.items():
            call_plugin(f"the {who}", algorithm.set_state, saved[who]["state"])

    def _all(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {
            "search algorithm": self.search,
            "trial scheduler": self.scheduler,
        }
        return found if self.stopper is None else {**found, "stopper": self.stopper}

    # --- small things -----------------------------------------------------------------------------

    def _horizon(self, trial: TrialView, step: int) -> Horizon:
        """Return how far a trial may run before the scheduler or the stopper must be asked."""
        horizon = _ask_scheduler(self.scheduler.horizon, trial)
        if self.lock_step:
            self._declared[trial.trial_id] = horizon
            return next_result(step)
        parts = [horizon]
        if self.stopper is not None:
            parts.append(call_plugin("the stopper", self.stopper.horizon, trial.trial_id))
        if any(part is None for part in parts):
            return next_result(step)
        return tuple(condition for part in parts for condition in part or TO_THE_END)

    def _is_due(self, trial: TrialView, result: dict[str, Any]) -> bool:
        """In lock-step: whether a result reaches the horizon that the trial scheduler declared."""
        declared = self._declared.get(trial.trial_id)
        return declared is None or first_that_holds(declared, result) is not None

    def _shown(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a result, which an algorithm may change."""
        shown = {  # most values are plain, and deepcopy is slow
            key: value if type(value) in _IMMUTABLE else copy.deepcopy(value)
            for key, value in result.items()
        }
        if self.worst_for_nonfinite and self.metric is not None:
            value = lookup(result, self.metric)
            if isinstance(value, float) and not math.isfinite(value):
                shown[self.metric] = math.inf if self.mode == "min" else -math.inf
        return shown


def _name_of(algorithm: Stateful) -> str:
    """Return the class names of an algorithm, and of those that it combines or wraps."""
    name = type(algorithm).__name__
    if isinstance(algorithm, SearchGenerator):
        return type(innermost(algorithm.searcher)).__name__
    if isinstance(algorithm, CombinedStopper):
        return f"{name}({', '.join(map(_name_of, algorithm.stoppers))})"
    return name
