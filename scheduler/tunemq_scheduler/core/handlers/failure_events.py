"""Handles failures of trials, and nodes on which trials keep failing.

`tunemq_scheduler.core.failure_policy` defines what a failure means,
`tunemq_scheduler.core.nodes.failing_nodes` which nodes are set aside; this module applies both to
the runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from tunemq_scheduler.core.commands import NotifyFailure, WarnFailingNode
from tunemq_scheduler.core.failure_policy import (
    EXCUSED_TRIES,
    FailureClass,
    LogMatch,
    RetryDecision,
    classify,
    judge,
    match_of,
    whole_gpus,
)
from tunemq_scheduler.core.nodes.failing_nodes import TRIALS_IN_A_ROW
from tunemq_scheduler.core.runner_settings import ALONE, DO_NOT_RETRY, EXCLUDE_NODE
from tunemq_scheduler.core.trial_actions import FailureEvent, TrialActions
from tunemq_scheduler.core.trials.trial import RUNNING, Trial
from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.protocol import messages as m
from tunemq_shared.trainable.resource_names import GPU, GPU_MEMORY

#: The most characters kept of a line that matches a log policy; nodes send no more either.
LINE_LENGTH: Final = 300


class _ExcludedNode(NamedTuple):
    """A node on which a trial is no longer placed, and the matching line that caused this."""

    node: str
    match: LogMatch

    def __str__(self) -> str:
        return f"it is not placed on node {self.node} any more, because {self.match}"


def failed(runner: TrialActions, trial: Trial, event: m.TrialFailed | m.TrialProcessDied) -> None:
    """Handle a report that a trial failed or its process died."""
    failure = classify(event)
    trial.failed_on_node(runner.nodes[runner.slots.node_of(trial)].node)
    shunned = _shun_node(runner, trial, failure)
    if failure.blames_node or shunned is not None:
        _blame_node(runner, trial, event, failure)
    if failure.kind == m.FORKSERVER_LOST:
        node = runner.slots.node_of(trial)
        fallen = f"the forkserver of {node} in attempt {trial.attempt}"
        _fell(trial, fallen, was_alone=isinstance(event, m.TrialFailed) and not event.is_shared)
    _follow(runner, trial, event, failure, _judge(runner, trial, failure, shunned))


def unreported(trial: Trial) -> m.TrialFailed:
    """Return the failure of a trial whose process is gone, though no event said how it ended.

    A correct node always says so. The trial ends in ERROR, so that the bug is seen, and the search
    continues, because the event may be forged.
    """
    at = trial.started.at if trial.started is not None else 0.0
    error = "its process is gone without a report of how it ended; this is a bug in TuneMQ"
    return m.TrialFailed(trial.trial_id, trial.attempt, "unreported", error, "", at)


def matched(runner: TrialActions, event: m.LogMatched) -> None:
    """Record that a trial printed a line that matches a log policy; it matters on failure."""
    trial = runner.live.get(event.trial)
    if trial is None or not runner.is_attempt(trial, event.attempt) or trial.status != RUNNING:
        runner.stale += 1
    elif runner.settings.action_of(event.pattern):
        shown = replace(event, line=event.line[:LINE_LENGTH])
        trial.matched.setdefault(shown.pattern, shown.line)
        trial.story.append(shown)


def lost_its_node(
    runner: TrialActions, trial: Trial, event: m.NodeLost, *, was_alone: bool, has_left: bool
) -> None:
    """Handle the loss of a trial's node; a trial that takes node after node with it is poison.

    Only the loss of a node that ran no other trial counts against this one. That of a node that was
    told to end (``has_left``) does not, `EXCUSED_TRIES` times in a row.
    """
    if has_left and trial.excused_tries < EXCUSED_TRIES:
        trial.excused_tries += 1
        runner.set_aside(trial)
        return
    _fell(trial, event.instance_id, was_alone=was_alone)
    verdict = _judge_losses(runner, trial)
    if verdict.is_retried:
        runner.try_again(trial)
        return
    failure = classify(event)
    trial.count_failure(failure.kind)
    _follow(runner, trial, event, failure, verdict)


def _fell(trial: Trial, what: str, *, was_alone: bool) -> None:
    """Record the loss of a node or a forkserver that ran this trial."""
    if what not in trial.fell_with:
        trial.fell_with.append(what)
    if was_alone and what not in trial.fell_alone:
        trial.fell_alone.append(what)


def _judge_losses(runner: TrialActions, trial: Trial) -> RetryDecision:
    """Decide about a retry after the loss of a node or a forkserver.

    A loss that other trials shared is no evidence: each of them runs alone next (`is_suspect`).
    """
    limit, fallen = runner.settings.max_node_losses, trial.fell_alone
    lost = runner.still_away(fallen)
    if trial.fell_with[-1] not in fallen:
        return RetryDecision("not counted, because other trials ran there")
    if limit < 0:
        told = f"loss {len(lost)} in a row, without a limit"
        return RetryDecision(told)
    if len(lost) <= limit:
        told = f"loss {len(lost)} of at most {limit + 1} in a row while no other trial was there"
        return RetryDecision(told)
    told = (
        f"{len(lost)} nodes or forkservers lost in a row while they ran only this trial "
        f"({', '.join(lost)}); it reported nothing new in between"
    )
    return RetryDecision(told, is_retried=False)


def got_on(runner: TrialActions, trial: Trial, event: m.ResultReported) -> None:
    """Reset failure counts for a new result, before it is recorded."""
    before, health = trial.last_result, runner.health
    # Only the first result of an attempt shows that the node can still start trials.
    if health and (before is None or before.attempt != event.attempt):
        joined = runner.nodes.get(runner.slots.node_of(trial))
        if joined is not None:
            health.succeeded(joined.node)
            runner.review_nodes()
    trial.got_on()


def _judge(
    runner: TrialActions, trial: Trial, failure: FailureClass, shunned: _ExcludedNode | None
) -> RetryDecision:
    settings = runner.settings
    match = match_of(trial, settings, DO_NOT_RETRY)
    if match is not None:
        trial.count_failure(failure.kind)
        return RetryDecision(f"not retried, because {match}", is_retried=False)
    if failure.kind == "cuda_memory" and settings.retry_cuda_memory == ALONE:
        before, whole = trial.resources, whole_gpus(trial.resources)
        if whole is not None and _could_have(runner, trial, whole):
            trial.excuse_failure()
            trial.resources, trial.is_alone = whole, True
            told = f"it shared a GPU ({_part_of(before)}), and gets a whole one from now on"
            return RetryDecision(told)
    if shunned is not None:
        return _judge_shunned(runner, trial, failure, shunned)
    trial.count_failure(failure.kind)
    if failure.kind == "restore" and trial.has_only_damaged_checkpoints:
        return RetryDecision("not retried, because no checkpoint is whole", is_retried=False)
    return _judge_counted(runner, trial, failure)


def _judge_counted(runner: TrialActions, trial: Trial, failure: FailureClass) -> RetryDecision:
    if failure.kind == m.FORKSERVER_LOST:
        return _judge_losses(runner, trial)
    return judge(failure, trial, runner.settings)


def _could_have(runner: TrialActions, trial: Trial, request: dict[str, float]) -> bool:
    if runner.settings.nodes_may_come:
        return runner.placement.could_hold(request)
    return runner.may_hold(trial, request)


def _judge_shunned(
    runner: TrialActions, trial: Trial, failure: FailureClass, shunned: _ExcludedNode
) -> RetryDecision:
    settings, limit = runner.settings, runner.settings.max_excluded_nodes
    if not settings.nodes_may_come and runner.shuns_all(trial):
        trial.count_failure(failure.kind)
        told = f"{shunned}, and no other node can hold it"
        return RetryDecision(told, is_retried=False)
    if 0 <= limit <= trial.excused:
        trial.count_failure(failure.kind)
        judged = _judge_counted(runner, trial, failure)
        return RetryDecision(f"{judged.told}; {shunned}", judged.is_retried)
    trial.excuse_failure()
    trial.excused += 1
    of_how_many = f" of at most {limit}" if limit > 0 else ""
    told = f"{shunned} (excluded node {trial.excused}{of_how_many})"
    return RetryDecision(told)


def _shun_node(runner: TrialActions, trial: Trial, failure: FailureClass) -> _ExcludedNode | None:
    """Exclude the trial's node from now on if its output matches such a rule."""
    match = match_of(trial, runner.settings, EXCLUDE_NODE)
    if match is None or failure.kind == "trial_limit":  # a time limit applies on every node
        return None
    joined = runner.nodes[runner.slots.node_of(trial)]
    if joined.node not in trial.excluded:
        trial.excluded.append(joined.node)
    return _ExcludedNode(joined.node, match)


def _follow(
    runner: TrialActions,
    trial: Trial,
    event: FailureEvent,
    failure: FailureClass,
    verdict: RetryDecision,
) -> None:
    is_retried = verdict.is_retried and not runner.stopping
    hostname = runner.hostname_of(trial)
    record = NotifyFailure(trial.trial_id, event, hostname, is_retried, failure.kind, verdict.told)
    runner.commands.append(record)
    if is_retried:
        runner.try_again(trial)
    else:
        # The output is in the trial's error file; the state must not hold it for each trial.
        kept = event if isinstance(event, m.NodeLost) else replace(event, output="")
        trial.failure, trial.failed_on = kept, hostname
        reason = f"{failure.description}: {verdict.told}"
        runner.end_in_error(trial, reason)


def _blame_node(
    runner: TrialActions,
    trial: Trial,
    event: m.TrialFailed | m.TrialProcessDied,
    failure: FailureClass,
) -> None:
    """Count the failure against the node; several different trials in a row set it aside."""
    instance_id = runner.slots.node_of(trial)
    reason = event.error if isinstance(event, m.TrialFailed) else failure.description
    pause_s = runner.health.failed(
        instance_id,
        trial,
        reason,
        runner.nodes,
        runner.elapsed,
        keeps_nothing=failure.kind == "storage",
    )
    runner.review_nodes()
    if pause_s:
        node = runner.nodes[instance_id]
        runner.commands.append(
            WarnFailingNode(node.node, node.hostname, TRIALS_IN_A_ROW, reason, pause_s)
        )


def _part_of(request: Mapping[str, float]) -> str:
    """Format the part of a GPU that a request asks for."""
    share = request.get(GPU)
    return f"gpu={share:g}" if share else f"gpu_memory={show_bytes(round(request[GPU_MEMORY]))}"
