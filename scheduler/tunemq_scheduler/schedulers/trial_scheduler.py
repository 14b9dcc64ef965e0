"""`TrialScheduler`: the interface of algorithms that stop and pause trials, as in Ray Tune."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from tunemq_scheduler.schedulers.decisions import DECISIONS, NOOP, Answer, SchedulerDecision
from tunemq_scheduler.search.algorithm_states import Stateful
from tunemq_scheduler.search.objective import Metric, Mode, settle_objective
from tunemq_shared.protocol import messages
from tunemq_shared.protocol.result_conditions import Horizon


def decides_as(scheduler: TrialScheduler, base: type[TrialScheduler]) -> bool:
    """Return whether a scheduler still has the ``on_trial_result`` of ``base``.

    A subclass that overrides it without defining ``horizon`` must be asked about every result: the
    horizons of ``base`` do not apply to it.
    """
    return type(scheduler).on_trial_result is base.on_trial_result


class TrialLike(Protocol):
    """A trial as a scheduler sees it; do not change it."""

    @property
    def trial_id(self) -> str:
        """The trial's ID."""
        ...

    @property
    def number(self) -> int:
        """The trial's place in the experiment, from 0."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The trial's configuration."""
        ...

    @property
    def resources(self) -> dict[str, float]:
        """The resources that the trial requests, such as ``{"cpu": 2.0}``."""
        ...

    @property
    def status(self) -> str:
        """PENDING, RUNNING, PAUSED, TERMINATED or ERROR."""
        ...

    @property
    def last_result(self) -> dict[str, Any]:
        """The trial's newest result; empty before the first."""
        ...


class RunnerLike(Protocol):
    """The experiment as a scheduler sees it."""

    def get_trials(self) -> Sequence[TrialLike]:
        """Return the trials that have not ended, by number."""
        ...

    def get_trial(self, trial_id: str) -> TrialLike | None:
        """Return a trial that has not ended; None if there is none with this id."""
        ...

    def has_waiting(self) -> bool:
        """Return whether trials wait for a slot or are paused, or further ones may come."""
        ...

    def expects_trials(self) -> bool:
        """Return whether the search may add trials while those that it has are unfinished."""
        ...

    def total_resources(self) -> dict[str, float]:
        """Return all nodes' resources together."""
        ...

    def capacity(self, resources: dict[str, float]) -> int:
        """Return how many trials with this request all nodes could run if they ran no others."""
        ...

    def waiting(self) -> Iterable[TrialLike]:
        """Return the trials that could start now: PENDING, then PAUSED; longest waiting first."""
        ...


class TrialScheduler(Stateful):
    """Base class of trial schedulers: decide from results whether trials continue, pause or stop.

    **Threads.** One thread at a time calls it, and calls never overlap.

    **Order.** `set_search_properties` is called once, first. Then, for each trial: `on_trial_add`;
    `on_trial_result` for the results about which it is asked; and at the end exactly one of
    `on_trial_complete` (the trial ended by itself, or something other than the scheduler stopped
    it), `on_trial_error` and `on_trial_remove` (it never ran, or was paused), unless the
    scheduler itself stopped it. A trial that fails and is retried has not ended. No result of a
    retried trial is shown twice. `Tuner.restore` may run an ended trial again: `on_trial_add`
    follows, and `on_trial_restart` before it if the trial starts from scratch.

    **Horizon.** After `on_trial_add` and after each result about which it was asked, `horizon` says
    when the scheduler must be asked about the trial again:

    * None, the default: about the next result. The trial waits for the answer after every result.
    * ``()``: never. The trial runs to its end at full speed.
    * conditions: about the first result for which one of them holds. Earlier results only go to
      `observe`.

    So a scheduler that declares horizons is asked **only** about results that reach them. It sees a
    final result only in `on_trial_complete`. If the newest result already
    reaches a declared horizon, it means the next result. A horizon may depend only on the calls
    that the scheduler received.

    **Actions.** Each method named ``on_...`` may also return actions on any trial: a `Stop`,
    `Pause`, `Resume`, `Exploit`, `SetConfig` or `SetResources`, or a list of them;
    `on_trial_result` also with its decision in the list.
    They follow the event about which the method was called, in the list's order. An action that
    changes nothing, such as a `Stop` of an ended trial, is ignored.

    **Answers are journalled.** Decisions and actions are journalled with their reasons and not
    asked for again. After a restart the scheduler receives its state, if `get_state` returns one.
    Otherwise it receives the trials, and the results about which it was asked, again in the
    journal's order, and its answers are ignored.

    **Errors.** An exception in a method ends the experiment in ERROR, with its trials saved.
    """

    CONTINUE: ClassVar[SchedulerDecision] = DECISIONS[messages.CONTINUE]
    PAUSE: ClassVar[SchedulerDecision] = DECISIONS[messages.PAUSE]
    STOP: ClassVar[SchedulerDecision] = DECISIONS[messages.STOP]
    NOOP: ClassVar[str] = NOOP

    # Class attributes, so that a subclass that forgets super().__init__() works, too.
    _metric: Metric = None
    _mode: Mode = None
    #: The number of steps between two checkpoints that a class trainable must save, as trials
    #: continue from each other's states; None if the user sets it. 0 if trials need none.
    checkpoint_interval: int | None = 0

    @property
    def metric(self) -> Metric:
        """The metric that it compares, which every result must have; None for no metric."""
        return self._metric

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:  # noqa: ARG002
        """Set the experiment's metric and mode.

        Args:
            metric: as in ``TuneConfig``.
            mode: as in ``TuneConfig``.
            **spec: ``seed``; later versions may pass more.

        Returns:
            True; False if the scheduler cannot work with them, which is then an error.

        Raises:
            ConfigError: the scheduler already has another metric or mode.
        """
        own = (self._metric, self._mode)
        self._metric, self._mode = settle_objective(type(self).__name__, own, (metric, mode))
        return True

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Called when a trial is created."""

    def on_trial_result(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,  # noqa: ARG002
        result: dict[str, Any],  # noqa: ARG002
    ) -> Answer:
        """Return how the trial proceeds after this result: CONTINUE, PAUSE or STOP."""
        return self.CONTINUE

    def observe(self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]) -> None:
        """Called with each result before the trial's horizon; the trial does not wait for it."""

    def on_trial_complete(
        self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]
    ) -> Answer:
        """Called when a trial ended without this scheduler's STOP; ``result`` is its last one."""

    def on_trial_error(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Called when a trial failed and is not retried."""

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Called when a trial ended while not running: it never ran, or was paused."""

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:
        """Called when a failed trial starts from scratch: forget all results that it reported."""

    def on_search_exhausted(self, runner: RunnerLike) -> Answer:
        """Called when no further trials come; `on_trial_add` may follow after a restore."""

    def on_stall(self, runner: RunnerLike) -> Answer:
        """Called when no trial runs, and `choose_trial_to_run` chose none of those that could.

        Unless a trial can start afterwards, the search fails, as nothing could happen any more.
        """

    def choose_trial_to_run(self, runner: RunnerLike) -> TrialLike | None:
        """Return the trial of `RunnerLike.waiting` to start next, or None; changes nothing.

        By default the PENDING trial that has waited longest; without PENDING trials the PAUSED one.
        A scheduler that pauses trials may override this to choose which of them continue, or return
        only PENDING ones and answer `Resume` for those that are to continue. If it chooses none
        when only PAUSED trials remain, `on_stall` follows.
        """
        first: TrialLike | None = None
        for trial in runner.waiting():
            if trial.status == "PENDING":
                return trial
            first = first or trial
        return first

    def horizon(self, trial: TrialLike) -> Horizon | None:  # noqa: ARG002
        """Return when the scheduler must be asked about the trial again; see the class."""
        return None

    def debug_string(self) -> str:
        """Return one line about its state, for the terminal."""
        return f"Using {type(self).__name__}."
