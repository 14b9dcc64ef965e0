"""`TuneBOHB`: the search algorithm of BOHB, with Optuna's multivariate TPE as its model."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tunemq_scheduler.search.objective import (
    Metric,
    Mode,
    check_count,
    is_whole,
    metric_names,
    need_objective,
    read_number,
    settle_objective,
)
from tunemq_scheduler.search.optuna.bohb_config import read_bohb_config
from tunemq_scheduler.search.optuna.budget_observations import BudgetObservations
from tunemq_scheduler.search.optuna.optuna_library import import_optuna, quiet, unflatten
from tunemq_scheduler.search.optuna.optuna_space import (
    ConfigMismatch,
    check_space,
    count_parameters,
    parameters,
    suggest,
)
from tunemq_scheduler.search.optuna.optuna_trial_json import dump_trial, load_trial
from tunemq_scheduler.search.searcher import Searcher
from tunemq_scheduler.search.space import read_space
from tunemq_shared.base.errors import ConfigError, SearchSpaceError
from tunemq_shared.protocol.result_conditions import TRAINING_ITERATION

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial


class TuneBOHB(Searcher):
    """Suggest configurations as BOHB does, for the scheduler `HyperBandForBOHB`.

    S. Falkner, A. Klein, F. Hutter: BOHB: Robust and Efficient Hyperparameter Optimization at
    Scale, ICML 2018 (arXiv:1807.01774), section 4 and algorithm 2. The densities of good and bad
    configurations are those of Optuna's multivariate TPE sampler, which needs the extra ``optuna``.

    A *budget* is a ``training_iteration`` at which a trial was paused or ended, such as a milestone
    of HyperBand; each trial that reaches it is an observation at this budget. A suggestion comes
    from the model of the largest budget with enough observations: three more than the space has
    hyperparameters. Without such a budget, and for a third of all suggestions, it is drawn at
    random. Live trials that have not reached the budget of the model count as bad there, so that
    workers try different configurations. A result without a finite metric is no observation.

    A suggestion depends only on the seed, on the number of earlier ones, and on the results so far
    and their order; a resumed search continues exactly.

    Differences from Ray Tune, which uses hpbandster: ``space`` is no ``ConfigurationSpace``, and
    may have choices with hyperparameters of their own. With another scheduler there is no warning:
    under `FIFOScheduler`, all trials are observed at their end, and the model is that of TPE.

    Args:
        space (dict): the space to search, if not ``param_space``.
        bohb_config (dict): ``min_points_in_model``: a budget needs two observations more than this,
            by default the number of hyperparameters plus 1; ``num_samples``: the candidates for
            each suggestion, 64; ``random_fraction``: the share of random suggestions, 1/3.
        metric (str): the result key to optimise. Default: ``TuneConfig``'s metric.
        mode (str): ``min`` or ``max``.
        points_to_evaluate (list): the first configurations, complete or partial.
        seed (int): instead of the experiment's seed.
        max_concurrent (int): the most live trials; 0 for no limit. Paused trials do not count, and
            one that is resumed counts from its next result.

    Raises:
        ConfigError: an argument is invalid, or Optuna is not installed.

    Example:
        >>> from tunemq import loguniform
        >>> from tunemq.schedulers import HyperBandForBOHB
        >>> from tunemq.search.bohb import TuneBOHB
        >>> from tunemq.testing import simulate
        >>> search = simulate(
        ...     HyperBandForBOHB(max_t=9, reduction_factor=3),
        ...     TuneBOHB(bohb_config={"random_fraction": 0.2}),
        ...     lambda config, step: {"loss": abs(config["lr"] - 0.01) + 1 / step},
        ...     param_space={"lr": loguniform(1e-5, 1)},
        ...     metric="loss",
        ...     mode="min",
        ...     num_samples=60,
        ...     workers=3,
        ... )
        >>> search.best_over_time()[-1].value < 1 / 9 + 0.01
        True
    """

    def __init__(
        self,
        space: Mapping[str, Any] | None = None,
        bohb_config: Mapping[str, Any] | None = None,
        metric: str | None = None,
        mode: str | None = None,
        points_to_evaluate: Sequence[dict[str, Any]] | None = None,
        seed: int | None = None,
        max_concurrent: int = 0,
    ) -> None:
        super().__init__(metric, mode)
        _ = self._optuna  # report now that it is missing
        self._config = read_bohb_config(bohb_config)
        self._space: Any = None if space is None else _own_space(space)
        self._points = list(points_to_evaluate or [])
        self._seed = seed
        check_count("TuneBOHB", "max_concurrent", max_concurrent, least=0)
        self._max_concurrent = max_concurrent
        self._calls = 0
        self._observations = BudgetObservations(0)
        #: The parameters of all trials that are live, or may count for the model, as suggested.
        self._trials: dict[str, FrozenTrial] = {}
        self._live: set[str] = set()
        self._paused: set[str] = set()
        #: The trials at the model's budget, in the order of ``_trials``; None to build it anew.
        self._study: Study | None = None
        self._study_budget: int | None = None
        #: The numbers in it of live trials without an observation.
        self._pending: dict[str, int] = {}

    @property
    def _optuna(self) -> ModuleType:
        return import_optuna("TuneBOHB")  # a module in an attribute could not be copied

    def set_search_properties(
        self, metric: Metric, mode: Mode, config: dict[str, Any], **spec: Any
    ) -> bool:
        """Set metric and mode, and the space unless the searcher has its own.

        Raises:
            ConfigError: metric or mode is missing, differs from the searcher's own, or there are
                several metrics.
            SearchSpaceError: Optuna cannot search the space, or a point does not fit into it.
        """
        own = (self._metric, self._mode)
        self._metric, self._mode = settle_objective("TuneBOHB", own, (metric, mode))
        need_objective("TuneBOHB", self._metric, self._mode)
        if len(metric_names(self._metric)) != 1:
            raise ConfigError(
                f"TuneBOHB(metric={self._metric!r}) is invalid: BOHB optimises one metric; use "
                "OptunaSearch for several."
            )
        if self._seed is None:
            self._seed = spec.get("seed")
        if self._seed is None:
            self._seed = random.SystemRandom().getrandbits(32)
        takes_config = self._space is None
        if takes_config:
            self._space = _own_space(config)
        count = count_parameters(self._space)
        if not count:
            raise SearchSpaceError(
                "TuneBOHB has nothing to search: the space has only constants; write e.g. "
                "{'lr': loguniform(1e-4, 1e-1)}."
            )
        self._points = [self._read_point(index, point) for index, point in enumerate(self._points)]
        least = self._config.min_points_in_model or count + 1
        self._observations = BudgetObservations(enough=least + 2)
        return takes_config

    def _read_point(self, index: int, point: dict[str, Any]) -> dict[str, Any]:
        try:
            return parameters(self._space, unflatten(point), partial=True)
        except ConfigMismatch as error:
            raise SearchSpaceError(
                f"points_to_evaluate[{index}] does not fit the search space: {error}."
            ) from None

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Limit the number of live trials that are not paused."""
        check_count("TuneBOHB", "max_concurrent", max_concurrent, least=1)
        self._max_concurrent = max_concurrent
        return True

    # --- suggestions ------------------------------------------------------------------------------

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Draw the next configuration from the model or at random; None at the limit."""
        if self._max_concurrent and len(self._live - self._paused) >= self._max_concurrent:
            return None
        draw = random.Random(f"{self._seed}/bohb/{self._calls}")
        is_random = draw.random() < self._config.random_fraction
        point = self._points[self._calls] if self._calls < len(self._points) else None
        is_random |= point is not None or self._observations.model_budget is None
        seed = draw.getrandbits(32)
        self._calls += 1
        with quiet(self._optuna):
            study = self._random_study(seed, point) if is_random else self._model_study(seed)
            trial = study.ask()
            config: dict[str, Any] = suggest(self._space, trial)
            if study is self._study:
                # Optuna keeps values of branches of the space that were not chosen in this trial;
                # `_add` adds one without them, as after a restart.
                study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            self._begin(trial_id, self._running(trial))
        return config

    def _random_study(self, seed: int, point: dict[str, Any] | None) -> Study:
        """Return a study of no trials that draws at random what a point does not give."""
        study = self._new_study(self._optuna.samplers.RandomSampler(seed))
        if point is not None:
            study.enqueue_trial(point)
        return study

    def _model_study(self, seed: int) -> Study:
        """Return the study of the trials at the model's budget, with a sampler for one call."""
        with warnings.catch_warnings():
            # Of Optuna 4, for options that are stable in Optuna 5.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            sampler = self._optuna.samplers.TPESampler(
                n_startup_trials=0,
                n_ei_candidates=self._config.num_samples,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=seed,
            )
        if self._study is None:
            self._study = self._new_study(sampler)
            self._study_budget, self._pending = self._observations.model_budget, {}
            self._trials = {name: one for name, one in self._trials.items() if self._counts(name)}
            for trial_id in self._trials:
                self._add(self._study, trial_id)
        self._study.sampler = sampler
        return self._study

    def _counts(self, trial_id: str) -> bool:
        """Return whether a trial may count for the model, now or later."""
        return trial_id in self._live or self._observations.is_observed(trial_id)

    def _new_study(self, sampler: BaseSampler) -> Study:
        study: Study = self._optuna.create_study(
            direction="minimize" if metric_names(self._mode) == ("min",) else "maximize",
            sampler=sampler,
            pruner=self._optuna.pruners.NopPruner(),
        )
        return study

    def _running(self, trial: Any) -> FrozenTrial:
        """Return a running trial with the same parameters and nothing else."""
        running: FrozenTrial = self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState.RUNNING,
            params=trial.params,
            distributions=trial.distributions,
        )
        return running

    def _begin(self, trial_id: str, trial: FrozenTrial) -> None:
        self._trials[trial_id] = trial
        self._live.add(trial_id)
        if self._study is not None:
            self._add(self._study, trial_id)

    def _add(self, study: Study, trial_id: str) -> None:
        """Add a trial to the study, if it was observed at the model's budget or still may be."""
        trial = self._trials[trial_id]
        value = self._observations.at_model.get(trial_id)
        if value is not None:
            trial = self._optuna.trial.create_trial(
                value=value, params=trial.params, distributions=trial.distributions
            )
        elif trial_id in self._live:
            self._pending[trial_id] = len(study.get_trials(deepcopy=False))
        else:
            return
        study.add_trial(trial)

    # --- results ----------------------------------------------------------------------------------

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Record a result, which is an observation if its iteration is a budget."""
        if trial_id in self._live:
            self._paused.discard(trial_id)
            self._report(trial_id, result)

    def on_trial_pause(self, trial_id: str) -> None:
        """Make a budget of the iteration at which a trial was paused."""
        if trial_id in self._live:
            self._paused.add(trial_id)
            self._compare(trial_id)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Make a budget of the last iteration, unless the trial failed."""
        if trial_id not in self._live:
            return
        if result and not error:
            self._report(trial_id, result)
            self._compare(trial_id)
        self._observations.end(trial_id)
        self._live.discard(trial_id)
        self._paused.discard(trial_id)
        number = self._pending.pop(trial_id, None)
        if self._study is not None and number is not None:
            with quiet(self._optuna):
                self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
        if not self._counts(trial_id):
            del self._trials[trial_id]

    def _report(self, trial_id: str, result: dict[str, Any]) -> None:
        step = result.get(TRAINING_ITERATION)
        if step is None or not is_whole(step):
            return
        value = read_number(result, metric_names(self._metric)[0])
        self._learn(trial_id, self._observations.report(trial_id, int(step), value))

    def _compare(self, trial_id: str) -> None:
        self._learn(trial_id, self._observations.compare(trial_id))

    def _learn(self, trial_id: str, is_observation: bool) -> None:
        """Pass a new observation to the study; if that is not enough, have it built anew."""
        if self._study is None or not is_observation:
            return
        number = self._pending.pop(trial_id, None)
        if number is None or self._observations.model_budget != self._study_budget:
            self._study = None
        else:
            with quiet(self._optuna):
                self._study.tell(number, self._observations.at_model[trial_id])

    def on_trial_restored(self, trial_id: str, config: dict[str, Any], **spec: Any) -> bool:
        """Add a live trial with the parameters of this configuration."""
        self._calls = max(self._calls, spec.get("number", self._calls) + 1)
        chooser = self._optuna.trial.FixedTrial
        try:
            fixed = chooser(parameters(self._space, config))
        except ConfigMismatch:
            return False  # the space has changed
        suggest(self._space, fixed)
        self._study = None  # it may have ended, and then has its place in the study
        self._begin(trial_id, self._running(fixed))
        return True

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any] | None:
        """Return all trials and observations; None if JSON cannot represent a trial exactly."""
        trials = [[trial_id, dump_trial(trial)] for trial_id, trial in self._trials.items()]
        if any(dumped is None for _, dumped in trials):
            return None
        return {
            "calls": self._calls,
            "trials": trials,
            "live": sorted(self._live),
            "paused": sorted(self._paused),
            "observations": self._observations.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned, replacing all earlier results."""
        self._calls = state["calls"]
        self._trials = {trial_id: load_trial(dumped) for trial_id, dumped in state["trials"]}
        self._live, self._paused = set(state["live"]), set(state["paused"])
        self._observations.set_state(state["observations"])
        self._study = None


def _own_space(space: Any) -> Any:
    own = read_space(space)
    check_space(own, "TuneBOHB")
    return own
