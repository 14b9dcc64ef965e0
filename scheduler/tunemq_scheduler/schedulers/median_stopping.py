"""The median stopping rule.

D. Golovin, B. Solnik, S. Moitra, G. Kochanski, J. Karro, D. Sculley: Google Vizier: A Service for
Black-Box Optimization, KDD 2017, section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

from tunemq_scheduler.schedulers.decisions import Answer
from tunemq_scheduler.schedulers.metric_scheduler import MetricScheduler
from tunemq_scheduler.schedulers.running_means import RunningMeans
from tunemq_scheduler.schedulers.trial_scheduler import (
    RunnerLike,
    TrialLike,
    decides_as,
)
from tunemq_scheduler.search.objective import (
    check_count,
    is_real,
)
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import TO_THE_END, Condition, Horizon, lookup


class MedianStoppingRule(MetricScheduler):
    """Stop a trial whose best value is worse than the median of the others' running averages.

    At progress t, each other trial that has reached t counts with the average of its values from
    ``grace_period`` up to t, whether or not it has ended. A value that is not a finite number
    counts for nothing.

    The decision takes microseconds where trials report at the same progress, as with
    ``training_iteration``. Otherwise it takes time in proportion to the number of trials.

    Args:
        time_attr: the result key that measures progress; its values grow.
        metric: the result key to compare. Default: ``TuneConfig``'s metric.
        mode: ``min`` or ``max``.
        grace_period: the progress before which no trial stops, in units of ``time_attr``.
        min_samples_required: the number of other trials without which no trial stops.
        min_time_slice: while others are too few, a trial gives way to waiting ones when it has run
            for longer than this, in units of ``time_attr``.
        hard_stop: False pauses trials instead of stopping them; they continue, and are not asked
            about again, when no other trials are left to start.
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        grace_period: float = 60.0,
        min_samples_required: int = 3,
        min_time_slice: float = 0,
        hard_stop: bool = True,
    ) -> None:
        who = type(self).__name__
        for name, value in (("grace_period", grace_period), ("min_time_slice", min_time_slice)):
            if not is_real(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{who}({name}={value!r}): a number of at least 0 is needed.")
        check_count(who, "min_samples_required", min_samples_required, least=1)
        super().__init__(time_attr, metric, mode)
        self._grace_period = grace_period
        self._least = min_samples_required
        self._min_time_slice = min_time_slice
        self._hard_stop = hard_stop
        self._means = RunningMeans()
        #: The best value of each live trial; larger is better.
        self._best: dict[str, float] = {}
        self._last_pause: dict[str, float] = {}
        #: Trials that were paused instead of being stopped, and continue to their end.
        self._spared: set[str] = set()
        self._stopped = 0

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Check that there is a metric.

        Raises:
            ConfigError: neither the scheduler nor ``TuneConfig`` names one.
        """
        self._need_metric()

    def observe(self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]) -> None:  # noqa: ARG002
        """Record a result before the grace period's end, for the trial's best value."""
        self._record(trial.trial_id, result)

    def on_trial_result(
        self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]
    ) -> Answer:
        """Return STOP (or PAUSE) if the trial's best value is worse than the median."""
        time, name = lookup(result, self._time_attr), trial.trial_id
        if time is None or lookup(result, self._name) is None or name in self._spared:
            return self.CONTINUE
        self._record(name, result)
        if time < self._grace_period:
            return self.CONTINUE
        samples, median = self._means.median_of_others(name, time)
        if samples < self._least:
            return self._give_way(runner, trial, time, samples)
        best = self._best.get(name, -math.inf)
        if best >= median:
            return self.CONTINUE
        self._stopped += 1
        verdict = self.STOP
        if not self._hard_stop:
            self._spared.add(name)
            verdict = self.PAUSE
        return verdict.because(
            f"best {self._name} {self._shown(best)} is worse than {self._shown(median)}, the median"
            f" of {samples} trials' averages up to {self._time_attr} {time:g}"
        )

    def _shown(self, value: float) -> str:
        return f"{self._sign * value:g}" if math.isfinite(value) else "no number"

    def _give_way(self, runner: RunnerLike, trial: TrialLike, time: float, samples: int) -> str:
        """Pause a trial that cannot be compared yet, if another one waits for its slot."""
        ran = time - self._last_pause.get(trial.trial_id, -math.inf)
        waiting = (one for one in runner.get_trials() if one.status in {"PENDING", "PAUSED"})
        if ran <= self._min_time_slice or next(waiting, None) is None:
            return self.CONTINUE
        self._last_pause[trial.trial_id] = time
        return self.PAUSE.because(
            f"it gives way: {samples} of at least {self._least} other trials have reached "
            f"{self._time_attr} {time:g}"
        )

    def _record(self, trial: str, result: dict[str, Any]) -> None:
        time, measured = lookup(result, self._time_attr), lookup(result, self._name)
        if time is None or measured is None:
            return
        value = self._sign * measured
        if math.isfinite(value):
            self._best[trial] = max(value, self._best.get(trial, -math.inf))
        if time >= self._grace_period:
            self._means.add(trial, time, value)

    def on_trial_complete(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,
        result: dict[str, Any],
    ) -> None:
        """Record the last result if it is new; the trial's averages stay."""
        time = lookup(result, self._time_attr)
        if time is not None and time > self._means.last_time(trial.trial_id):
            self._record(trial.trial_id, result)
        self._forget(trial.trial_id)

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Forget the trial, except for its averages."""
        self._forget(trial.trial_id)

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Forget the trial and its averages."""
        self._forget(trial.trial_id)
        self._means.forget(trial.trial_id)

    def _forget(self, trial: str) -> None:
        self._best.pop(trial, None)
        self._last_pause.pop(trial, None)
        self._spared.discard(trial)

    def horizon(self, trial: TrialLike) -> Horizon | None:
        """Return the end of the grace period; after it, the next result."""
        if not decides_as(self, MedianStoppingRule):
            return None
        if trial.trial_id in self._spared:
            return TO_THE_END
        return (Condition(self._time_attr, self._grace_period),)

    def debug_string(self) -> str:
        """Return one line about its state, for the terminal."""
        return f"Using the median stopping rule: {self._stopped} trials stopped."

    def get_state(self) -> dict[str, Any]:
        """Return the averages of all trials, and the best values of live ones."""
        return {
            "stopped": self._stopped,
            "best": self._best.copy(),
            "last_pause": self._last_pause.copy(),
            "spared": sorted(self._spared),
            "means": self._means.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._stopped, self._best = state["stopped"], dict(state["best"])
        self._last_pause, self._spared = dict(state["last_pause"]), set(state["spared"])
        self._means.set_state(state["means"])
