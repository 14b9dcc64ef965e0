"""Replays the schedule of hyperparameters that population based training found."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.schedulers.decisions import Answer, SetConfig
from tunemq_scheduler.schedulers.population.explore import changes
from tunemq_scheduler.schedulers.trial_scheduler import (
    RunnerLike,
    TrialLike,
    TrialScheduler,
    decides_as,
)
from tunemq_scheduler.search.objective import Metric
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import (
    TO_THE_END,
    TRAINING_ITERATION,
    Condition,
    Horizon,
    lookup,
)


class PopulationBasedTrainingReplay(TrialScheduler):
    """Train one trial with the schedule of hyperparameters that a population found.

    The schedule is that of a trial's final state: the trial's configurations, and before that those
    of the trials whose states it took over. At each change the trial saves, and continues with the
    next configuration; a function must report checkpoints.

    The search has one trial, and its configuration replaces what ``param_space`` says.

    Differences from Ray Tune: searches of TuneMQ have no policy file, as their journals have all
    decisions: name the search and the trial.

    Values of a journal that are not plain data are unpickled, which runs code: replay only searches
    of people whom you trust.

    Args:
        policy_file: the folder of a search with `PopulationBasedTraining` or `PB2`, or its name in
            the current folder or the results folder; or a policy file of Ray Tune, such as
            ``pbt_policy_00001.txt``.
        trial_id: the trial of that search; not for a policy file.

    Raises:
        ConfigError: there is no such search, trial or file; the message names it and the fix.
        JournalError: the search's journal cannot be read.

    Example:
        >>> import json, tempfile
        >>> from tunemq.schedulers import PopulationBasedTrainingReplay
        >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        ...     json.dump(["trial_1", "trial_0", 4, 8, {"lr": 0.1}, {"lr": 0.02}], file)
        ...     file.flush()
        ...     replay = PopulationBasedTrainingReplay(file.name)
        >>> replay.debug_string()
        'Using a replay of population based training: 0 of 1 changes.'
    """

    def __init__(self, policy_file: str, trial_id: str | None = None) -> None:
        # These read journals, which most searches with other schedulers never do.
        from tunemq_scheduler.schedulers.population.policies import read_policy

        self._policy = read_policy(type(self).__name__, policy_file, trial_id)
        self._trial = ""
        #: The number of configurations that the trial has had.
        self._begun = 0
        #: The step of its last change.
        self._changed_at = 0

    @property
    def metric(self) -> Metric:
        """None: it uses no metric."""
        return None

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> Answer:  # noqa: ARG002
        """Give the trial the first configuration.

        Raises:
            ConfigError: it is a second trial.
        """
        if self._trial == trial.trial_id:
            return None  # it continues after a restore
        if self._trial:
            raise ConfigError(
                f"{type(self).__name__} trains one trial, and the search has a second one: set "
                "TuneConfig(num_samples=1), and let param_space have no grid_search."
            )
        self._trial, self._begun, self._changed_at = trial.trial_id, 1, 0
        return SetConfig(trial, "the first configuration of the schedule", self._policy[0].config)

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Begin the schedule again."""
        self._trial = ""

    def on_trial_result(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,
        result: dict[str, Any],
    ) -> Answer:
        """Give the trial the next configuration once it is there.

        Raises:
            ConfigError: the trial began again from nothing, because it saves no checkpoints.
        """
        step = lookup(result, TRAINING_ITERATION)
        if step is None:
            return self.CONTINUE
        is_first = self._begun > 1 and step == self._changed_at + 1
        if is_first and getattr(trial, "saves_nothing", False):
            raise ConfigError(
                f"{type(self).__name__}: trial {trial.trial_id} began again from nothing, because "
                f"it had saved no checkpoint before step {step:g}. Let the function report one "
                "with its results: report(metrics, checkpoint=...)."
            )
        before = self._begun
        while self._begun < len(self._policy) and self._policy[self._begun].step <= step:
            self._begun += 1
        if self._begun == before:
            return self.CONTINUE
        self._changed_at = step
        config = self._policy[self._begun - 1].config
        reason = (
            f"{TRAINING_ITERATION} {step:g}: configuration {self._begun} of {len(self._policy)} of "
            "the schedule"
        )
        if told := changes(_plain(trial.config), _plain(config), config):
            reason += f", {told}"
        return SetConfig(trial, reason, config)

    def horizon(self, trial: TrialLike) -> Horizon | None:
        """Return the step of the next change, or the first behind the last one."""
        if not decides_as(self, PopulationBasedTrainingReplay):
            return None
        step = lookup(trial.last_result, TRAINING_ITERATION) or 0
        if self._begun > 1 and step <= self._changed_at:
            return (Condition(TRAINING_ITERATION, self._changed_at + 1),)
        if self._begun < len(self._policy):
            return (Condition(TRAINING_ITERATION, self._policy[self._begun].step),)
        return TO_THE_END

    def debug_string(self) -> str:
        """Return one line about its state, for the terminal."""
        done, count = max(0, self._begun - 1), len(self._policy) - 1
        return f"Using a replay of population based training: {done} of {count} changes."

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the trial, and how far it is in the schedule."""
        return {"trial": self._trial, "begun": self._begun, "changed_at": self._changed_at}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._trial, self._begun = state["trial"], state["begun"]
        self._changed_at = state["changed_at"]


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration that can be compared and shown."""
    return {name: one for name, one in config.items() if isinstance(one, int | float | str)}
