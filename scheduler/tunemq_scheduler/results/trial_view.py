"""`TrialView`: a trial as searchers, trial schedulers, loggers and callbacks see it; read-only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_scheduler.core.trials.trial import FINISHED, NO_WAIT, Trial, TrialSummary
from tunemq_scheduler.search.space import named_in_tag
from tunemq_scheduler.storage.folders import ERROR_FILE
from tunemq_shared.base.errors import BugError
from tunemq_shared.code.config_packing import unpack_config, unpack_plain_config
from tunemq_shared.protocol.messages import (
    ActionTaken,
    CheckpointCommitted,
    CheckpointRef,
    ResultReported,
    TrialStarted,
)
from tunemq_shared.trial.results import ResultTemplate, full_result


class TrialView:
    """One trial, with the attribute names that Ray Tune's plug-ins expect.

    Attributes:
        trial_id: unique in the experiment.
        state: the core's state: the trial, or the summary of a finished one.
        number: the place of its configuration in the search, from 0.
        experiment_tag: a text that distinguishes it from other trials.
        config: the configuration, decoded.
        evaluated_params: the sampled values of the configuration, flattened.
        newest: the newest recorded result, as reported.
        error_file: the file with its failures; None without failures.
        hostname, node: where its newest attempt runs or ran; the node is empty if it is no longer
            known.
    """

    def __init__(self, trial_id: str, state: Trial | TrialSummary, plan: ExperimentPlan) -> None:
        self.trial_id = trial_id
        self.state = state
        self.number = state.number
        self.experiment_tag = state.tag
        summary = state.summary() if isinstance(state, Trial) else state
        self._unpack = unpack_plain_config if plan.is_foreign else unpack_config
        self.config: dict[str, Any] = self._unpack(summary.config)
        self.evaluated_params = named_in_tag(summary.tag, self.config)
        self.trainable_name = plan.trainable_name
        self.trial_name = plan.trial_name(trial_id)
        self.local_path = plan.trial_folder(trial_id)
        self.newest = summary.last_result
        self.error_file: str | None = None
        if summary.num_failures:  # each was written when it happened, or by log repair
            self.error_file = os.path.join(self.local_path, ERROR_FILE)
        self.hostname = self.node = ""
        self._experiment_id = plan.experiment_id
        self._frame: ResultTemplate | None = None
        self._shown: tuple[ResultReported, dict[str, Any]] | None = None
        if summary.started is not None:
            last, inherited = summary.last_result, summary.inherited
            # Its newest result may be of the lineage before.
            is_older = inherited and last and last.attempt <= inherited.attempt
            config = self._unpack(summary.reported_config)
            self._start(summary.started, self.lineage - bool(is_older), config)

    def __str__(self) -> str:
        return self.trial_name

    def __repr__(self) -> str:
        return f"<trial {self.trial_name} {self.status}>"

    @property
    def resources(self) -> dict[str, float]:
        """The resources that it requests."""
        return self.state.resources

    @property
    def checkpoint(self) -> CheckpointCommitted | CheckpointRef | None:
        """The newest kept checkpoint of the lineage of its newest result, if any."""
        return self.state.checkpoint

    @property
    def status(self) -> str:
        """PENDING, RUNNING, PAUSED, TERMINATED or ERROR."""
        return self.state.status

    @property
    def attempt(self) -> int:
        """The number of its newest attempt; 0 before the first."""
        return self.state.attempt

    @property
    def lineage(self) -> int:
        """How often it began again: from nothing, or from the state of another trial."""
        return self.state.lineage

    @property
    def saves_nothing(self) -> bool:
        """Whether it paused after results, and had never saved a checkpoint."""
        return isinstance(self.state, Trial) and self.state.saves_nothing

    @property
    def num_failures(self) -> int:
        """The number of its failures."""
        return self.state.num_failures

    @property
    def decisions(self) -> Sequence[TrialDecision]:
        """The newest decisions about it, oldest first."""
        return self.state.decisions

    @property
    def waits(self) -> tuple[str, str]:
        """The operation it waits for, such as ``save``, and why; else empty texts."""
        return self.state.waits if isinstance(self.state, Trial) else NO_WAIT

    @property
    def is_finished(self) -> bool:
        """Whether it is TERMINATED or in ERROR."""
        return self.status in FINISHED

    @property
    def last_result(self) -> dict[str, Any]:
        """The newest recorded result with all automatic keys; empty before the first."""
        if self.newest is None:
            return {}
        result = self.full_result(self.newest)
        return {**result, "done": True} if self.is_finished else result

    def apply(self, command: c.NotifyCommand) -> None:
        """Update the view from a notification."""
        match command:
            case c.NotifyResult():
                self.newest = command.result
            case c.NotifyTrialStart():
                self.node = command.node
            case _:
                pass

    def changed(self, event: ActionTaken) -> None:
        """Note a trial scheduler's action that may change the configuration."""
        if event.config:
            self.config = self._unpack(event.config)
            self.evaluated_params = named_in_tag(self.experiment_tag, self.config)

    def started(self, event: TrialStarted) -> None:
        """Note the trial process that runs it, for the automatic keys such as pid and hostname."""
        self._start(event, self.lineage, self.config)

    def _start(self, event: TrialStarted, lineage: int, config: dict[str, Any]) -> None:
        self.hostname = event.hostname
        self._shown = None
        self._frame = ResultTemplate(
            event,
            config,
            experiment_id=self._experiment_id,
            experiment_tag=self.experiment_tag,
            lineage=lineage,
        )

    def full_result(self, event: ResultReported) -> dict[str, Any]:
        """Return the result with all automatic keys; built once for each event.

        Raises:
            BugError: no trial process was started that could have reported it.
        """
        if self._shown is not None and self._shown[0] is event:
            return self._shown[1]
        if self._frame is None:
            raise BugError(f"trial {self.trial_id} reported step {event.step} before it started")
        result = full_result(event, self._frame)
        self._shown = (event, result)
        return result
