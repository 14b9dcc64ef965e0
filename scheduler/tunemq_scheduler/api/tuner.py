"""`Tuner`: a search, from what users write to what they get."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

from tunemq_scheduler.api.pickled_tuner import pickle_tuner_parts
from tunemq_scheduler.base.installed_packages import installed_packages_first
from tunemq_scheduler.experiment.open_experiment import ResumeOptions
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
from tunemq_scheduler.settings.saved_tuner import pickle_tuner, save_tuner
from tunemq_scheduler.settings.storage_settings import StorageLocation
from tunemq_shared.base.errors import ConfigError, TuneError
from tunemq_shared.system.standard_streams import fill_closed_descriptors

if TYPE_CHECKING:
    from tunemq_scheduler.api.experiment_handle import ExperimentHandle


class TunerParts(NamedTuple):
    """What a `Tuner` was made of, in the order in which `prepare` takes it."""

    trainable: Any
    param_space: dict[str, Any] | None
    tune: TuneConfig
    run: RunConfig


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
        self._restored: RestoredExperiment | None = None
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
        """A tuner that goes on with an experiment: finished, stopped, interrupted or crashed.

        `fit` then runs what is left of it. What it was run with is unpickled from its folder, so
        restore only what comes from people whom you trust.

        Args:
            path: the experiment's folder, or its address in a store.
            trainable: the same as before; its code may have been mended.
            resume_unfinished: whether trials that were not over go on, from their last checkpoints;
                else they end where they are.
            resume_errored: whether trials in ERROR go on from their last checkpoints.
            restart_errored: whether they begin anew.
            param_space: the same as before, where what is in it could not be pickled, or holds
                something that is elsewhere now.
            tune_config: instead of the one before, e.g. with more ``num_samples`` or another
                ``time_budget_s``; metric, mode, seed and the kinds of algorithms stay.
            run_config: instead of the one before, e.g. with other callbacks, more failures allowed,
                or another ``stop``: trials that ended only by the old criteria go on. Where the
                experiment is, and which checkpoints are kept, stays.

        Raises:
            ConfigError: it cannot be restored like this; says why. Nothing was changed.
            JournalError: its journal cannot be read.
            StoreError: its store cannot be reached.
        """
        if resume_errored and restart_errored:
            raise ConfigError(
                "Tuner.restore(resume_errored=True, restart_errored=True): trials in ERROR can go "
                "on from their last checkpoints or begin anew; choose one."
            )
        found = restored(
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
        tuner = cls(
            trainable,
            param_space=found.param_space,
            tune_config=found.tune,
            run_config=found.run,
        )
        tuner._restored = found
        return tuner

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str]) -> bool:
        """Whether there is an experiment at this folder, or at this address in a store."""
        return can_restore(path)

    @property
    def parts(self) -> TunerParts:
        """What it was made of, for those who run it elsewhere."""
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
        """Run the search, and return when it is over.

        Without an address Redis, a worker and everything else it needs are started for this script,
        stay warm for the next search, and end with it.

        Args:
            debug: run only the first trial, in this process, so that breakpoints and pdb work.
            address: of the Redis of a farm, on whose scheduler the search runs then, even if this
                script ends; its code travels there.
            detached: return at once what can be asked about the search, on a farm.
            priority: on a farm: those with a higher one are first.
            folder: of the code that the farm needs; by default the script's own, if it imports
                modules that lie there.

        Raises:
            UserError: something in the search is not usable; nothing was started.
            StoreError: its store cannot be used; nothing was started.
            KeyboardInterrupt: Ctrl-C; everything was saved before. On a farm it goes on.
            TuneError: the search could not go on; the farm has no scheduler, or refuses it.
        """
        if address is None:
            if detached or priority or folder is not None:
                raise ConfigError(
                    "Tuner.fit(detached=..., priority=..., folder=...) are for a farm; give its"
                    " address, too: fit(address='redis://host:6379/0')."
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
            raise ConfigError("Tuner.fit(debug=True) runs here; leave the address out.")
        if self._restored is not None:
            raise ConfigError(
                "a restored Tuner cannot be sent to a farm; what the farm has is gone on with by"
                " `tunemq resume NAME`, and what this machine has here: fit()."
            )
        # Before `prepare`, which checks it, sets up the algorithms in it.
        pickled = pickle_tuner_parts(*self.parts)
        prepared = prepare(*self.parts)
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
        return ExperimentHandle(address, submitted.name, self._trainable)

    def _experiment(self) -> Experiment:
        space, tune, run = self._param_space, self._tune_config, self._run_config
        # Before `prepare` sets up the algorithms in it: a later run begins with fresh ones.
        kept = pickle_tuner(space, tune, run)
        prepared = prepare(self._trainable, space, tune, run)
        found, self._restored = self._restored, None
        if found is None:
            storage, options = storage_for(prepared), None
        else:
            storage, options = StorageLocation(found.folder, found.store), found.options

        def keep() -> None:
            save_tuner(storage.folder, kept, name=prepared.trainable_name, seed=prepared.seed)

        return Experiment(prepared, storage, options, keep=keep)

    def get_results(self) -> ResultGrid:
        """What `fit` returned; before that, of a restored tuner, what there is so far.

        Raises:
            TuneError: there is nothing yet.
        """
        if self._results is None and self._restored is not None:
            return results_so_far(self._restored, self._trainable)
        if self._results is None:
            raise TuneError("Tuner.get_results() has nothing to return before fit() was called.")
        return self._results


def _given(name: str, config: Any, kind: type[Any]) -> Any:
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise ConfigError(f"Tuner({name}={config!r}) is not usable: give a {kind.__name__}.")
    return config
