"""Starts a further run of an experiment that an earlier scheduler left.

An interrupted or exhausted search continues. On a *cold* start, when nothing is left of the nodes,
a stopped search continues, too; trials that ran wait for a slot without a counted failure, and data
that only those nodes had is lost. A scheduler that takes over a search while it is stopping
completes the stop. On request, trials in ERROR run again: from their last checkpoint, or from
scratch; the results of the latter begin a new lineage (`Trial.lineage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tunemq_scheduler.core.commands import DropNode, NotifyTrialRevived
from tunemq_scheduler.core.handlers import node_events
from tunemq_scheduler.core.handlers.inherited_states import await_again, exploit
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_actions import TrialActions
from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager, TrialCheckpoint
from tunemq_scheduler.core.trials.trial import PENDING, RUNNING, TERMINATED, Trial, TrialSummary
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import next_result

#: The values of `m.ExperimentResumed.errored`.
RESUME, RESTART = "resume", "restart"
#: The reason for ending unfinished trials in a run that does not resume them.
NOT_RESUMED = "it was not finished, and is not to be resumed"

_decode_settings = msgspec.msgpack.Decoder(RunnerSettings).decode


def resumed(
    runner: TrialActions, event: m.ExperimentResumed, answers: Sequence[m.AlgorithmAnswer]
) -> None:
    """Apply the start of a further run; ``answers`` are horizons of trials that run again."""
    revived = runner.revived_by(event)
    runner.run = event.run
    runner.attempts_from = max(runner.attempts_from, event.attempts_from)
    runner.interrupted = ""
    runner.exhausted = False
    if event.settings:
        runner.settings = _decode_settings(event.settings)
    _end_those_due(runner, event)
    if event.is_cold:
        runner.cold_run, runner.stopping = event.run, ""
        _lose_all_nodes(runner)
    if not event.unfinished:
        for trial in list(runner.live.values()):
            runner.stop(trial, NOT_RESUMED)
    runner.queue.regroup()  # the rules may have changed
    for trial_id in revived:
        _revive(runner, trial_id, event, answers)


def begins_anew(event: m.ExperimentResumed, trial: str) -> bool:
    """Return whether a trial that runs again starts from scratch: its results are void."""
    return event.errored == RESTART and trial not in event.also


def _end_those_due(runner: TrialActions, event: m.ExperimentResumed) -> None:
    """End the trials that had their last result, except those that may now run further."""
    for trial in list(runner.live.values()):
        if trial.is_finished:
            continue
        if trial.trial_id in event.also:
            trial.reopen()
        if event.is_cold or trial.status != RUNNING:
            runner.end_if_due(trial, None)


def _lose_all_nodes(runner: TrialActions) -> None:
    """Lose all nodes of the run before; this counts as no failure and delays no trial."""
    for trial in list(runner.live.values()):
        if trial.status == RUNNING and not trial.stop_ordered:
            runner.set_aside(trial)
    for node in [*runner.nodes, *runner.away]:
        lost = m.NodeLost(node, "the previous run has ended", is_dead=True)
        node_events.lost(runner, lost)
    runner.commands = [one for one in runner.commands if not isinstance(one, DropNode)]
    runner.acknowledged.clear()
    runner.cursor = "0-0"


def _revive(
    runner: TrialActions,
    trial_id: str,
    event: m.ExperimentResumed,
    answers: Sequence[m.AlgorithmAnswer],
) -> None:
    before = runner.summary(trial_id).status
    runner.counts[before] -= 1
    trial = runner.live.get(trial_id)
    if trial is None:
        trial = _brought_back(trial_id, runner.summary(trial_id), runner.settings)
        runner.drop_summary(trial_id)
        runner.live[trial_id] = trial
    else:  # its process or its uploads still exist
        trial.status = PENDING
    runner.counts[PENDING] += 1
    trial.story.append(event)
    trial.reason = trial.failed_on = ""
    trial.stop_ordered = False
    trial.failure = None
    trial.failures, trial.in_a_row, trial.fell_with, trial.fell_alone = {}, {}, [], []
    trial.excluded, trial.excused, trial.matched, trial.failed_at = [], 0, {}, []
    trial.excused_tries, trial.fruitless, trial.not_before = 0, 0, 0.0
    runner.queue.follow(trial)
    runner.book.review_newest(trial)
    is_anew = begins_anew(event, trial_id)
    if is_anew:
        runner.leave_inherited(trial)
        trial.leave_config()
        trial.inherited, trial.saved_step = None, 0
        trial.lineage += 1
        trial.attempt += 1  # an away node may still run the old attempt, and report it
        trial.last_result = trial.repeated_result = trial.started = None
        trial.changes_since_result = 0
        runner.commands += runner.book.clear(trial)
    else:
        if before == TERMINATED:
            trial.reopen()
        has_own = any(trial.checkpoints.since(trial.first_attempt))
        if trial.inherited is not None and not (has_own or trial.inherited_key):
            if trial.newest is None:
                await_again(runner, trial)
            else:  # the journal is of a version that did not keep what a trial inherited
                again = m.ActionTaken(trial_id, m.EXPLOIT, "", source=trial_id)
                exploit(runner, trial, again, ())
    trial.run_until = next_result(trial.last_step)
    for answer in answers:
        if isinstance(answer, m.HorizonSet) and answer.trial == trial_id:
            trial.run_until = answer.horizon
    runner.commands.append(NotifyTrialRevived(trial_id, trial.lineage, is_anew))


def _brought_back(trial_id: str, summary: TrialSummary, settings: RunnerSettings) -> Trial:
    """Rebuild an ended trial from its summary, so that it can wait for a slot again."""
    kept = CheckpointManager(settings.keep)
    ranked = zip(summary.checkpoints, summary.ranks, strict=True)
    kept.take_back(
        TrialCheckpoint(
            order=order,
            score=score,
            key=one.key,
            attempt=one.attempt,
            step=one.step,
            written="",
            node="",
            committed=one,
        )
        for one, (score, order) in ranked
    )
    same = {name: getattr(summary, name) for name in _BROUGHT_BACK}
    decisions = list(summary.decisions)
    return Trial(trial_id=trial_id, checkpoints=kept, decisions=decisions, **same)


#: The fields of a summary that a trial continues with.
_BROUGHT_BACK: Final = (
    *("number", "config", "tag", "resources", "attempt", "lineage", "num_failures"),
    *("preemptions", "repeated", "started", "last_result", "inherited", "former"),
    *("changes_since_result", "decisions_before"),
)
