"""Progressive asynchronous successive halving (PASHA).

O. Bohdal, L. Balles, M. Wistuba, B. Ermis, C. Archambeau, G. Zappella: PASHA: Efficient HPO and NAS
with Progressive Resource Allocation, ICLR 2023 (arXiv:2207.06940), section 4 and algorithm 1.
"""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.schedulers.decisions import Answer
from tunemq_scheduler.schedulers.halving.asha import AsyncHyperBandScheduler
from tunemq_scheduler.schedulers.halving.promotion_rung import PromotionRung
from tunemq_scheduler.schedulers.halving.rung import Rung
from tunemq_scheduler.schedulers.halving.soft_ranking import SoftRanking
from tunemq_scheduler.schedulers.trial_scheduler import RunnerLike, TrialLike
from tunemq_shared.protocol.result_conditions import TRAINING_ITERATION, lookup


class PASHA(AsyncHyperBandScheduler):
    """``ASHAScheduler(type="promotion")`` that trains further only while the ranking changes.

    Trials are paused at rungs and promoted from them as by ASHA, but at first only up to the second
    rung. The next rung opens when trials have another order at the highest open rung than at the
    rung below it, and finally ``max_t``. So a search whose ranking is stable early trains no trial
    to ``max_t``; train the best configuration to the end afterwards. Trials need checkpoints.
    Paused trials count towards ``TuneConfig(max_concurrent_trials=...)``: a small limit leaves too
    few trials to compare.

    Orders are compared with soft ranking (section 4.2 of the paper): trials whose values at the
    rung below differ by at most epsilon may change places. Epsilon is the 90th percentile of the
    distances between trials of the highest open rung whose learning curves cross each other at
    least twice (section 4.3), at the last progress that both reported; 0 until there are such
    trials. Curves are compared where both trials report the same progress.

    Differences from the paper: of the highest open rung only the best 100 trials are compared, so
    that a result costs the same in a long search. Where trials with equal values could stand in
    several orders, the one counts that agrees best. A trial that skips the rung below, because it
    reports too rarely, opens the next rung: it cannot be compared. Differences from Syne Tune: a
    trial's arrival at the highest open rung is the only occasion at which rungs open, as in
    algorithm 1, and epsilon leaves out the trials that are still on their way there.

    Args:
        time_attr (str): the result key that measures progress; its values grow.
        metric (str): the result key to compare. Default: ``TuneConfig``'s metric.
        mode (str): ``min`` or ``max``.
        max_t (float): the progress at which trials stop, in units of ``time_attr``.
        grace_period (float): the progress of the first rung, in units of ``time_attr``.
        reduction_factor (float): one trial of this many continues at a rung, and each rung has this
            many times the progress of the one below; above 1.

    Raises:
        ConfigError: an argument is invalid; the message names it, its value and valid values.

    Example:
        >>> from tunemq import TuneConfig
        >>> from tunemq.schedulers import PASHA
        >>> tune_config = TuneConfig(
        ...     metric="loss", mode="min", num_samples=64, scheduler=PASHA(max_t=81)
        ... )
        >>> print(PASHA(max_t=81).debug_string())
        Using PASHA: 0 trials stopped.
        Rungs 1: 0 trials | 3: 0 trials | 9: 0 trials | 27: 0 trials | 81: 0 trials
        Open up to 3; epsilon 0.
    """

    _TITLE = "PASHA"

    def __init__(
        self,
        time_attr: str = TRAINING_ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 3,
    ) -> None:
        super().__init__(
            time_attr, metric, mode, max_t, grace_period, reduction_factor, type="promotion"
        )
        #: The rungs below ``max_t``, where trials stop.
        self._rungs_to_open = [one for one in self._rungs() if one.milestone < max_t]
        #: The index of the highest open rung; that of ``max_t`` is behind the last.
        self._top = 1
        self._ranking = SoftRanking()
        #: The values of trials that may still be compared, by their progress; larger is better.
        self._curves: dict[str, dict[float, float]] = {}
        #: Why the highest open rung opened; empty for those that are open from the beginning.
        self._opened = ""

    @property
    def _is_fully_open(self) -> bool:
        return self._top >= len(self._rungs_to_open)

    def observe(self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]) -> None:  # noqa: ARG002
        """Record a result before the trial's next rung, for the estimate of epsilon."""
        self._record(trial.trial_id, lookup(result, self._time_attr), self._measured(result))

    def _record(self, trial: str, time: Any, measured: Any) -> None:
        if time is None or measured is None or self._is_fully_open:
            return
        value = self._finite(measured)
        if value is not None and trial in self._places:
            self._curves.setdefault(trial, {})[time] = value

    def _decide(self, trial: TrialLike, time: float, measured: Any) -> Answer:
        self._record(trial.trial_id, time, measured)
        return super()._decide(trial, time, measured)

    def _record_last(self, trial: TrialLike, time: float, measured: Any) -> None:
        self._record(trial.trial_id, time, measured)
        super()._record_last(trial, time, measured)

    def _arrived(self, rung: Rung, trial: str) -> None:
        """Compare the orders at the highest open rung and below; open the next if they differ."""
        if self._is_fully_open or rung not in self._rungs_to_open:
            return
        index = self._rungs_to_open.index(rung)
        if index < self._top:
            return
        below = self._rungs_to_open[index - 1]
        if below.ranked_value(trial) is None:
            self._opened = f"trial {trial} skipped rung {below.milestone:g}"
            self._open(index + 1)
        elif index == self._top:
            self._compare(trial)
            if not self._ranking.is_consistent:
                self._opened = (
                    f"the order of {rung.count} trials is another at rung {rung.milestone:g} than "
                    f"at rung {below.milestone:g} (epsilon {self._ranking.epsilon:g})"
                )
                self._open(index + 1)

    def _compare(self, trial: str) -> None:
        value = self._rungs_to_open[self._top].ranked_value(trial)
        below = self._rungs_to_open[self._top - 1].ranked_value(trial)
        if value is not None and below is not None:
            self._ranking.add(trial, value, below, self._curves)

    def _open(self, top: int) -> None:
        """Open all rungs up to the one with an index."""
        self._top = top
        self._ranking = SoftRanking(self._ranking.epsilon)
        if self._is_fully_open:
            self._curves.clear()
            return
        for ended in [one for one in self._curves if one not in self._places]:
            del self._curves[ended]
        for trial in self._rungs_to_open[top].trials:
            self._compare(trial)

    def _open_rungs(self) -> list[PromotionRung]:
        if self._is_fully_open:
            return self._promotion_rungs
        top = self._rungs_to_open[self._top].milestone
        return [one for one in self._promotion_rungs if one.milestone < top]

    def _obstacle(self, rung: PromotionRung, trial: str) -> str:
        if rung in self._open_rungs():
            return super()._obstacle(rung, trial)
        below = self._rungs_to_open[self._top - 1].milestone
        return (
            f"rung {rung.milestone:g} is the highest open one: its order of {rung.count} trials "
            f"agrees with that at rung {below:g} (epsilon {self._ranking.epsilon:g})"
        )

    def _opening(self, rung: PromotionRung) -> str:
        if not self._opened or rung is not self._rungs_to_open[self._top - 1]:
            return ""
        newest = self._max_t if self._is_fully_open else self._rungs_to_open[self._top].milestone
        return f"; rung {newest:g} opened because {self._opened}"

    def _leave(self, trial: str) -> None:
        super()._leave(trial)
        if trial not in self._ranking:
            self._curves.pop(trial, None)

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:
        """Forget the trial's recorded values; open rungs stay open, and epsilon stays."""
        super().on_trial_restart(runner, trial)
        self._ranking.remove(trial.trial_id)
        self._curves.pop(trial.trial_id, None)

    def debug_string(self) -> str:
        """Return the rungs with their trial counts and cutoffs, and up to where they are open."""
        top = self._max_t if self._is_fully_open else self._rungs_to_open[self._top].milestone
        told = f"Open up to {top:g}; epsilon {self._ranking.epsilon:g}."
        return f"{super().debug_string()}\n{told}"

    def get_state(self) -> dict[str, Any]:
        """Return all rungs, each live trial's position, open rungs, and curves."""
        return {
            **super().get_state(),
            "top": self._top,
            "opened": self._opened,
            "ranking": self._ranking.get_state(),
            "curves": {
                trial: [list(point) for point in curve.items()]
                for trial, curve in self._curves.items()
            },
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            ConfigError: the rungs differ.
        """
        super().set_state(state)
        self._top, self._opened = state["top"], state.get("opened", "")
        self._ranking.set_state(state["ranking"])
        self._curves = {trial: dict(points) for trial, points in state["curves"].items()}
