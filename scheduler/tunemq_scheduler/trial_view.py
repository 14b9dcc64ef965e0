"""A trial as searchers, trial schedulers, loggers and callbacks see it; never to be changed."""

from __future__ import annotations

import os
from typing import Any, Self

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial import PENDING, Trial, TrialSummary
from tunemq_scheduler.folders import ERROR_FILE
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.search.space import named_in_tag
from tunemq_shared.errors import BugError
from tunemq_shared.messages import (
    CheckpointCommitted,
    ConfigSuggested,
    ResultReported,
    TrialStarted,
)
from tunemq_shared.packing import unpack_config
from tunemq_shared.results import ResultFrame, full_result


class TrialView:
    """One trial, with the names that Ray Tune's plug-ins expect.

    Attributes:
        trial_id: unique in the experiment.
        number: the place of its configuration in the search, from 0.
        config: its configuration, unpacked.
        evaluated_params: the sampled values of it, flattened.
        resources: what it asks for.
        status: PENDING, RUNNING, PAUSED, TERMINATED or ERROR.
        lineage: how often it was begun anew from nothing.
        newest: the newest recorded result, as it was reported.
        checkpoint: the newest kept checkpoint, if any.
        error_file: where its failures are written; None while it has none.
        hostname, node: where its newest incarnation runs or ran; the node is empty where that is
            not known any more.
        waits: for what of the store it waits, ``save`` or ``restore``, and why; two empty texts
            while it does not.
    """

    def __init__(self, event: ConfigSuggested, plan: ExperimentPlan) -> None:
        self.trial_id = event.trial
        self.number = event.n
        self.config: dict[str, Any] = unpack_config(event.config)
        self.evaluated_params: dict[str, Any] = {}
        self.experiment_tag = event.tag
        self.resources = event.resources
        self.trainable_name = plan.trainable_name
        self.trial_name = plan.trial_name(event.trial)
        self.local_path = plan.trial_folder(event.trial)
        self.status = PENDING
        self.epoch = 0
        self.lineage = 0
        self.num_failures = 0
        self.newest: ResultReported | None = None
        self.checkpoint: CheckpointCommitted | None = None
        self.error_file: str | None = None
        self.hostname = self.node = ""
        self.waits = ("", "")
        self._experiment_id = plan.experiment_id
        self._frame: ResultFrame | None = None
        self._shown: tuple[ResultReported, dict[str, Any]] | None = None

    @classmethod
    def of(cls, trial: str, summary: TrialSummary, plan: ExperimentPlan) -> Self:
        """The view of a trial of which no more than a summary is kept."""
        event = ConfigSuggested(
            summary.number, trial, summary.config, summary.tag, summary.resources
        )
        view = cls(event, plan)
        view.evaluated_params = named_in_tag(summary.tag, view.config)
        if summary.started is not None:
            view.started(summary.started)
        view.status, view.epoch = summary.status, summary.epoch
        view.lineage = summary.lineage
        view.num_failures = summary.num_failures
        if view.num_failures:  # each was written down when it happened, or when that was made good
            view.error_file = os.path.join(view.local_path, ERROR_FILE)
        view.newest = summary.last_result
        view.checkpoint = summary.checkpoints[-1] if summary.checkpoints else None
        return view

    @classmethod
    def alive(cls, trial: Trial, plan: ExperimentPlan) -> Self:
        """The view of a trial of an earlier run that is not over."""
        view = cls.of(trial.trial_id, trial.summary(), plan)
        view.follow(trial)
        return view

    def begin_anew(self) -> None:
        """Nothing of what it did counts any longer."""
        self.lineage += 1
        self.newest = self.checkpoint = None
        self._frame = self._shown = None

    def __str__(self) -> str:
        return self.trial_name

    def __repr__(self) -> str:
        return f"<trial {self.trial_name} {self.status}>"

    @property
    def is_finished(self) -> bool:
        """Whether it is TERMINATED or in ERROR."""
        return self.status in ("TERMINATED", "ERROR")

    @property
    def last_result(self) -> dict[str, Any]:
        """The newest recorded result with all automatic keys; empty before the first."""
        if self.newest is None:
            return {}
        result = self.full_result(self.newest)
        return {**result, "done": True} if self.is_finished else result

    def follow(self, trial: Trial) -> None:
        """Take over what changed in the runner's trial."""
        self.status = trial.status
        self.epoch = trial.epoch
        self.lineage = trial.lineage
        self.num_failures = trial.num_failures
        self.waits = trial.waits
        self.resources = trial.resources

    def learn(self, fact: c.RecordCommand, trial: Trial | None) -> None:
        """Take over a fact.

        Args:
            trial: the runner's, at the end of the turn; None where it is forgotten already.
        """
        if trial is not None:
            self.follow(trial)
        match fact:
            case c.RecordResult():
                self.newest = fact.result
            case c.RecordCheckpoint():
                self.checkpoint = fact.checkpoint
            case c.RecordStart():
                self.node = fact.node
            case c.RecordFailure():
                self.num_failures += trial is None
            case _:
                pass

    def started(self, event: TrialStarted) -> None:
        """A host runs it: automatic keys such as pid and hostname come from there."""
        self.hostname = event.hostname
        self._shown = None
        self._frame = ResultFrame(
            event,
            self.config,
            experiment_id=self._experiment_id,
            experiment_tag=self.experiment_tag,
        )

    def full_result(self, event: ResultReported) -> dict[str, Any]:
        """The result with all automatic keys; built once for each event.

        Raises:
            BugError: no host was started that could have reported it.
        """
        if self._shown is not None and self._shown[0] is event:
            return self._shown[1]
        if self._frame is None:
            raise BugError(f"trial {self.trial_id} reported step {event.step} before it started")
        result = full_result(event, self._frame)
        self._shown = (event, result)
        return result
