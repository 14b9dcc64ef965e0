"""`Tuner`: configures, runs and restores a search."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, overload

from tunemq_scheduler.api.pickled_tuner import pickle_tuner_parts
from tunemq_scheduler.api.reused_algorithms import unused
from tunemq_scheduler.base.import_precedence import installed_packages_first
from tunemq_scheduler.experiment.open_experiment import ResumeOptions, keeper_of
from tunemq_scheduler.experiment.restore import (
    RestoredExperiment,
    can_restore,
    restored,
    results_so_far,
)
from tunemq_scheduler.experiment.run_experiment import Experiment, storage_for
from tunemq_scheduler.experiment.start_checks import prepare
from tunemq_scheduler.results.result_grid import ResultGrid
from tunemq_scheduler.settings.config import RunConfig, TuneConfig
from tunemq_scheduler.settings.saved_tuner import pickle_tuner
from tunemq_scheduler.settings.storage_settings import StorageLocation
from tunemq_shared.base.errors import ConfigError, TuneError
from tunemq_shared.system.standard_streams import fill_closed_descriptors

if TYPE_CHECKING:
    from tunemq_scheduler.api.experiment_handle import ExperimentHandle


class TunerParts(NamedTuple):
    """The arguments of a `Tuner`, in the order of `prepare`'s parameters."""

    trainable: Any
    param_space: dict[str, Any] | None
    tune: TuneConfig
    run: RunConfig


class Tuner:
    """A search for the best configuration of a trainable.

    Args:
        trainable (function, class or executable): a function that takes a configuration, a
            `Trainable` class, or an `executable`.
        param_space (dict): the search space: names mapped to constants, domains such as
            ``uniform(0, 1)``, ``grid_search([...])``, or nested dicts of these.
        tune_config (TuneConfig): how to search.
        run_config (RunConfig): how to run the trials, and where to store files.

    Raises:
        ConfigError: ``tune_config`` or ``run_config`` has another type.

    Example:
        >>> from tunemq import RunConfig, TuneConfig, Tuner, grid_search, report
        >>> def train(config):
        ...     report({"loss": (config["x"] - 3) ** 2})
        >>> tuner = Tuner(
        ...     train,
        ...     param_space={"x": grid_search([1, 2, 3])},
        ...     tune_config=TuneConfig(metric="loss", mode="min"),
        ...     run_config=RunConfig(verbose=0),
        ... )
        >>> tuner.fit().get_best_result().config
        {'x': 3}
    """

    #: Whether `fit` may run; not while a farm's process loads the script of a search.
    may_fit: ClassVar[bool] = True

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
        #: Finds the experiment that `fit` is to continue; None if it begins one.
        self._find: Callable[[], RestoredExperiment] | None = None
        self._found: RestoredExperiment | None = None
        self._results: ResultGrid | None = None

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        trainable: Any,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: dict[str, Any] | None = None,
        *,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> Self:
        """Create a tuner that continues an experiment: finished, stopped, interrupted or crashed.

        `fit` then runs the remaining trials; those that a stop of the whole experiment ended stay
        ended, also where its time budget or a stopper's ``stop_all`` was the reason.

        This method unpickles the experiment's settings from its folder, which can execute code:
        restore only experiments of people whom you trust.

        Args:
            path (str or path): the experiment's folder, or its address in a store.
            trainable (function, class or executable): the same trainable as before; its code may
                have been corrected.
            resume_unfinished (bool): continue unfinished trials from their last checkpoints; False
                ends them as they are.
            resume_errored (bool): continue trials in ERROR from their last checkpoints.
            restart_errored (bool): restart trials in ERROR from the beginning; what they reported
                before no longer counts.
            param_space (dict): the same search space as before; needed where it could not be
                pickled or refers to an object that has moved.
            tune_config (TuneConfig): replaces the earlier one, for instance with more
                ``num_samples`` or, for trials that had not ended, another ``time_budget_s``.
                Metric, mode, seed and the types of the algorithms cannot change.
            run_config (RunConfig): replaces the earlier one, for instance with other callbacks,
                more retries or another ``stop``; trials that only the old criteria ended continue,
                if these were a dict.
                The experiment's location and its checkpoint settings cannot change.

        Returns:
            The tuner.

        Raises:
            ConfigError: the experiment cannot be restored with these arguments; the message says
                why. Nothing was changed.
            JournalError: the experiment's journal cannot be read.
            StoreError: the experiment's store cannot be reached.
        """
        if resume_errored and restart_errored:
            raise ConfigError(
                "Tuner.restore(resume_errored=True, restart_errored=True): trials in ERROR can "
                "continue from their last checkpoints or restart; choose one."
            )
        find = partial(
            restored,
            path,
            trainable,
            ResumeOptions(
                unfinished=resume_unfinished,
                errored="resume" if resume_errored else "restart" if restart_errored else "",
            ),
            param_space=param_space,
            tune_config=None
            if tune_config is None
            else _given("tune_config", tune_config, TuneConfig),
            run_config=None if run_config is None else _given("run_config", run_config, RunConfig),
        )
        found = find()
        tuner = cls(
            trainable,
            param_space=found.param_space,
            tune_config=found.tune,
            run_config=found.run,
        )
        tuner._find, tuner._found = find, found
        return tuner

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether an experiment exists in this folder, or at this address in a store."""
        return can_restore(path)

    @property
    def parts(self) -> TunerParts:
        """The tuner's arguments, for code that runs it in another process."""
        return TunerParts(self._trainable, self._param_space, self._tune_config, self._run_config)

    @overload
    def fit(
        self,
        *,
        debug: bool = False,
        address: str | None = None,
        detached: Literal[False] = False,
        priority: int = 0,
        folder: str | os.PathLike[str] | None = None,
    ) -> ResultGrid: ...

    @overload
    def fit(
        self,
        *,
        address: str,
        detached: Literal[True],
        priority: int = 0,
        folder: str | os.PathLike[str] | None = None,
    ) -> ExperimentHandle: ...

    def fit(
        self,
        *,
        debug: bool = False,
        address: str | None = None,
        detached: bool = False,
        priority: int = 0,
        folder: str | os.PathLike[str] | None = None,
    ) -> ResultGrid | ExperimentHandle:
        """Run the search; return when it has ended.

        Without an address, TuneMQ starts Redis, a worker and everything else for this script. They
        stay warm for the next search and end with the script.

        Args:
            debug (bool): run only the first trial, in this process, so that breakpoints and pdb
                work.
            address (str): the URL of a farm's Redis, such as ``redis://host:6379/0``. The search
                then runs on the farm's scheduler, even after this script ends; its code is sent
                there.
            detached (bool): return an `ExperimentHandle` immediately; only with ``address``.
            priority (int): on a farm, experiments with a higher priority come first.
            folder (str or path): the folder of the code to send to the farm. Default: the script's
                folder if the script imports modules from there, else the script alone.

        Returns:
            The results; with ``detached=True`` a handle of the experiment.

        Raises:
            UserError: a setting is invalid; nothing was started.
            StoreError: the store cannot be used; nothing was started.
            KeyboardInterrupt: the user pressed Ctrl-C; the search was saved before. On a farm it
                continues.
            TuneError: the search cannot continue; the farm has no scheduler, or rejects the
                experiment.
        """
        if not Tuner.may_fit:
            raise ConfigError(
                "the script calls fit() or run() while the farm loads it, which runs the search "
                'twice: move that call below `if __name__ == "__main__":`.'
            )
        if address is None:
            if detached or priority or folder is not None:
                raise ConfigError(
                    "Tuner.fit(detached=..., priority=..., folder=...) apply to a farm; pass "
                    "its address, too: fit(address='redis://host:6379/0')."
                )
            fill_closed_descriptors()
            experiment = self._experiment()
            self._results = experiment.run_here() if debug else experiment.run()
            return self._results
        handle = self._begin_on_farm(address, priority, folder, debug=debug)
        if detached:
            return handle
        self._results = handle.attach(shows=self._run_config.verbose > 0)
        return self._results

    def _begin_on_farm(
        self, address: str, priority: int, folder: str | os.PathLike[str] | None, *, debug: bool
    ) -> ExperimentHandle:
        if debug:
            raise ConfigError("Tuner.fit(debug=True) runs in this process; remove the address.")
        if self._find is not None:
            raise ConfigError(
                "a restored Tuner cannot be sent to a farm; continue the farm's experiment "
                "with `tunemq resume NAME`, or this machine's with fit()."
            )
        # Pickle before `prepare`, which sets up the algorithms among the parts.
        parts = self._unused_parts()
        pickled = pickle_tuner_parts(*parts)
        prepared = prepare(*parts)
        with installed_packages_first("redis"):
            from tunemq_scheduler.api.experiment_handle import ExperimentHandle
            from tunemq_scheduler.api.farm_client import FarmClient
            from tunemq_scheduler.api.submit import SubmitOptions, submit_pickled
        submit_options = SubmitOptions(
            name=self._run_config.name or "",
            priority=priority,
            folder=None if folder is None else os.fspath(folder),
        )
        with FarmClient(address) as client:
            submitted = submit_pickled(client, pickled, submit_options, prepared.trainable_name)
        return ExperimentHandle(
            address,
            submitted.name,
            self._trainable,
            submitted.id,
            metric=prepared.tune.metric,
            mode=prepared.tune.direction,
        )

    def _experiment(self) -> Experiment:
        trainable, space, tune, run = self._unused_parts()
        # Pickle before `prepare` sets up the algorithms: a later run begins with fresh ones.
        kept = pickle_tuner(space, tune, run)
        prepared = prepare(trainable, space, tune, run)
        found = self._restored_now()
        if found is None:
            storage, options, address = storage_for(prepared), None, ""
        else:
            storage, options = StorageLocation(found.folder, found.store), found.options
            address = found.address
        keep = keeper_of(storage.folder, kept, prepared, options)
        return Experiment(prepared, storage, options, keep=keep, brought_from=address)

    def _unused_parts(self) -> TunerParts:
        tune, run = self._tune_config, self._run_config
        search_alg, scheduler = unused(tune.search_alg), unused(tune.scheduler)
        if search_alg is not tune.search_alg or scheduler is not tune.scheduler:
            tune = replace(tune, search_alg=search_alg, scheduler=scheduler)
        if (stop := unused(run.stop)) is not run.stop:
            run = replace(run, stop=stop)
        return self.parts._replace(tune=tune, run=run)

    def _restored_now(self) -> RestoredExperiment | None:
        """Return the experiment to continue; found anew if an earlier `fit` continued it."""
        found, self._found = self._found, None
        return self._find() if found is None and self._find is not None else found

    def get_results(self) -> ResultGrid:
        """Return the results of `fit`; before `fit`, the results so far of a restored experiment.

        Raises:
            TuneError: there are no results yet.
        """
        if self._results is None and self._find is not None:
            self._found = self._found or self._find()
            return results_so_far(self._found, self._trainable)
        if self._results is None:
            raise TuneError("Tuner.get_results() has no results before fit().")
        return self._results


def _given(name: str, config: Any, kind: type[Any]) -> Any:
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise ConfigError(f"Tuner({name}={config!r}) is invalid: pass a {kind.__name__}.")
    return config
