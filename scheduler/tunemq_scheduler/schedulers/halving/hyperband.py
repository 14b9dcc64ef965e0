"""HyperBand: brackets of trials that are halved together, by synchronous successive halving.

L. Li, K. Jamieson, G. DeSalvo, A. Rostamizadeh, A. Talwalkar: Hyperband, JMLR 18 (2018), section 3
and algorithm 1. The sizes of brackets and milestones are those of Ray Tune, whose ``max_t`` is the
progress of a trial in all, not that between two halvings.
"""

from __future__ import annotations

import math
from typing import Any, Final

from tunemq_scheduler.schedulers.decisions import Action, Answer, Pause, Resume, Stop
from tunemq_scheduler.schedulers.halving.bracket import Bracket
from tunemq_scheduler.schedulers.metric_scheduler import MetricScheduler
from tunemq_scheduler.schedulers.trial_scheduler import (
    RunnerLike,
    TrialLike,
    decides_as,
)
from tunemq_scheduler.search.objective import (
    is_real,
)
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import (
    TO_THE_END,
    TRAINING_ITERATION,
    Condition,
    Horizon,
    lookup,
)


class HyperBandScheduler(MetricScheduler):
    """Pause trials at milestones, and let the best ``1 / reduction_factor`` of a bracket continue.

    A *bracket* takes a number of trials. Each of them is paused at the bracket's milestone.
    Once all have reached it, the best continue to a milestone that is ``reduction_factor`` times
    as far, and the others stop; and so on until ``max_t``. Brackets differ in their size and in
    their first milestone, and form bands one after the other.

    A trial needs checkpoints to be paused; one without any begins again from its start.

    Differences from Ray Tune: a bracket is halved only when it is full or no further trials come,
    or when nothing else could run, where Ray halves what has arrived. A trial stops as soon as it
    reaches ``max_t``, and is not paused there. A trial that ends or fails is no longer waited for,
    at any milestone, and no other takes its place in the bracket.

    Args:
        time_attr: the result key that measures progress; its values grow.
        metric: the result key to compare. Default: ``TuneConfig``'s metric.
        mode: ``min`` or ``max``.
        max_t: the progress at which trials stop, in units of ``time_attr``; a whole number.
        reduction_factor: one trial of this many continues at a milestone; above 1.
        stop_last_trials: whether trials stop at ``max_t``.
    """

    #: Whether a band begins with the bracket of the most trials, which has the first milestone.
    _LARGEST_FIRST = False

    def __init__(
        self,
        time_attr: str = TRAINING_ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: int = 81,
        reduction_factor: float = 3,
        stop_last_trials: bool = True,
    ) -> None:
        who = type(self).__name__
        _check(who, max_t, reduction_factor)
        super().__init__(time_attr, metric, mode)
        self._stop_last_trials = stop_last_trials
        self._sizes = _bracket_sizes(max_t, reduction_factor)
        if self._LARGEST_FIRST:
            self._sizes.reverse()
        self._max_t, self._factor = max_t, reduction_factor
        self._stopped = self._created = 0
        self._is_exhausted = False
        #: The brackets with live trials, by their numbers; the newest may take further trials.
        self._brackets: dict[int, Bracket] = {}
        self._bracket_of: dict[str, int] = {}

    # --- trials that come and go ------------------------------------------------------------------

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> Answer:  # noqa: ARG002
        """Put the trial into the newest bracket, or into a new one if that is full.

        Raises:
            ConfigError: neither the scheduler nor ``TuneConfig`` names a metric.
        """
        self._need_metric()
        self._is_exhausted = False
        newest = self._brackets.get(self._created - 1)
        if newest is None or newest.is_full:
            newest = self._brackets[self._created] = self._new_bracket(self._created)
            self._created += 1
        self._bracket_of[trial.trial_id] = self._created - 1
        newest.add(trial.trial_id)
        if self._note(newest, trial.trial_id, trial.last_result):
            return self._follow(trial.trial_id)
        return []

    def on_search_exhausted(self, runner: RunnerLike) -> list[Action]:  # noqa: ARG002
        """Halve brackets that waited only for further trials."""
        self._is_exhausted = True
        return [action for one in list(self._brackets) for action in self._halve(one)]

    def on_stall(self, runner: RunnerLike) -> list[Action]:
        """Halve the brackets that could never be full, because nothing else can run."""
        actions: list[Action] = []
        for number in list(self._brackets):
            actions += self._halve(number, must_be_full=False)
        why = "nothing else can run"
        behind = [one.trial_id for one in runner.get_trials() if self._is_behind(one.trial_id)]
        return [*actions, *(Resume(one, why) for one in behind)]

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> Answer:  # noqa: ARG002
        """Wait for the trial no longer."""
        number = self._bracket_of.get(trial.trial_id)
        if number is None:
            return []
        self._forget(number, trial.trial_id)
        return self._halve(number)

    # --- results ----------------------------------------------------------------------------------

    def on_trial_result(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,
        result: dict[str, Any],
    ) -> Answer:
        """Return PAUSE at the milestone; once all trials are there, what follows for each."""
        number = self._bracket_of.get(trial.trial_id)
        if number is None:
            return self.CONTINUE
        has_metric = self._note(self._brackets[number], trial.trial_id, result)
        return self._follow(trial.trial_id) if has_metric else self.CONTINUE

    def _follow(self, trial: str) -> list[Action]:
        """Return what follows from a trial's newest result, for it and for others."""
        number = self._bracket_of[trial]
        bracket = self._brackets[number]
        if bracket.is_behind(trial):
            return []
        if bracket.is_last:
            return [*self._promote(number, trial, "").values()]
        actions = self._halve(number)
        if any(one.trial_id == trial for one in actions):
            return actions
        return [Pause(trial, self._awaited(number, bracket)), *actions]

    def _awaited(self, number: int, bracket: Bracket) -> str:
        """Return for what a trial waits at a milestone."""
        told = f"at milestone {bracket.milestone:g} of bracket {number} it waits for "
        if bracket.behind:
            return f"{told}{bracket.behind} of {bracket.count} trials"
        return f"{told}more trials: the bracket has {bracket.count} of at most {bracket.size}"

    def _note(self, bracket: Bracket, trial: str, result: dict[str, Any]) -> bool:
        """Record a result; return whether it has progress and metric."""
        time, measured = lookup(result, self._time_attr), lookup(result, self._name)
        if time is None or measured is None:
            return False
        value = self._sign * measured
        bracket.record(trial, time, value if math.isfinite(value) else -math.inf)
        return True

    def _halve(self, number: int, *, must_be_full: bool = True) -> list[Action]:
        """Halve a bracket whose trials have all reached its milestone.

        Trials that are already beyond the next milestone, too, wait there.
        """
        actions: dict[str, Action] = {}
        while (bracket := self._brackets.get(number)) is not None:
            is_complete = bracket.is_full or self._is_exhausted or not must_be_full
            if bracket.is_last or bracket.behind or not (bracket.count and is_complete):
                break
            where = f"at milestone {bracket.milestone:g} of bracket {number}"
            better, worse = bracket.halve()
            among = (
                f"among the best {len(better)} of {len(better) + len(worse)} trials {where} "
                f"(cutoff {self._shown(better[0][1])})"
            )
            for trial, value in worse:
                why = f"{self._name} {self._shown(value)} is not {among}"
                actions[trial] = self._stop(number, trial, why)
            for trial, value in better:
                why = f"{self._name} {self._shown(value)} is {among}"
                actions |= self._promote(number, trial, why)
        return [*actions.values()]

    def _promote(self, number: int, trial: str, reason: str) -> dict[str, Action]:
        """Let a trial continue, unless it is at the next milestone already."""
        bracket = self._brackets[number]
        if bracket.is_behind(trial) or (bracket.is_last and not self._stop_last_trials):
            return {trial: Resume(trial, reason)}
        if bracket.is_last:
            last = f"milestone {bracket.milestone:g} is the last of bracket {number}"
            return {trial: self._stop(number, trial, last)}
        return {}

    def _is_behind(self, trial: str) -> bool:
        number = self._bracket_of.get(trial)
        return number is not None and self._brackets[number].is_behind(trial)

    def _stop(self, number: int, trial: str, reason: str) -> Action:
        self._stopped += 1
        self._forget(number, trial)
        return Stop(trial, reason)

    def _forget(self, number: int, trial: str) -> None:
        bracket = self._brackets[number]
        bracket.remove(trial)
        del self._bracket_of[trial]
        if not bracket.count and bracket.is_full:
            del self._brackets[number]

    def _shown(self, value: float) -> str:
        return f"{self._sign * value:g}" if math.isfinite(value) else "none"

    def horizon(self, trial: TrialLike) -> Horizon | None:
        """Return the milestone of the trial's bracket; the next one if the trial waits there."""
        if not decides_as(self, HyperBandScheduler):
            return None
        number = self._bracket_of.get(trial.trial_id)
        if number is None:
            return TO_THE_END
        bracket = self._brackets[number]
        if bracket.is_last and not self._stop_last_trials:
            return TO_THE_END
        is_waiting = not bracket.is_last and not bracket.is_behind(trial.trial_id)
        milestone = bracket.next_milestone if is_waiting else bracket.milestone
        return (Condition(self._time_attr, milestone),)

    def choose_trial_to_run(self, runner: RunnerLike) -> TrialLike | None:
        """Return the PENDING trial that has waited longest; paused ones wait for their bracket."""
        return next((one for one in runner.waiting() if one.status == "PENDING"), None)

    # --- state ------------------------------------------------------------------------------------

    def debug_string(self) -> str:
        """Return how many trials were stopped, and each bracket's trials and milestone."""
        lines = [f"Using HyperBand: {self._stopped} trials stopped, {self._created} brackets."]
        lines += [
            f"Bracket {number}: {one.count} of at most {one.size} trials, {one.behind} before "
            f"milestone {one.milestone:g}"
            for number, one in self._brackets.items()
        ]
        return "\n".join(lines)

    def get_state(self) -> dict[str, Any]:
        """Return all brackets with live trials, and the trials' brackets."""
        return {
            "sizes": self._sizes,
            "stopped": self._stopped,
            "created": self._created,
            "is_exhausted": self._is_exhausted,
            "brackets": {str(number): one.get_state() for number, one in self._brackets.items()},
            "bracket_of": self._bracket_of.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            ConfigError: the brackets have other sizes.
        """
        before = [tuple(one) for one in state["sizes"]]
        if before != self._sizes:
            raise ConfigError(
                f"the scheduler's brackets (halvings, trials, first milestone) are {self._sizes} "
                f"now and were {before}; resume with the same max_t and reduction_factor."
            )
        self._stopped, self._created = state["stopped"], state["created"]
        self._is_exhausted, self._bracket_of = state["is_exhausted"], state["bracket_of"]
        for number, saved in state["brackets"].items():
            bracket = self._new_bracket(int(number))
            bracket.set_state(saved)
            self._brackets[int(number)] = bracket

    def _new_bracket(self, number: int) -> Bracket:
        halvings, size, milestone = self._sizes[number % len(self._sizes)]
        return Bracket(halvings, size, milestone, self._max_t, self._factor)


class HyperBandForBOHB(HyperBandScheduler):
    """`HyperBandScheduler` as BOHB uses it: each band begins with the bracket of the most trials.

    S. Falkner, A. Klein, F. Hutter: BOHB: Robust and Efficient Hyperparameter Optimization at
    Scale, ICML 2018 (arXiv:1807.01774), section 4. The search algorithm of BOHB is
    `tunemq.search.bohb.TuneBOHB`.
    """

    _LARGEST_FIRST = True


#: The greatest number of brackets in a band; trials beyond it could never fill one.
_MOST_BRACKETS: Final = 64


def _bracket_sizes(max_t: int, factor: float) -> list[tuple[int, int, int]]:
    """Return halvings, trials and first milestone of each bracket of a band, as in Ray Tune."""
    count = round(math.log(max_t) / math.log(factor)) + 1
    sizes = [
        (
            halvings,
            math.ceil(count / (halvings + 1) * factor**halvings),
            int(max_t * factor**-halvings),
        )
        for halvings in range(count)
    ]
    return [one for one in sizes if one[2] > 0]


def _check(who: str, max_t: float, reduction_factor: float) -> None:
    if not is_real(max_t) or not 1 <= max_t < math.inf or max_t != int(max_t):
        raise ConfigError(f"{who}(max_t={max_t!r}): a whole number above 0 is needed.")
    if not is_real(reduction_factor) or not 1 < reduction_factor < math.inf:
        raise ConfigError(
            f"{who}(reduction_factor={reduction_factor!r}): a number above 1 is needed; "
            "3 lets the best third continue."
        )
    if math.log(max_t) / math.log(reduction_factor) > _MOST_BRACKETS:
        raise ConfigError(
            f"{who}(max_t={max_t!r}, reduction_factor={reduction_factor!r}): that would be more "
            f"than {_MOST_BRACKETS} brackets; use a larger reduction_factor."
        )
