"""`Tuner`: a search, from what users write to what they get."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.config import RunConfig, TuneConfig
from tunemq_scheduler.experiment import new_experiment
from tunemq_scheduler.prepare import prepare
from tunemq_scheduler.result_grid import ResultGrid
from tunemq_shared.errors import ConfigError, TuneError


class Tuner:
    """Searches for the best configuration of a trainable.

    Args:
        trainable: a function of a configuration, or a `Trainable` class.
        param_space: the search space: a dict of names to values, domains such as ``uniform(0, 1)``,
            ``grid_search([...])``, and dicts of those.
        tune_config: how it is searched.
        run_config: how it is run, and where its files go.
    """

    def __init__(
        self,
        trainable: Any,
        *,
        param_space: dict[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        self._trainable = trainable
        self._param_space = param_space
        self._tune_config = _given("tune_config", tune_config, TuneConfig)
        self._run_config = _given("run_config", run_config, RunConfig)
        self._results: ResultGrid | None = None

    def fit(self, *, debug: bool = False) -> ResultGrid:
        """Run the search, and return when it is over.

        Redis, a worker and everything else it needs are started for this script, stay warm for the
        next search, and end with it.

        Args:
            debug: run only the first trial, in this process, so that breakpoints and pdb work.

        Raises:
            UserError: something in the search is not usable; nothing was started.
            StoreError: its store cannot be used; nothing was started.
            KeyboardInterrupt: Ctrl-C; everything was saved before.
            TuneError: the search could not go on.
        """
        prepared = prepare(self._trainable, self._param_space, self._tune_config, self._run_config)
        experiment = new_experiment(prepared)
        self._results = experiment.run_here() if debug else experiment.run()
        return self._results

    def get_results(self) -> ResultGrid:
        """What `fit` returned.

        Raises:
            TuneError: it has not been called.
        """
        if self._results is None:
            raise TuneError("Tuner.get_results() has nothing to return before fit() was called.")
        return self._results


def _given(name: str, config: Any, kind: type[Any]) -> Any:
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise ConfigError(f"Tuner({name}={config!r}) is not usable: give a {kind.__name__}.")
    return config
