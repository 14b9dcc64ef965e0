"""`ResourceChangingScheduler`: changes the resources of trials while they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunemq_scheduler.schedulers.decisions import Action, Answer, SetResources, Stop, read_answer
from tunemq_scheduler.schedulers.fifo import FIFOScheduler
from tunemq_scheduler.schedulers.resource_allocation import DistributeResources
from tunemq_scheduler.schedulers.trial_scheduler import RunnerLike, TrialLike, TrialScheduler
from tunemq_scheduler.search.algorithm_states import state_of
from tunemq_scheduler.search.objective import Metric, Mode, accepted
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import Horizon, first_that_holds
from tunemq_shared.trainable.resources import PlacementGroupFactory, ResourceInput

#: Called with the search, a trial, its result and the `ResourceChangingScheduler`; returns the
#: trial's new request, whole, or None to keep the one that it has.
AllocationFunction = Callable[
    [RunnerLike, TrialLike, dict[str, Any], "ResourceChangingScheduler"], ResourceInput | None
]


class ResourceChangingScheduler(TrialScheduler):
    """Change the resources of running trials, and leave all other decisions to ``base_scheduler``.

    After each result that leaves a trial running, ``resources_allocation_function`` may answer
    another request for it. The trial then saves, gives its slot back, and waits for a slot of the
    new size. ``self.trial_resources`` of a class, or ``get_context().get_trial_resources()`` in a
    function, says what it has got. A function continues from the checkpoint that it reported last;
    without one it begins again.

    Each result waits for the answer, also if ``base_scheduler`` lets trials run ahead.

    Differences from Ray Tune: a request is one dict of amounts, because a trial runs on one node;
    bundles are added up.

    Args:
        base_scheduler: makes all other decisions. Default: first in, first out.
        resources_allocation_function: called with the search, the trial, its result and this
            scheduler; returns a dict such as ``{"cpu": 2}``, a `PlacementGroupFactory`, or None for
            no change. Default: `DistributeResources`.

    Raises:
        ConfigError: an argument is invalid; the message names it.

    Example:
        >>> from tunemq.schedulers import ASHAScheduler, ResourceChangingScheduler
        >>> def two_cpus_after_ten_steps(runner, trial, result, scheduler):
        ...     return {"cpu": 2} if result["training_iteration"] >= 10 else None
        >>> scheduler = ResourceChangingScheduler(ASHAScheduler(), two_cpus_after_ten_steps)
    """

    def __init__(
        self,
        base_scheduler: TrialScheduler | None = None,
        resources_allocation_function: AllocationFunction | None = None,
    ) -> None:
        base = FIFOScheduler() if base_scheduler is None else base_scheduler
        if not isinstance(base, TrialScheduler) or isinstance(base, ResourceChangingScheduler):
            raise ConfigError(
                f"ResourceChangingScheduler(base_scheduler={base_scheduler!r}) is invalid: give "
                "another trial scheduler, such as ASHAScheduler()."
            )
        allocate = resources_allocation_function or DistributeResources()
        if isinstance(allocate, type) or not callable(allocate):
            raise ConfigError(
                f"ResourceChangingScheduler(resources_allocation_function={allocate!r}) is "
                "invalid: give a function, or an object such as DistributeResources()."
            )
        self._base, self._allocate = base, allocate
        self.checkpoint_interval = base.checkpoint_interval
        #: The trials that have not ended.
        self._live: dict[str, None] = {}
        #: The first request of each trial that has had another since.
        self._first: dict[str, dict[str, float]] = {}
        #: Until when the base scheduler need not be asked about a trial.
        self._horizons: dict[str, Horizon | None] = {}

    # --- what an allocation function may ask ------------------------------------------------------

    @property
    def num_trials(self) -> int:
        """The number of trials that have not ended."""
        return len(self._live)

    def first_resources(self, trial: TrialLike) -> dict[str, float]:
        """Return the request with which a trial began."""
        return dict(self._first.get(trial.trial_id, trial.resources))

    @property
    def metric(self) -> Metric:
        """The base scheduler's metric."""
        return self._base.metric

    @property
    def objective(self) -> tuple[Metric, Mode]:
        """The metric and the mode of the search or of the base scheduler."""
        return self._metric, self._mode

    # --- trials and results -----------------------------------------------------------------------

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Set the metric, the mode and the seed of the base scheduler.

        Raises:
            ConfigError: the base scheduler raises it.
        """
        tell = self._base.set_search_properties
        is_accepted = tell(metric, mode, **accepted(tell, spec))
        own = getattr(self._base, "_metric", None), getattr(self._base, "_mode", None)
        self._metric, self._mode = metric or own[0], mode or own[1]
        return is_accepted

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Count the trial, and pass it on."""
        self._live[trial.trial_id] = None
        return self._pass_on("on_trial_add", runner, trial)

    def on_trial_result(
        self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]
    ) -> Answer:
        """Answer what the base scheduler decides, and a new request if the trial continues."""
        name = trial.trial_id
        horizon = self._horizons[name] if name in self._horizons else self._base.horizon(trial)
        if horizon is not None and first_that_holds(horizon, result) is None:
            self._base.observe(runner, trial, result)
            return self._new_request(runner, trial, result)
        decision, *actions = self._pass_on("on_trial_result", runner, trial, result, about=name)
        if decision == self.STOP:
            self._end(name)
        is_changed = any(isinstance(one, Action) and one.trial_id == name for one in actions)
        if decision == self.CONTINUE and not is_changed:
            actions += self._new_request(runner, trial, result)
        return [decision, *actions]

    def on_trial_complete(
        self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]
    ) -> Answer:
        """Pass on that the trial ended."""
        self._end(trial.trial_id)
        return self._pass_on("on_trial_complete", runner, trial, result)

    def on_trial_error(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Pass on that the trial failed; `Tuner.restore` may run it again."""
        self._live.pop(trial.trial_id, None)
        return self._pass_on("on_trial_error", runner, trial)

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Pass on that the trial ended while it did not run."""
        self._end(trial.trial_id)
        return self._pass_on("on_trial_remove", runner, trial)

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:
        """Pass on that the trial begins again from nothing."""
        self._base.on_trial_restart(runner, trial)

    def on_search_exhausted(self, runner: RunnerLike) -> Answer:
        """Pass on that no further trials come."""
        return self._pass_on("on_search_exhausted", runner)

    def on_stall(self, runner: RunnerLike) -> Answer:
        """Pass on that nothing runs."""
        return self._pass_on("on_stall", runner)

    def choose_trial_to_run(self, runner: RunnerLike) -> TrialLike | None:
        """Return the base scheduler's choice."""
        return self._base.choose_trial_to_run(runner)

    def horizon(self, trial: TrialLike) -> Horizon | None:
        """Return None, so that each result may change the trial's request."""
        self._horizons[trial.trial_id] = self._base.horizon(trial)
        return None

    def debug_string(self) -> str:
        """Return one line about its state, for the terminal."""
        return f"{self._base.debug_string()} Resources change while trials run."

    # --- changes ----------------------------------------------------------------------------------

    def _new_request(
        self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]
    ) -> list[Action]:
        """Return the action that changes a trial's request, if it is to change."""
        wanted = self._allocate(runner, trial, result, self)
        if wanted is None:
            return []
        if not isinstance(wanted, Mapping | PlacementGroupFactory):
            raise ConfigError(
                f"resources_allocation_function returned {wanted!r}; return a dict such as "
                '{"cpu": 2}, a PlacementGroupFactory, or None.'
            )
        if isinstance(wanted, Mapping):
            wanted = PlacementGroupFactory([wanted])
        request = wanted.required_resources
        before = trial.resources
        if request == before:
            return []
        self._first.setdefault(trial.trial_id, dict(before))
        why = f"resources change from {_shown(before)} to {_shown(request)}"
        return [SetResources(trial, why, request)]

    def _pass_on(self, method: str, *args: Any, about: str = "") -> list[str | Action]:
        """Ask the base scheduler; return its decision, if ``about`` names a trial, and actions."""
        answer = getattr(self._base, method)(*args)
        decision, actions = read_answer(self._base, method, answer, about)
        for action in actions:
            if isinstance(action, Stop):
                self._end(action.trial_id)
        return [decision, *actions] if about else list(actions)

    def _end(self, name: str) -> None:
        self._live.pop(name, None)
        self._first.pop(name, None)
        self._horizons.pop(name, None)

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any] | None:
        """Return the base scheduler's state and the trials; None if that one has no state."""
        base = state_of(self._base)
        return None if base is None else {"base": base, "live": [*self._live], "first": self._first}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._base.set_state(state["base"])
        self._live, self._first = dict.fromkeys(state["live"]), dict(state["first"])
        self._horizons = {}


def _shown(request: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in request.items())
