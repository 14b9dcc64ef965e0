"""`OptunaSearch`: a `Searcher` that uses Optuna's samplers, by default TPE."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tunemq_scheduler.search.objective import (
    Metric,
    Mode,
    metric_names,
    need_objective,
    read_number,
    settle_objective,
)
from tunemq_scheduler.search.optuna.optuna_library import import_optuna, quiet, unflatten
from tunemq_scheduler.search.optuna.optuna_space import (
    ConfigMismatch,
    check_space,
    parameters,
    suggest,
)
from tunemq_scheduler.search.optuna.optuna_trial_json import dump_trial, load_trial
from tunemq_scheduler.search.same_values import same
from tunemq_scheduler.search.searcher import Searcher
from tunemq_scheduler.search.space import flatten, path_name, read_space, variables
from tunemq_shared.base.errors import ConfigError, SearchSpaceError
from tunemq_shared.base.safe_text import repr_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

log = logging.getLogger(__name__)


class OptunaSearch(Searcher):
    """Suggest configurations with one of Optuna's samplers.

    With the default sampler, a suggestion depends only on the seed, on the number of earlier ones,
    and on the results so far and their order; a resumed search continues exactly. A trial that was
    stopped early counts with its last result. A trial that failed, or whose last metric is missing
    or not finite, counts as failed.

    After a restart, a sampler or function of the user's is asked for the trials of the earlier run
    again, so that a seeded sampler continues its sequence. If a sampler suggests other values than
    then, a warning says so, and it continues with a new seed.

    Args:
        space: the space to search, if not ``param_space``: a TuneMQ space, a dict of Optuna's
            distributions (nested names joined by ``/``), or a function that calls
            ``trial.suggest_*`` and may return a dict of further values.
        metric: the result key to optimise, or several for multi-objective search. Default:
            ``TuneConfig``'s metric.
        mode: ``min`` or ``max``, one for each metric.
        points_to_evaluate: the first configurations, complete or partial.
        sampler: one of ``optuna.samplers``, seeded by the caller.
        seed: for the default sampler, instead of the experiment's seed.
        evaluated_rewards: the values of ``points_to_evaluate``, which are then not run again.
    """

    def __init__(
        self,
        space: Mapping[str, Any] | Callable[[Trial], dict[str, Any] | None] | None = None,
        metric: Metric = None,
        mode: Mode = None,
        points_to_evaluate: Sequence[dict[str, Any]] | None = None,
        sampler: BaseSampler | None = None,
        seed: int | None = None,
        evaluated_rewards: Sequence[float] | None = None,
    ) -> None:
        super().__init__(metric, mode)
        samplers = self._optuna.samplers
        if sampler is not None and not isinstance(sampler, samplers.BaseSampler):
            raise ConfigError(
                f"OptunaSearch(sampler={sampler!r}): one of optuna.samplers is needed."
            )
        if sampler is not None and seed is not None:
            raise ConfigError("OptunaSearch(sampler=..., seed=...): pass the seed to the sampler.")
        self._sampler, self._seed = sampler, seed
        self._points = list(points_to_evaluate or [])
        self._rewards = None if evaluated_rewards is None else list(evaluated_rewards)
        if self._rewards is not None and len(self._rewards) != len(self._points):
            raise ConfigError(
                f"OptunaSearch has {len(self._points)} points_to_evaluate and {len(self._rewards)} "
                "evaluated_rewards; there must be one for each."
            )
        self._asks_again = sampler is not None or callable(space)
        self._space: Any = None
        self._distributions: dict[str, BaseDistribution] | None = None
        self._read_own_space(space)
        self._study: Study | None = None
        self._is_stopped = False
        self._calls = 0
        self._numbers: dict[str, int] = {}

    @property
    def _optuna(self) -> ModuleType:
        return import_optuna("OptunaSearch")  # a module in an attribute could not be copied

    def _read_own_space(self, space: Any) -> None:
        if space is None or callable(space):
            self._space = space
            return
        base = self._optuna.distributions.BaseDistribution
        flat = {path_name(path): leaf for path, leaf in flatten(read_space(space)).items()}
        if any(isinstance(leaf, base) for leaf in flat.values()):
            odd = [name for name, leaf in flat.items() if not isinstance(leaf, base)]
            if odd:
                raise SearchSpaceError(
                    f"OptunaSearch(space=...): {odd[0]} is not a distribution, though others "
                    "are; write constants in param_space."
                )
            self._distributions = flat
        self._space = read_space(space)
        check_space(self._space, "OptunaSearch")

    def set_search_properties(
        self, metric: Metric, mode: Mode, config: dict[str, Any], **spec: Any
    ) -> bool:
        """Set metric and mode, and the space unless the searcher has its own.

        Raises:
            ConfigError: metric or mode is missing, or differs from the searcher's own.
            SearchSpaceError: Optuna cannot search the space, or a point does not fit into it.
        """
        own = (self._metric, self._mode)
        self._metric, self._mode = settle_objective("OptunaSearch", own, (metric, mode))
        need_objective("OptunaSearch", self._metric, self._mode)
        if self._seed is None:
            self._seed = spec.get("seed")
        if self._seed is None:
            self._seed = random.SystemRandom().getrandbits(32)
        takes_config = self._space is None
        if takes_config:
            self._space = read_space(config)
            check_space(self._space, "OptunaSearch")
            if not any(True for _ in variables(self._space)):
                raise SearchSpaceError(
                    "OptunaSearch has nothing to search: param_space has only constants; write "
                    "e.g. {'lr': loguniform(1e-4, 1e-1)}."
                )
        self._begin()
        return takes_config

    def _begin(self) -> None:
        self._new_study()
        self._points = [self._read_point(index, point) for index, point in enumerate(self._points)]
        if self._rewards is not None:
            points, self._points = self._points, []
            for point, reward in zip(points, self._rewards, strict=True):
                self.add_evaluated_point(point, reward)

    def _new_study(self, trials: Iterable[FrozenTrial] = ()) -> None:
        directions = ["minimize" if m == "min" else "maximize" for m in metric_names(self._mode)]
        with quiet(self._optuna):
            self._study = study = self._optuna.create_study(
                directions=directions,
                sampler=self._sampler or self._seeded_sampler(),
                pruner=self._optuna.pruners.NopPruner(),
            )
            study.add_trials(trials)
        # A sampler at the end of its grid, or a function, stops the study; Optuna's own method
        # raises outside its `optimize`.
        study.stop = self._stop
        self._is_stopped = False

    def _stop(self) -> None:
        self._is_stopped = True

    def _read_point(self, index: int, point: dict[str, Any]) -> dict[str, Any]:
        """Convert a point to Optuna's parameters; nested names may already be joined by ``/``."""
        if callable(self._space) or self._distributions is not None:
            return {path_name(path): value for path, value in flatten(point).items()}
        try:
            return parameters(self._space, unflatten(point), partial=True)
        except ConfigMismatch as error:
            raise SearchSpaceError(
                f"points_to_evaluate[{index}] does not fit the search space: {error}."
            ) from None

    # --- suggestions ------------------------------------------------------------------------------

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """Sample the next configuration; return FINISHED once the study was stopped."""
        study = self._begun()
        if self._is_stopped:
            return Searcher.FINISHED
        with quiet(self._optuna):
            if self._sampler is None:
                study.sampler = self._seeded_sampler()
            if self._calls < len(self._points):
                study.enqueue_trial(self._points[self._calls])
            self._calls += 1
            trial = study.ask(self._distributions)
            config = self._values(trial)
        self._numbers[trial_id] = trial.number
        return config

    def _values(self, trial: Any) -> dict[str, Any]:
        if self._distributions is not None:
            return unflatten(trial.params)
        if not callable(self._space):
            config: dict[str, Any] = suggest(self._space, trial)
            return config
        returned = self._space(trial)
        if returned is not None and not isinstance(returned, dict):
            raise SearchSpaceError(
                f"the function given as OptunaSearch(space=...) returned {returned!r}; "
                "it must return a dict of further values, or None."
            )
        return unflatten({**trial.params, **(returned or {})})

    def _seeded_sampler(self) -> BaseSampler:
        """Create a TPE sampler with a new generator for each call, independent of earlier draws."""
        seed = random.Random(f"{self._seed}/optuna/{self._calls}").getrandbits(32)
        sampler: BaseSampler = self._optuna.samplers.TPESampler(seed=seed)
        return sampler

    # --- results ----------------------------------------------------------------------------------

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Pass the last values to Optuna, or that the trial failed."""
        number = self._numbers.get(trial_id)
        if number is None:
            return
        metrics = metric_names(self._metric)
        values = [read_number(result or {}, metric) for metric in metrics]
        failed = error or any(value is None for value in values)
        states = self._optuna.trial.TrialState
        with quiet(self._optuna):
            if failed:
                self._begun().tell(number, state=states.FAIL, skip_if_finished=True)
            else:
                told = [value for value in values if value is not None]
                self._begun().tell(number, told, skip_if_finished=True)

    def on_trial_restored(self, trial_id: str, config: dict[str, Any], **spec: Any) -> bool:
        """Add a running trial with the parameters of this configuration to Optuna's study."""
        number = spec.get("number", self._calls)
        known = self._numbers.get(trial_id)
        if known is None and number >= self._calls:
            self._calls = number
            if self._asks_again and self._suggests_again(trial_id, config):
                return True
            self._calls = number + 1
        trials = self._begun().get_trials(deepcopy=False)
        try:
            if known is None:
                running = self._trial("RUNNING", config)
            else:  # it had ended, and continues
                running = copy.copy(trials[known])
                running.state, running.values = self._optuna.trial.TrialState.RUNNING, None
                running.datetime_complete = None
        except ConfigMismatch:
            return False  # the space has changed
        self._numbers[trial_id] = len(trials)
        self._begun().add_trial(running)
        return True

    def _suggests_again(self, trial_id: str, config: dict[str, Any]) -> bool:
        """Ask for a trial of an earlier run again; if that fails, undo it, and ask no more."""
        trials = self._begun().get_trials(deepcopy=False)
        with contextlib.suppress(Exception):  # the user's function may raise anything
            suggested = self.suggest(trial_id)
            if isinstance(suggested, dict) and _contains(config, suggested):
                return True
        self._asks_again = False
        self._numbers.pop(trial_id, None)
        self._new_study(trials)
        if self._sampler is not None:
            self._sampler.reseed_rng()
            log.warning(
                (
                    "After the restart, %s suggests other configurations than before: it has no "
                    "seed, or its settings, the search space or a version changed. It continues "
                    "with a new seed, and may try a configuration again."
                ),
                type(self._sampler).__name__,
            )
        return False

    def add_evaluated_point(
        self,
        parameters: dict[str, Any],
        value: float,
        error: bool = False,
        pruned: bool = False,
        intermediate_values: list[float] | None = None,
    ) -> None:
        """Add a finished trial to Optuna's study.

        Args:
            parameters: a configuration, or its parameters as Optuna names them.
            value: the measured value; a list for several metrics.
            error: whether the trial failed.
            pruned: whether it was stopped early.
            intermediate_values: the intermediate values, from step 0.

        Raises:
            SearchSpaceError: the configuration does not fit the search space.
        """
        measured = list(value) if isinstance(value, Sequence) else [value]
        study = self._begun()
        try:
            trial = self._trial(
                "FAIL" if error else "PRUNED" if pruned else "COMPLETE",
                unflatten(parameters),
                values=None if error else measured,
                intermediate_values=dict(enumerate(intermediate_values or [])),
            )
        except ConfigMismatch as problem:
            raise SearchSpaceError(
                f"the evaluated point {parameters!r} does not fit the search space: {problem}."
            ) from None
        study.add_trial(trial)

    def _trial(self, state: str, config: dict[str, Any], **options: Any) -> FrozenTrial:
        """Return a trial with the parameters of a configuration.

        Raises:
            ConfigMismatch: the configuration does not fit the search space.
        """
        try:
            params, distributions = self._inverse(config)
            trial: FrozenTrial = self._optuna.trial.create_trial(
                state=self._optuna.trial.TrialState[state],
                params=params,
                distributions=distributions,
                **options,
            )
        except ConfigMismatch:
            raise
        except Exception as error:  # the user's function may raise anything
            raise ConfigMismatch(f"{type(error).__name__}: {error}") from error
        return trial

    def _inverse(
        self, config: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """Return the parameters and distributions that produce a configuration."""
        flat = {path_name(path): leaf for path, leaf in flatten(config).items()}
        if self._distributions is not None:
            missing = [name for name in self._distributions if name not in flat]
            if missing:
                raise ConfigMismatch(f"{missing[0]} is missing")
            return {name: flat[name] for name in self._distributions}, self._distributions
        if callable(self._space):
            fixed = self._optuna.trial.FixedTrial(flat)
            self._space(fixed)
        else:
            fixed = self._optuna.trial.FixedTrial(parameters(self._space, config))
            suggest(self._space, fixed)
        return fixed.params, fixed.distributions

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any] | None:
        """Return the whole study; None with a user's sampler, which may have other state."""
        if self._sampler is not None:
            return None
        trials = [dump_trial(trial) for trial in self._begun().get_trials(deepcopy=False)]
        if any(trial is None for trial in trials):
            return None
        return {
            "calls": self._calls,
            "numbers": dict(self._numbers),
            "is_stopped": self._is_stopped,
            "trials": trials,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned, replacing all earlier results."""
        self._new_study(map(load_trial, state["trials"]))
        self._calls, self._numbers = state["calls"], dict(state["numbers"])
        self._is_stopped = state.get("is_stopped", False)

    def _begun(self) -> Study:
        if self._study is None:
            raise ConfigError("OptunaSearch is used before set_search_properties.")
        return self._study


def _contains(config: dict[str, Any], suggested: dict[str, Any]) -> bool:
    """Return whether a configuration has all suggested values, except those drawn afterwards."""
    whole = flatten(config)
    return all(
        any(variables(value))
        # Values such as arrays cannot be compared.
        or (path in whole and (same(whole[path], value) or repr_of(whole[path]) == repr_of(value)))
        for path, value in flatten(suggested).items()
    )
