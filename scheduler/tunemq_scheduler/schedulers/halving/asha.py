"""Asynchronous successive halving (ASHA).

L. Li, K. Jamieson, A. Rostamizadeh, E. Gonina, J. Ben-tzur, M. Hardt, B. Recht, A. Talwalkar: A
System for Massively Parallel Hyperparameter Tuning, MLSys 2020 (arXiv:1810.05934), section 3.2 and
algorithm 2, which is the type ``"promotion"``. As in Ray, the default type stops a trial there and
then that is not among the best when it reaches a rung.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tunemq_scheduler.schedulers.decisions import Action, Answer, Resume, Stop
from tunemq_scheduler.schedulers.halving.asynchronous_halving import AsynchronousHalving
from tunemq_scheduler.schedulers.halving.promotion_rung import PromotionRung
from tunemq_scheduler.schedulers.halving.rung import Rung
from tunemq_scheduler.schedulers.metric_scheduler import MetricScheduler
from tunemq_scheduler.schedulers.trial_scheduler import RunnerLike, TrialLike
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import TRAINING_ITERATION, lookup


class AsyncHyperBandScheduler(AsynchronousHalving[Rung], MetricScheduler):
    """Stop a trial at a rung unless it is among the best ``1 / reduction_factor`` of those before.

    The rungs are at ``grace_period``, ``grace_period * reduction_factor``, and so on up to
    ``max_t``. At each, the scheduler compares a trial's value with the quantile of the values
    recorded there before, as Ray does, and then records it; the first trial at a rung continues. A
    result that passes several rungs at once counts at the highest. A value that is not a finite
    number is worse than any other.

    With ``type="promotion"`` each trial is paused at a rung. When a slot becomes free, the best
    paused trial that is among the best ``1 / reduction_factor`` of all that reached its rung
    continues, from the highest rung with such a trial; without one, a new trial begins. So a trial
    may continue later, when it proves to be among the best. Trials that are left when no others
    run stop. Trials need checkpoints for this.

    Args:
        time_attr: the result key that measures progress; its values grow.
        metric: the result key to compare. Default: ``TuneConfig``'s metric.
        mode: ``min`` or ``max``.
        max_t: the progress at which trials stop, in units of ``time_attr``.
        grace_period: the progress before which no trial stops, in units of ``time_attr``.
        reduction_factor: one trial of this many continues at a rung; above 1.
        brackets: the number of brackets; bracket s begins with rung s. The scheduler draws a
            trial's bracket from the trial's number and the seed; brackets with more rungs are more
            likely.
        stop_last_trials: whether trials stop at ``max_t``.
        type: ``"stopping"``, or ``"promotion"`` (Syne Tune's names).
    """

    #: How `debug_string` names it.
    _TITLE = "ASHA"

    def __init__(
        self,
        time_attr: str = TRAINING_ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
        stop_last_trials: bool = True,
        type: str = "stopping",  # noqa: A002  Syne Tune's name
    ) -> None:
        if type not in {"stopping", "promotion"}:
            raise ConfigError(f'ASHAScheduler(type={type!r}): use "stopping" or "promotion".')
        self._promotes = type == "promotion"
        kind = PromotionRung if self._promotes else Rung
        AsynchronousHalving.__init__(
            self,
            lambda milestone: kind(milestone, 1 / reduction_factor),
            time_attr=time_attr,
            max_t=max_t,
            grace_period=grace_period,
            reduction_factor=reduction_factor,
            brackets=brackets,
            stop_last_trials=stop_last_trials,
        )
        MetricScheduler.__init__(self, time_attr, metric, mode)
        self._is_exhausted = False
        #: The rungs of all brackets at which trials wait, the highest first.
        self._promotion_rungs = [one for one in self._rungs() if isinstance(one, PromotionRung)]
        self._promotion_rungs.sort(key=lambda rung: rung.milestone, reverse=True)

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> None:
        """Draw the trial's bracket; a trial that had ended and continues skips the rungs it passed.

        Raises:
            ConfigError: neither the scheduler nor ``TuneConfig`` names a metric.
        """
        self._need_metric()
        self._is_exhausted = False
        super().on_trial_add(runner, trial)

    def _measured(self, result: dict[str, Any]) -> Any:
        return lookup(result, self._name)

    def _decide(self, trial: TrialLike, time: float, measured: Any) -> Answer:
        if self._promotes:
            return self._wait(trial, time, measured)
        reason = self._judge(trial, time, measured)
        return self._stop(trial, reason) if reason else self.CONTINUE

    def _record_last(self, trial: TrialLike, time: float, measured: Any) -> None:
        self._judge(trial, time, measured)

    def _judge(self, trial: TrialLike, time: float, measured: Any) -> str:
        """Record a value at the highest rung newly reached; return why the trial must stop."""
        rung = self._reach(trial.trial_id, time)
        if rung is None:
            return ""
        cutoff, others = rung.cutoff(), rung.count
        value = self._finite(measured)
        rung.record(trial.trial_id, value)
        self._arrived(rung, trial.trial_id)
        if cutoff is None or (value is not None and value >= cutoff):
            return ""
        return (
            f"{self._name} {measured:g} is not among the best {self._best_share} of {others} "
            f"trials at rung {rung.milestone:g} (cutoff {self._sign * cutoff:g})"
        )

    def _finite(self, measured: Any) -> float | None:
        """Return a value with the sign with which larger is better; None if it is not finite."""
        value = self._sign * measured
        return float(value) if math.isfinite(value) else None

    def _arrived(self, rung: Rung, trial: str) -> None:
        """Called when a trial has been recorded at a rung."""

    # --- type="promotion" -------------------------------------------------------------------------

    def _wait(self, trial: TrialLike, time: float, measured: Any) -> Answer:
        """Pause a trial at a rung that it newly reached, unless it is the one to continue."""
        rung = self._reach(trial.trial_id, time)
        if not isinstance(rung, PromotionRung):
            return self.CONTINUE
        rung.wait(trial.trial_id, self._finite(measured))
        self._arrived(rung, trial.trial_id)
        actions = self._freed()
        if any(one.trial_id == trial.trial_id for one in actions):
            return actions
        return [self.PAUSE.because(self._obstacle(rung, trial.trial_id)), *actions]

    def _obstacle(self, rung: PromotionRung, trial: str) -> str:
        """Return why a trial that waits at a rung does not continue."""
        told, is_best = self._compared(rung, trial)
        return f"{told}; another trial continues first" if is_best else told

    def _opening(self, rung: PromotionRung) -> str:
        """Return why trials may continue from a rung, if that was not always so."""
        del rung
        return ""

    def _compared(self, rung: PromotionRung, trial: str) -> tuple[str, bool]:
        """Return how a trial compares with the others at a rung, and if it is among the best."""
        value, rank, most = rung.ranked_value(trial), rung.rank(trial), rung.most_promoted
        is_finite = value is not None and math.isfinite(value)
        is_best = is_finite and rank <= most
        shown = f"{self._sign * (value or 0.0):g}" if is_finite else "none"
        told = (
            f"{self._name} {shown} is {'' if is_best else 'not '}among the best {self._best_share} "
            f"of {rung.count} trials at rung {rung.milestone:g} (rank {rank}, the best {most} "
            "continue)"
        )
        return told, is_best

    def _freed(self) -> list[Action]:
        """Return which trials continue: one, for a slot that becomes free; all if no more come."""
        actions: list[Action] = []
        for rung in self._open_rungs():
            while (trial := rung.best_waiting()) is not None:
                rung.leave(trial)
                told, _ = self._compared(rung, trial)
                actions.append(Resume(trial, told + self._opening(rung)))
                if not self._is_exhausted:
                    return actions
        return actions

    def _open_rungs(self) -> Sequence[PromotionRung]:
        """Return the rungs from which trials may continue, the highest first."""
        return self._promotion_rungs

    def on_search_exhausted(self, runner: RunnerLike) -> Answer:  # noqa: ARG002
        """Let all paused trials continue that are among the best."""
        self._is_exhausted = True
        return self._freed()

    def on_stall(self, runner: RunnerLike) -> Answer:  # noqa: ARG002
        """Stop the paused trials, if none of them may continue: they never will."""
        if actions := self._freed():
            return actions
        stops: list[Action] = []
        for rung in self._promotion_rungs:
            for trial in rung.waiting:
                rung.leave(trial)
                self._leave(trial)
                self._stopped += 1
                stops.append(Stop(trial, self._obstacle(rung, trial)))
        return stops

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Forget the trial; its recorded values stay."""
        for rung in self._promotion_rungs:
            rung.leave(trial.trial_id)
        return super().on_trial_remove(runner, trial)

    def choose_trial_to_run(self, runner: RunnerLike) -> TrialLike | None:
        """Return the trial that has waited longest; with promotion only a PENDING one."""
        if not self._promotes:
            return super().choose_trial_to_run(runner)
        return next((one for one in runner.waiting() if one.status == "PENDING"), None)

    # --- state ------------------------------------------------------------------------------------

    def debug_string(self) -> str:
        """Return each bracket's rungs with their trial counts and cutoffs."""
        lines = [f"Using {self._TITLE}: {self._stopped} trials stopped."]
        for rungs in self._brackets:
            shown = [
                f"{rung.milestone:g}: {rung.count} trials" + self._cutoff(rung) for rung in rungs
            ]
            lines.append("Rungs " + " | ".join(shown))
        return "\n".join(lines)

    def _cutoff(self, rung: Rung) -> str:
        cutoff = rung.cutoff()
        return "" if cutoff is None else f", cutoff {self._sign * cutoff:g}"

    def get_state(self) -> dict[str, Any]:
        """Return all rungs, and each live trial's position."""
        return {**super().get_state(), "is_exhausted": self._is_exhausted}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            ConfigError: the rungs differ.
        """
        super().set_state(state)
        self._is_exhausted = state["is_exhausted"]


ASHAScheduler = AsyncHyperBandScheduler
