"""`simulate`: a search in virtual time, over learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from msgspec.structs import replace

from tunemq.testing.curves.curve_executor import CurveExecutor, Curves
from tunemq.testing.curves.simulation import (
    SimulatedDecision,
    SimulatedResult,
    SimulatedTrial,
    Simulation,
)
from tunemq_scheduler.api.reused_algorithms import unused
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.experiment.start_checks import checked_space
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.schedulers import TrialScheduler, make_scheduler
from tunemq_scheduler.search import Searcher, SearchGenerator, make_searcher
from tunemq_scheduler.search.objective import check_count, is_real, metric_names
from tunemq_scheduler.settings.config import TuneConfig
from tunemq_scheduler.stopping.stopper import make_stopping
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol import messages as m

#: How the ids of simulated trials begin.
_PREFIX: Final = "trial"
_NOWHERE: Final = ExperimentPlan(
    experiment="simulated",
    experiment_id=_PREFIX,
    events_key="",
    folder="",
    trainable_name="simulated",
    code=m.BlobRef("", 0, ""),
    environment=m.Environment("", (), {}, ()),
)


def simulate(
    scheduler: TrialScheduler | str | None,
    searcher: Searcher | str | None,
    curves: Curves,
    *,
    param_space: dict[str, Any] | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    num_samples: int = 1,
    stop: Any = None,
    workers: int = 64,
    seed: int = 0,
    max_concurrent_trials: int | None = None,
    time_budget_s: float | None = None,
    restart_s: float = 0.0,
    checkpoint_frequency: int = 0,
    resources_per_worker: Mapping[str, float] | None = None,
) -> Simulation:
    """Run a search in virtual time: its trials follow learning curves instead of training.

    The trial scheduler, the search algorithm, the stopper and the search loop are the real ones, so
    it decides what a real search would decide whose results arrive in the same order. A search
    with the same arguments has the same outcome. There are no failures and no latency: saving takes
    no time, and a stopped trial frees its worker at once. A trial that is paused, or gets another
    configuration, first completes its step. One that continues from another trial's checkpoint
    continues at that step of the curve of its new configuration. A metric that is NaN or infinite
    ranks last, as with ``TuneConfig(nonfinite="worst")``.

    Args:
        scheduler (TrialScheduler or str): a trial scheduler or its name; None for FIFO.
        searcher (Searcher or str): a search algorithm or its name; None for random and grid search.
        curves (callable): called as ``curves(config, step)`` for each step, from 1; returns a dict
            of metrics. Its ``time_this_iter_s`` is the duration of the step in seconds, by default
            1; ``done=True`` ends the trial. A parameter ``resources``, if it has one, gets the
            trial's resources. `CurveTable` and `recorded_curves` make such callables from tables.
        param_space (dict): the search space. Default: ``curves.param_space`` if it has one.
        metric (str): as in ``TuneConfig``.
        mode (str): as in ``TuneConfig``.
        num_samples (int): as in ``TuneConfig``.
        stop (dict, Stopper, callable or list): as in ``RunConfig``.
        workers (int): how many trials run at once.
        seed (int): as in ``TuneConfig``.
        max_concurrent_trials (int): as in ``TuneConfig``.
        time_budget_s (float): seconds of virtual time after which the search stops.
        restart_s (float): seconds that a trial needs to continue from a checkpoint, on top of its
            steps.
        checkpoint_frequency (int): steps between two checkpoints. Default, 0: as many as the
            scheduler needs; a paused trial always saves.
        resources_per_worker (dict): what a trial requests at first. Default: ``{"cpu": 1}``. A
            scheduler may give a trial the resources of several workers.

    Returns:
        A `Simulation` with all results, trials and decisions.

    Raises:
        ConfigError: an argument is invalid, or a curve returns something else than a dict with the
            required metrics; the message names it and says what to do.
        SearchFailed: an algorithm raised.

    Example:
        >>> from tunemq import loguniform
        >>> from tunemq.schedulers import ASHAScheduler
        >>> from tunemq.testing import simulate
        >>> def curves(config, step):
        ...     return {"loss": config["lr"] + 1 / step, "time_this_iter_s": 60}
        >>> search = simulate(
        ...     ASHAScheduler(max_t=27, reduction_factor=3),
        ...     None,
        ...     curves,
        ...     param_space={"lr": loguniform(1e-4, 1)},
        ...     metric="loss",
        ...     mode="min",
        ...     num_samples=100,
        ...     workers=8,
        ... )
        >>> len(search.trials)
        100
        >>> "loss 1.73746 is not among the best 1/3 of 3 trials" in search.decisions[0].reason
        True
        >>> without_scheduler_s = 100 * 27 * 60
        >>> search.worker_s < 0.2 * without_scheduler_s
        True
    """
    request = {"cpu": 1.0} if resources_per_worker is None else dict(resources_per_worker)
    _check_arguments(curves, workers, restart_s, checkpoint_frequency, request)
    tune = TuneConfig(
        metric=metric,
        mode=mode,
        search_alg=unused(searcher),
        scheduler=unused(scheduler),
        num_samples=num_samples,
        max_concurrent_trials=max_concurrent_trials,
        time_budget_s=time_budget_s,
        seed=seed,
    )
    space = getattr(curves, "param_space", {}) if param_space is None else param_space
    algorithms, most = _algorithms(tune, space, seed)
    conditions, algorithms.stopper = make_stopping(unused(stop))
    needed = algorithms.scheduler.checkpoint_interval
    plan = replace(
        _NOWHERE,
        stop=conditions,
        required_metrics=(
            *metric_names(metric),
            *metric_names(algorithms.scheduler.metric),
            *algorithms.search.required_metrics,
        ),
        checkpoint_frequency=checkpoint_frequency or (1 if needed is None else needed),
        seed=seed,
    )
    executor = CurveExecutor(
        curves,
        workers=workers,
        per_worker=request,
        restart_s=restart_s,
        time_budget_s=tune.budget_s,
    )
    runner = TrialRunner(RunnerSettings(max_concurrent=most, request=request, nodes_may_come=False))
    recorder = _Recorder(Simulation(metric, tune.direction), executor)
    records: Any = recorder
    loop = ExperimentLoop(
        driver=EventDriver(runner, algorithms, plan),
        plan=plan,
        executor=executor,
        journal=records,
        dispatcher=records,
        resources_for=lambda _config: request,
        trial_prefix=_PREFIX,
        clock=executor.clock,
        discard=executor.discard,
        time_budget_s=tune.budget_s,
    )
    executor.open(plan)
    loop.run()
    return recorder.finished()


def _algorithms(tune: TuneConfig, space: Any, seed: int) -> tuple[AlgorithmDriver, int]:
    """Return a search's algorithms without a stopper, and its most concurrent trials."""
    metric, mode = tune.metric, tune.direction
    searcher, most = make_searcher(tune.search_alg, tune.max_concurrent_trials)
    driver = AlgorithmDriver(
        search=SearchGenerator(
            searcher, checked_space(space), tune.num_samples, metric, mode, seed
        ),
        scheduler=make_scheduler(tune.scheduler, metric, mode, seed),
        metric=metric,
        mode=mode,
        worst_for_nonfinite=True,
    )
    return driver, most


def _check_arguments(
    curves: object, workers: int, restart_s: float, frequency: int, request: Mapping[str, float]
) -> None:
    if not callable(curves):
        raise ConfigError(
            f"simulate(curves={curves!r}): give a function of (config, step) that returns a dict "
            "of metrics, or a CurveTable."
        )
    check_count("simulate", "workers", workers, least=1)
    check_count("simulate", "checkpoint_frequency", frequency, least=0)
    if not is_real(restart_s) or not 0 <= restart_s < math.inf:
        raise ConfigError(f"simulate(restart_s={restart_s!r}): give seconds of at least 0.")
    for name, amount in request.items():
        if not is_real(amount) or not 0 < amount < math.inf:
            raise ConfigError(
                f"simulate(resources_per_worker={{{name!r}: {amount!r}}}): a number above 0 is "
                "needed."
            )
    if not request:
        raise ConfigError('simulate(resources_per_worker={}): name a resource, as {"cpu": 1}.')


class _Recorder:
    """Stands where a search has its journal and its loggers, and keeps what they are told."""

    def __init__(self, simulation: Simulation, executor: CurveExecutor) -> None:
        self._simulation, self._executor = simulation, executor
        self._trials: dict[str, SimulatedTrial] = {}

    # --- the journal ------------------------------------------------------------------------------

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        """Keep the decisions of a turn; called before `notify` with its results."""
        for record in journal_records:
            event = record.event
            if type(event) is m.ConfigSuggested:
                self._trials[event.trial] = SimulatedTrial(event.n)
            elif type(event) is m.ActionTaken:
                trial = self._trials[event.trial]
                self._decided(trial, trial.step, event.action, event.reason)
            elif type(event) is m.ResultReported:
                self._trials[event.trial].step = event.step
            for answer in record.answers:
                if type(answer) is m.DecisionMade:
                    trial = self._trials[answer.trial]
                    self._decided(trial, answer.step, answer.decision, answer.reason)

    def _decided(self, trial: SimulatedTrial, step: int, action: str, reason: str) -> None:
        made = SimulatedDecision(self._executor.now, trial.number, step, action, reason)
        trial.decisions.append(made)
        self._simulation.decisions.append(made)

    # --- loggers and the terminal -----------------------------------------------------------------

    def notify(self, command: c.NotifyCommand, view: TrialView) -> None:
        """Keep a result or a trial's end."""
        trial = self._trials[view.trial_id]
        match command:
            case c.NotifyTrialAdded():
                trial.configs.append((0, view.config))
            case c.NotifyResult():
                self._result(trial, command.result)
            case c.NotifyTrialEnd():
                trial.status, trial.reason = command.status, command.reason
            case _:
                pass

    def _result(self, trial: SimulatedTrial, result: m.ResultReported) -> None:
        executor = self._executor
        # The trial's view may have the next one already.
        config = executor.configs[result.trial, result.attempt]
        if trial.config != config:
            trial.configs.append((result.step - 1, config))
        trial.metrics = result.metrics
        self._simulation.results.append(
            SimulatedResult(
                executor.now, executor.worker_s, trial.number, result.step, config, result.metrics
            )
        )

    def notices(self, text: str) -> None:
        """Keep a notice."""
        self._simulation.notices.append(text)

    def turn_began(self) -> None:
        """Nothing to keep."""

    def turn_ended(self) -> None:
        """Nothing to keep."""

    def trial_waits(self, trial: TrialView) -> None:
        """Nothing to keep: no trial waits for the store."""

    def finished(self) -> Simulation:
        """Return the simulation after the last turn."""
        simulation, executor = self._simulation, self._executor
        simulation.trials = [*self._trials.values()]
        for name, trial in self._trials.items():
            trial.worker_s = executor.worker_s_of.get(name, 0.0)
        simulation.time_s, simulation.worker_s = executor.now, executor.worker_s
        return simulation
