"""`FailureEvents`: trials that fail, and nodes that fail trial after trial.

What a failure means is in `tunemq_scheduler.core.failure_policy`, which nodes are set aside in
`tunemq_scheduler.core.node_health`; here they meet the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tunemq_scheduler.core.commands import Command, RecordFailure, TellOfNode
from tunemq_scheduler.core.failure_policy import FailureClass, Verdict, classify, judge
from tunemq_scheduler.core.node_health import TRIALS_IN_A_ROW
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trial import Trial
from tunemq_shared.messages import HostDied, NodeLost, ResultReported, TrialFailed


class Endings(NamedTuple):
    """What the runner does with a trial that failed; see there."""

    try_again: Callable[[Trial], None]
    end_in_error: Callable[[Trial, str, list[Command]], None]


class FailureEvents:
    """Handles the failures of trials that run, for the runner."""

    def __init__(self, state: RunnerState, endings: Endings) -> None:
        self._state = state
        self._endings = endings

    def failed(self, trial: Trial, event: TrialFailed | HostDied, commands: list[Command]) -> None:
        """The host of a trial said that it failed, or died."""
        failure = classify(event)
        trial.count_failure(failure.kind)
        if failure.blames_node:
            self._blame_node(trial, event, failure, commands)
        self._follow(trial, event, failure, judge(failure, trial, self._state.settings), commands)

    def lost_its_node(self, trial: Trial, event: NodeLost, commands: list[Command]) -> None:
        """The node of a trial was lost; a trial that takes node after node with it is poison."""
        if event.incarnation not in trial.fell_with:
            trial.fell_with.append(event.incarnation)
        fallen, limit = self._state.fallen_with(trial), self._state.settings.max_node_losses
        if limit < 0 or len(fallen) <= limit:
            self._endings.try_again(trial)
            return
        failure = classify(event)
        trial.count_failure(failure.kind)
        told = (
            f"{len(fallen)} nodes in a row were lost while they ran it, and it reported nothing "
            f"new ({', '.join(fallen)})"
        )
        self._follow(trial, event, failure, Verdict(is_retried=False, told=told), commands)

    def got_on(self, trial: Trial, event: ResultReported) -> None:
        """A trial reported a new result, which is not taken in yet."""
        before, health = trial.last_result, self._state.health
        # Only the first one of each epoch speaks for the node: that it can still start a trial.
        if health and (before is None or before.epoch != event.epoch):
            joined = self._state.nodes.get(self._state.slots.node_of(trial))
            if joined is not None:
                health.succeeded(joined.node)
                self._state.review_nodes()
        trial.got_on()

    def _follow(
        self,
        trial: Trial,
        event: TrialFailed | HostDied | NodeLost,
        failure: FailureClass,
        verdict: Verdict,
        commands: list[Command],
    ) -> None:
        is_retried = verdict.is_retried and not self._state.stopping
        hostname = self._hostname_of(trial)
        record = RecordFailure(
            trial.trial_id, event, hostname, is_retried, failure.kind, verdict.told
        )
        commands.append(record)
        if is_retried:
            self._endings.try_again(trial)
        else:
            trial.failure, trial.failed_on = event, hostname
            reason = f"{failure.words}: {verdict.told}"
            self._endings.end_in_error(trial, reason, commands)

    def _blame_node(
        self,
        trial: Trial,
        event: TrialFailed | HostDied,
        failure: FailureClass,
        commands: list[Command],
    ) -> None:
        """It may be the node's fault; several of different trials in a row are."""
        state, incarnation = self._state, self._state.slots.node_of(trial)
        reason = event.error if isinstance(event, TrialFailed) else failure.words
        pause_s = state.health.failed(
            incarnation,
            trial,
            reason,
            state.nodes,
            state.elapsed,
            keeps_nothing=failure.kind == "storage",
        )
        state.review_nodes()
        if pause_s:
            node = state.nodes[incarnation]
            commands.append(TellOfNode(node.node, node.hostname, TRIALS_IN_A_ROW, reason, pause_s))

    def _hostname_of(self, trial: Trial) -> str:
        """Where it runs, or ran when it was heard last."""
        incarnation = self._state.slots.node_at(trial.trial_id, trial.epoch)
        node = self._state.nodes.get(incarnation or "")
        if node is not None:
            return node.hostname
        return trial.started.hostname if trial.started is not None else ""
