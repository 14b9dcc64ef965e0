"""`TrialScheduler`: the contract of algorithms that stop and pause trials. The names are Ray's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self

from tunemq_scheduler.search.algorithm_states import Stateful
from tunemq_scheduler.search.objective import Metric, Mode, settle_objective
from tunemq_shared.base.errors import SearchFailed
from tunemq_shared.protocol import messages
from tunemq_shared.protocol.conditions import Horizon


class SchedulerDecision(str):
    """A decision, and why: ``return TrialScheduler.STOP.because("too slow")``.

    It equals the bare string, so a scheduler may return that as well.
    """

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, decision: str, reason: str = "") -> Self:
        """A decision with a reason."""
        verdict = super().__new__(cls, decision)
        verdict.reason = reason
        return verdict

    def because(self, reason: str) -> SchedulerDecision:
        """The same decision with a reason, which is journalled and shown."""
        return SchedulerDecision(self, reason)


_DECISIONS = {
    word: SchedulerDecision(word) for word in (messages.CONTINUE, messages.PAUSE, messages.STOP)
}
_NOOP = "NOOP"


def decides_as(scheduler: TrialScheduler, base: type[TrialScheduler]) -> bool:
    """Whether a scheduler still has the ``on_trial_result`` of ``base``.

    A subclass that overrides it without saying anything about horizons means to be asked every
    time: the horizons of ``base`` must not count for it.
    """
    return type(scheduler).on_trial_result is base.on_trial_result


def read_verdict(scheduler: object, answer: object) -> SchedulerDecision:
    """What a scheduler's answer means.

    Raises:
        SearchFailed: it is no decision; names the scheduler and the decisions.
    """
    if isinstance(answer, SchedulerDecision):
        return answer
    if answer == _NOOP:
        return _DECISIONS[messages.CONTINUE]
    if isinstance(answer, str) and answer in _DECISIONS:
        return _DECISIONS[answer]
    raise SearchFailed(
        f"{type(scheduler).__name__}.on_trial_result returned {answer!r}; "
        f"it must return one of {', '.join(_DECISIONS)}."
    )


class TrialLike(Protocol):
    """A trial as a scheduler sees it; not to be changed."""

    @property
    def trial_id(self) -> str:
        """Its id."""
        ...

    @property
    def number(self) -> int:
        """Which trial of the experiment it is, from 0."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        ...

    @property
    def status(self) -> str:
        """PENDING, RUNNING, PAUSED, TERMINATED or ERROR."""
        ...

    @property
    def last_result(self) -> dict[str, Any]:
        """Its newest result; empty before the first."""
        ...


class RunnerLike(Protocol):
    """The experiment as a scheduler sees it."""

    def waiting(self) -> Iterable[TrialLike]:
        """The trials that could be placed now: PENDING ones, then PAUSED; longest waiting first."""
        ...


class TrialScheduler(Stateful):
    """Decides about trials from their results.

    **Threads.** One thread at a time calls it, and never while another call is in flight.

    **Order.** `set_search_properties` is called once, before anything else. Then, for each trial:
    `on_trial_add`; `on_trial_result` for the results that it is asked about; and at the end exactly
    one of `on_trial_complete` (it ended by itself or was stopped by somebody else),
    `on_trial_error` and `on_trial_remove` (it never ran, or was paused), unless the scheduler
    itself answered STOP. A trial that fails and is retried has not ended. Of a retried trial no
    result is shown twice.

    **Horizon.** After `on_trial_add` and after each result that it was asked about, `horizon` says
    when the scheduler must be asked about the trial again:

    * None, the default: about the next result. The trial waits for the answer after every result.
    * ``()``: never. The trial runs to its end at full speed.
    * conditions: about the first result for which one of them holds. Results before are not shown.

    So a scheduler that declares horizons is asked **only** about results that reach them, and sees
    a final result that does not reach one in `on_trial_complete` alone. If a declared horizon is
    already reached by the newest result, it means the next result. A horizon may depend only on
    what the scheduler was told.

    **Answers are facts.** A decision is journalled with its reason (`SchedulerDecision.because`)
    and not asked for again. After a restart the scheduler is given its state, if `get_state` offers
    one, or told the trials and the results that it was asked about once more, in the journal's
    order; its answers are then ignored.

    **Errors.** What a method raises ends the experiment in ERROR, with its trials saved.
    """

    CONTINUE: ClassVar[SchedulerDecision] = _DECISIONS[messages.CONTINUE]
    PAUSE: ClassVar[SchedulerDecision] = _DECISIONS[messages.PAUSE]
    STOP: ClassVar[SchedulerDecision] = _DECISIONS[messages.STOP]
    NOOP: ClassVar[str] = _NOOP

    # Here and not only in __init__: a subclass that forgets super().__init__() works, too.
    _metric: Metric = None
    _mode: Mode = None

    @property
    def metric(self) -> Metric:
        """What it decides by; every result has to have it. None: nothing of the sort."""
        return self._metric

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:  # noqa: ARG002
        """Take over the experiment's metric and mode.

        Args:
            metric: as in ``TuneConfig``.
            mode: as in ``TuneConfig``.
            **spec: ``seed``; more may follow.

        Returns:
            True; False from a scheduler that cannot work with them, which is then an error.

        Raises:
            ConfigError: its own metric or mode is another one.
        """
        own = (self._metric, self._mode)
        self._metric, self._mode = settle_objective(type(self).__name__, own, (metric, mode))
        return True

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> None:
        """A trial exists."""

    def on_trial_result(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,  # noqa: ARG002
        result: dict[str, Any],  # noqa: ARG002
    ) -> str:
        """What is to happen to the trial after this result: CONTINUE, PAUSE or STOP."""
        return self.CONTINUE

    def on_trial_complete(
        self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]
    ) -> None:
        """A trial ended, not by this scheduler's STOP; ``result`` is its last."""

    def on_trial_error(self, runner: RunnerLike, trial: TrialLike) -> None:
        """A trial failed for good."""

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> None:
        """A trial that was not running ended: it never ran, or was paused."""

    def choose_trial_to_run(self, runner: RunnerLike) -> TrialLike | None:
        """Which of `RunnerLike.waiting` starts next, if any should. Asking changes nothing.

        The one that has waited longest of those that are PENDING; where there is none, of those
        that are PAUSED. A scheduler that pauses trials may want to say which of them go on; one
        that lets none go on when only PAUSED ones are left ends the experiment in an error.
        """
        first: TrialLike | None = None
        for trial in runner.waiting():
            if trial.status == "PENDING":
                return trial
            first = first or trial
        return first

    def horizon(self, trial: TrialLike) -> Horizon | None:  # noqa: ARG002
        """When the scheduler must be asked about the trial again; see the class."""
        return None

    def debug_string(self) -> str:
        """One line for the person at the terminal."""
        return f"Using {type(self).__name__}."
