"""Handles the actions of a trial scheduler on any trial."""

from __future__ import annotations

from collections.abc import Sequence

from tunemq_scheduler.core.handlers.inherited_states import exploit
from tunemq_scheduler.core.trial_actions import TrialActions
from tunemq_scheduler.core.trials.trial import PAUSED, RUNNING, TERMINATED, Trial
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol import messages as m


def action_taken(
    runner: TrialActions, event: m.ActionTaken, answers: Sequence[m.AlgorithmAnswer]
) -> None:
    """Act on a trial; ``answers`` may hold its new horizon. A trial that ends ends anyway."""
    trial = runner.live.get(event.trial)
    if trial is None or trial.is_finished or trial.ending:
        return
    trial.story.append(event)
    if _changes_something(trial, event.action):
        runner.decided(trial, event.action, event.reason, event.source)
    match event.action:
        case m.PAUSE:
            runner.pause(trial, event.reason)
        case m.RESUME:
            runner.resume(trial)
        case m.STOP if trial.status == RUNNING:
            runner.end_early(trial, event.reason)
        case m.STOP:
            runner.end(trial, TERMINATED, event.reason, early=True)
        case m.EXPLOIT:
            exploit(runner, trial, event, answers)
        case m.SET_CONFIG | m.SET_RESOURCES:
            _change(runner, trial, event)
        case _:
            raise BugError(f"there is no action {event.action!r}")


def _changes_something(trial: Trial, action: str) -> bool:
    """Whether a trial does not already do what it is told; `exploit` notes its own decision."""
    if action == m.PAUSE:
        return trial.status != PAUSED and (not trial.pausing or trial.resuming)
    if action == m.RESUME:
        return trial.status == PAUSED or bool(trial.pausing and not trial.resuming)
    return action in {m.STOP, m.SET_CONFIG, m.SET_RESOURCES}


def _change(runner: TrialActions, trial: Trial, event: m.ActionTaken) -> None:
    """Give a trial another configuration or request; a running one saves and starts again."""
    if event.config:
        trial.leave_config()
        trial.config = event.config
    if event.resources:
        trial.resources, trial.is_alone = event.resources, False
    if trial.status != RUNNING:
        if trial.trial_id in runner.left_behind:
            trial.attempt += 1  # a process on a node that is away has the former ones
        runner.queue.follow(trial)
    elif not trial.pausing:
        runner.pause(trial, event.reason)
        runner.resume(trial)
