"""Population based training.

M. Jaderberg, V. Dalibard, S. Osindero, W. M. Czarnecki and others: Population Based Training of
Neural Networks, arXiv:1711.09846 (2017), section 3: exploit by truncation selection, then explore.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

from tunemq_scheduler.schedulers.decisions import Action, Answer, Exploit, Resume
from tunemq_scheduler.schedulers.metric_scheduler import MetricScheduler
from tunemq_scheduler.schedulers.population.explore import (
    CustomExplore,
    Explorer,
    Mutations,
    changes,
    check_config,
    check_mutations,
)
from tunemq_scheduler.schedulers.sorted_values import SortedValues
from tunemq_scheduler.schedulers.trial_scheduler import RunnerLike, TrialLike, decides_as
from tunemq_scheduler.search.objective import Metric, Mode, is_real
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import (
    TRAINING_ITERATION,
    Condition,
    Horizon,
    lookup,
)


class _Member:
    """A trial of the population.

    Attributes:
        number: the trial's place in the search.
        score: its newest value at a perturbation, greater is better; None before the first.
        trained: its progress at that time, or that of the state that it took over.
        perturbed: the progress at its last perturbation.
    """

    __slots__ = ("number", "perturbed", "score", "trained")

    def __init__(
        self, number: int, score: float | None = None, trained: float = 0.0, perturbed: float = 0.0
    ) -> None:
        self.number, self.score = number, score
        self.trained, self.perturbed = trained, perturbed


class PopulationBasedTraining(MetricScheduler):
    """Let the worst trials continue from the states of the best, with perturbed configurations.

    Each time a trial has trained for ``perturbation_interval`` it is compared with the population.
    One of the worst ``quantile_fraction`` takes over the checkpoint of a random one of the best,
    and a mutation of that one's configuration. It continues at the other's ``training_iteration``,
    as a new *lineage*, which each of its results names.

    Trials must save checkpoints, at best at each perturbation. A class does so by itself if
    ``time_attr`` is ``training_iteration``; a function reports them, and the search fails at
    the first perturbation if it has reported none. With more trials than slots each trial gives its
    slot away at each perturbation.

    Differences from Ray Tune: what a trial takes over is the newest checkpoint that the other's
    results have announced, which may be older than its newest result; Ray Tune takes over nothing
    from a trial that was not among the best when it reported last. A score that is not a number is
    the worst one; Ray Tune ignores the trial. Waiting trials start in the order in which they wait.
    All randomness depends on the search's seed. A value to mutate that the search space lacks is an
    error. The journal has each decision; `PopulationBasedTrainingReplay` reads it there.

    Args:
        time_attr: the result key that measures progress; its values grow.
        metric: the result key to compare. Default: ``TuneConfig``'s metric.
        mode: ``min`` or ``max``.
        perturbation_interval: the progress between two perturbations of a trial, in units of
            ``time_attr``; more than 0.
        burn_in_period: the progress before which no trial is perturbed.
        hyperparam_mutations: by name, how to draw new values: a domain or a function without
            arguments (numbers are scaled, or drawn again), a list or tuple (the value shifts to
            a neighbour, or is drawn again), or a dict of these for a nested dict.
        quantile_fraction: the part of the population that is replaced, and from which others
            continue: 0 to 0.5.
        resample_probability: the probability that a value is drawn again: 0 to 1.
        perturbation_factors: the two factors by which numbers are scaled.
        custom_explore_fn: gets the new configuration, and returns it changed.
        log_config: ignored; the journal has each decision. Accepted for Ray Tune's scripts.
        require_attrs: whether a result without ``time_attr`` or the metric is an error.
        synch: whether all trials wait for each other at each perturbation.

    Raises:
        ConfigError: an argument is invalid; the message names it, its value and the fix.

    Example:
        >>> from tunemq import uniform
        >>> from tunemq.schedulers import PopulationBasedTraining
        >>> scheduler = PopulationBasedTraining(
        ...     time_attr="training_iteration",
        ...     metric="score",
        ...     mode="max",
        ...     perturbation_interval=4,
        ...     hyperparam_mutations={"lr": uniform(0.001, 0.1), "batch": [32, 64, 128]},
        ... )
    """

    #: The argument that names the values to mutate, for messages.
    _MUTATED: ClassVar[str] = "hyperparam_mutations"

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        burn_in_period: float = 0.0,
        hyperparam_mutations: Mutations | None = None,
        quantile_fraction: float = 0.25,
        resample_probability: float = 0.25,
        perturbation_factors: Sequence[float] = (1.2, 0.8),
        custom_explore_fn: CustomExplore | None = None,
        log_config: bool = True,  # noqa: ARG002
        require_attrs: bool = True,
        synch: bool = False,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        who = type(self).__name__
        least = 1 if time_attr == TRAINING_ITERATION else 0
        _check_numbers(
            who,
            perturbation_interval=(perturbation_interval, least, math.inf),
            burn_in_period=(burn_in_period, 0, math.inf),
            quantile_fraction=(quantile_fraction, 0, 0.5),
            resample_probability=(resample_probability, 0, 1),
        )
        if perturbation_interval <= 0:
            raise ConfigError(f"{who}(perturbation_interval=0): a number above 0 is needed.")
        factors = tuple(perturbation_factors)
        if len(factors) != 2 or not all(is_real(one) and 0 < one < math.inf for one in factors):
            raise ConfigError(
                f"{who}(perturbation_factors={perturbation_factors!r}) is invalid: give two "
                "positive numbers, such as (1.2, 0.8)."
            )
        if not hyperparam_mutations and custom_explore_fn is None:
            raise ConfigError(
                f"{who} needs hyperparam_mutations={{name: values}} or custom_explore_fn: "
                "otherwise all trials would get the same configuration."
            )
        self._mutations: Mutations = hyperparam_mutations or {}
        check_mutations(who, self._mutations)
        self._interval, self._burn_in = perturbation_interval, burn_in_period
        self._fraction, self._needs_attrs = quantile_fraction, require_attrs
        self._is_synchronous = synch
        self._explorer = Explorer(self._mutations, resample_probability, factors, custom_explore_fn)
        self._rng = random.Random()
        self._members: dict[str, _Member] = {}
        #: The trials with a score, worst first: score, number and id.
        self._ranked = SortedValues[tuple[float, int, str]]()
        #: With ``synch``: where all trials wait for each other, and those that are not there yet.
        self._next_sync = max(perturbation_interval, burn_in_period)
        self._behind: dict[str, None] = {}
        #: The trials that have been perturbed with all others once, or have trained as long.
        self._ahead: set[str] = set()
        self._perturbations = 0
        is_counted = time_attr == TRAINING_ITERATION
        self.checkpoint_interval = max(1, int(perturbation_interval)) if is_counted else None

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Set the experiment's metric, mode and seed.

        Raises:
            ConfigError: metric or mode is missing, or differs from the scheduler's own.
        """
        super().set_search_properties(metric, mode, **spec)
        self._rng.seed(spec.get("seed"))
        return True

    # --- trials that come and go ------------------------------------------------------------------

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Add a trial to the population.

        Raises:
            ConfigError: there is no metric, or the configuration lacks a value to mutate.
        """
        self._need_metric()
        check_config(type(self).__name__, trial.config, self._mutations, self._MUTATED)
        done = lookup(trial.last_result, self._time_attr) or 0.0
        perturbed = self._last_sync(done) if self._is_synchronous and done else done
        self._members[trial.trial_id] = _Member(trial.number, None, done, perturbed)
        self._note_progress(trial.trial_id)
        self._review_sync()

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Take the trial out of the population; the others wait for it no longer."""
        self._forget(trial.trial_id)
        return self._synchronise(runner)

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Forget what the trial reported."""
        self._forget(trial.trial_id)

    def on_search_exhausted(self, runner: RunnerLike) -> Answer:
        """Perturb trials that waited only for further ones."""
        return self._synchronise(runner)

    def on_stall(self, runner: RunnerLike) -> Answer:
        """Perturb the trials that are there, because no others can come."""
        why = "nothing else can run"
        behind = [Resume(one, why) for one in self._behind]
        return behind or self._synchronise(runner, is_stalled=True)

    def choose_trial_to_run(self, runner: RunnerLike) -> TrialLike | None:
        """Return the trial that has waited longest; with ``synch`` only one that was resumed."""
        first = next(iter(runner.waiting()), None)
        if self._is_synchronous and first is not None and first.status != "PENDING":
            return None
        return first

    # --- results ----------------------------------------------------------------------------------

    def on_trial_result(
        self, runner: RunnerLike, trial: TrialLike, result: dict[str, Any]
    ) -> Answer:
        """Compare a trial with the population once it has trained for an interval.

        Raises:
            ConfigError: the result lacks ``time_attr`` or the metric.
        """
        time, value = lookup(result, self._time_attr), lookup(result, self._name)
        if not _is_finite(time) or not is_real(value):
            return self._lacking(trial, result)
        name = trial.trial_id
        if name not in self._members or time < self._due(name):
            return self.CONTINUE
        score = self._sign * value
        self._set_score(name, score if math.isfinite(score) else -math.inf)
        member = self._members[name]
        member.trained = time
        self._compared(name, trial.config)
        if self._is_synchronous:
            self._note_progress(name)
            actions = self._synchronise(runner, reporting=name)
            if actions is None and name in self._behind:
                return self.CONTINUE
            if actions is None:
                return self.PAUSE.because(
                    f"it waits for {len(self._behind)} of {len(self._members)} trials to reach "
                    f"{self._time_attr} {self._next_sync:g}"
                )
            return actions
        member.perturbed = time
        action = self._perturb(runner, name)
        if action is not None:
            return [action]
        if runner.has_waiting():
            rank = len(self._ranked) - self._rank(name)
            return self.PAUSE.because(
                f"it gives its slot to the next trial ({self._name} {self._shown(member.score)}, "
                f"rank {rank} of {len(self._ranked)})"
            )
        return self.CONTINUE

    def _lacking(self, trial: TrialLike, result: dict[str, Any]) -> Answer:
        if self._needs_attrs:
            is_timed = _is_finite(lookup(result, self._time_attr))
            lacks = self._name if is_timed else self._time_attr
            raise ConfigError(
                f"{type(self).__name__} needs a number for {lacks}, and trial "
                f"{trial.trial_id} reported {sorted(result)}; correct the name, or set "
                "require_attrs=False."
            )
        return self.CONTINUE

    def horizon(self, trial: TrialLike) -> Horizon | None:
        """Return the trial's next perturbation."""
        if not decides_as(self, PopulationBasedTraining):
            return None
        return (Condition(self._time_attr, self._due(trial.trial_id)),)

    def _due(self, name: str) -> float:
        member = self._members.get(name)
        perturbed = 0.0 if member is None else member.perturbed
        return max(self._burn_in, perturbed + self._interval)

    # --- perturbations ----------------------------------------------------------------------------

    def _perturb(self, runner: RunnerLike, name: str) -> Action | None:
        """Return how a trial of the worst quantile continues; None for any other."""
        size = self._quantile_size()
        member = self._members[name]
        if not size or member.score is None or self._rank(name) >= size:
            return None
        score, _, donor = self._ranked[len(self._ranked) - size + self._rng.randrange(size)]
        source, trial = runner.get_trial(donor), runner.get_trial(name)
        if source is None or trial is None:
            return None
        config = self._explored(name, donor, source.config)
        other = self._members[donor]
        reason = (
            f"{self._name} {self._shown(score)} against {self._shown(member.score)}, which is "
            f"among the worst {size} of {len(self._ranked)} at {self._time_attr} "
            f"{member.trained:g}"
        )
        if told := changes(trial.config, config, self._mutations):
            reason += f"; {told}"
        self._perturbations += 1
        member.perturbed, member.trained = other.perturbed, other.trained
        self._note_progress(name)
        return Exploit(name, reason, donor, config=config)

    def _compared(self, name: str, config: dict[str, Any]) -> None:
        """Called when a trial with this configuration has a new score."""

    def _explored(self, name: str, donor: str, config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the configuration with which a trial continues from its donor's state.

        Args:
            name: the trial, as it was before.
            donor: the trial from whose state it continues.
            config: the donor's configuration.
        """
        return self._explorer.explore(config, self._rng)

    def _synchronise(
        self, runner: RunnerLike, reporting: str = "", *, is_stalled: bool = False
    ) -> list[Action] | None:
        """With ``synch``: perturb and resume all trials once all have got there; else None."""
        if not self._is_synchronous or not self._members or self._behind.keys() - {reporting}:
            return None
        is_complete = len(self._ranked) == len(self._members) and not runner.expects_trials()
        if not (is_complete or is_stalled):
            return None
        trained = {name: one.trained for name, one in self._members.items()}
        now = trained.get(reporting, max(trained.values()))
        for member in self._members.values():
            member.perturbed = now
        worst = [name for _, _, name in islice(self._ranked, self._quantile_size())]
        actions = [one for name in worst if (one := self._perturb(runner, name)) is not None]
        furthest = max(one.trained for one in self._members.values())
        self._next_sync = max(self._next_sync + self._interval, furthest)
        for name in self._members:
            self._note_progress(name)
        why = f"all {len(self._members)} trials have reached {self._time_attr} {now:g}"
        if is_stalled:
            why = "nothing else can run"
        return [*actions, *(Resume(one, why) for one in self._members if one != reporting)]

    def _quantile_size(self) -> int:
        """Return how many trials are among the worst, and how many among the best."""
        count = len(self._ranked)
        size = math.ceil(count * self._fraction)
        return min(size, count // 2) if count > 1 else 0

    def _rank(self, name: str) -> int:
        """Return how many trials are worse than one that has a score."""
        member = self._members[name]
        return self._ranked.below((member.score or 0.0, member.number, name))

    def _last_sync(self, done: float) -> float:
        """Return where a trial that continues there was last perturbed with all others.

        It does not wait where it ended before: the next time that all wait for each other is later.
        """
        if done >= self._next_sync:
            self._next_sync += self._interval * (1 + (done - self._next_sync) // self._interval)
            for name in self._members:
                self._note_progress(name)
        return min(done, self._next_sync - self._interval)

    def _note_progress(self, name: str) -> None:
        """Note whether the others wait for this trial."""
        trained = self._members[name].trained
        if trained < self._next_sync:
            self._behind[name] = None
        else:
            self._behind.pop(name, None)
        if trained >= self._next_sync - self._interval:
            self._ahead.add(name)
        else:
            self._ahead.discard(name)

    def _review_sync(self) -> None:
        """Let a population of later trials wait earlier than the one before, which has ended."""
        first = max(self._interval, self._burn_in)
        if self._next_sync > first and self._members and not self._ahead:
            furthest = max(one.trained for one in self._members.values())
            self._next_sync = max(first, furthest + self._interval)
            for name in self._members:
                self._note_progress(name)

    def _set_score(self, name: str, score: float | None) -> None:
        member = self._members[name]
        if member.score is not None:
            self._ranked.remove((member.score, member.number, name))
        member.score = score
        if score is not None:
            self._ranked.add((score, member.number, name))

    def _forget(self, name: str) -> None:
        if name in self._members:
            self._set_score(name, None)
            del self._members[name]
            self._behind.pop(name, None)
            self._ahead.discard(name)
            self._review_sync()

    def _shown(self, score: float | None) -> str:
        if score is None or not math.isfinite(score):
            return "no number"
        return f"{self._sign * score:g}"

    def debug_string(self) -> str:
        """Return one line about its state, for the terminal."""
        return f"Using population based training: {self._perturbations} perturbations."

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the population, and the state of the random numbers."""
        version, internal, gauss = self._rng.getstate()
        return {
            "members": {
                name: [one.number, one.score, one.trained, one.perturbed]
                for name, one in self._members.items()
            },
            "next_sync": self._next_sync,
            "perturbations": self._perturbations,
            "rng": [version, list(internal), gauss],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._next_sync, self._perturbations = state["next_sync"], state["perturbations"]
        self._members, self._ranked, self._behind, self._ahead = {}, SortedValues(), {}, set()
        for name, (number, score, trained, perturbed) in state["members"].items():
            self._members[name] = _Member(number, None, trained, perturbed)
            self._set_score(name, score)
            self._note_progress(name)
        version, internal, gauss = state["rng"]
        self._rng.setstate((version, tuple(internal), gauss))


def _is_finite(value: Any) -> bool:
    return is_real(value) and math.isfinite(value)


def _check_numbers(who: str, **checked: tuple[Any, float, float]) -> None:
    """Check that each value is a finite number within its bounds.

    Raises:
        ConfigError: one is not.
    """
    for name, (value, least, most) in checked.items():
        if not is_real(value) or not least <= value <= most or math.isinf(value):
            bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise ConfigError(f"{who}({name}={value!r}) is invalid: give a number {bounds}.")
