"""`ExperimentAnalysis`: the return value of `tune.run`, an older interface to a `ResultGrid`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunemq_scheduler.results.result import Result
from tunemq_scheduler.results.result_grid import ResultGrid

if TYPE_CHECKING:
    import pandas as pd

    from tunemq_shared.checkpoints.checkpoint import Checkpoint


class ExperimentAnalysis:
    """The results of a search, with the names of Ray Tune's ``ExperimentAnalysis``.

    Here, a *trial* is its `Result`. The ``best_...`` properties use the metric and mode of
    ``tune.run``; the ``get_best_...`` methods accept others.

    Args:
        grid: the results.
    """

    def __init__(self, grid: ResultGrid) -> None:
        self._grid = grid

    @property
    def experiment_path(self) -> str:
        """The experiment's folder."""
        return self._grid.experiment_path

    @property
    def trials(self) -> list[Result]:
        """All trials, in the search's order."""
        return list(self._grid)

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """The last result of each trial, by trial ID."""
        return {result.trial_id: result.metrics for result in self._grid}

    @property
    def best_trial(self) -> Result:
        """The best trial."""
        return self._grid.get_best_result()

    @property
    def best_config(self) -> dict[str, Any]:
        """The best trial's configuration."""
        return self.best_trial.config

    @property
    def best_result(self) -> dict[str, Any]:
        """The best trial's last result."""
        return self.best_trial.metrics

    @property
    def best_logdir(self) -> str:
        """The best trial's folder."""
        return self.best_trial.path

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best trial's newest checkpoint."""
        return self.best_trial.checkpoint

    @property
    def results_df(self) -> pd.DataFrame:
        """The last result of each trial as a pandas table."""
        return self._grid.get_dataframe()

    def dataframe(self, metric: str | None = None, mode: str | None = None) -> pd.DataFrame:
        """Return a table with each trial's last result, or its best in ``metric``."""
        return self._grid.get_dataframe(metric, mode)

    def get_best_trial(
        self, metric: str | None = None, mode: str | None = None, scope: str = "last"
    ) -> Result:
        """Return the best trial; see `ResultGrid.get_best_result`."""
        return self._grid.get_best_result(metric, mode, scope)

    def get_best_config(
        self, metric: str | None = None, mode: str | None = None, scope: str = "last"
    ) -> dict[str, Any]:
        """Return the best trial's configuration."""
        return self.get_best_trial(metric, mode, scope).config

    def get_best_logdir(
        self, metric: str | None = None, mode: str | None = None, scope: str = "last"
    ) -> str:
        """Return the best trial's folder."""
        return self.get_best_trial(metric, mode, scope).path

    def get_best_checkpoint(self, trial: Result, metric: str, mode: str) -> Checkpoint | None:
        """Return a trial's best kept checkpoint; see `Result.get_best_checkpoint`."""
        return trial.get_best_checkpoint(metric, mode)
