"""What is said, once and loudly, about checkpoints that are damaged or lost, and failing nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tunemq_scheduler.core.commands import WarnFailingNode, WarnTrialEnd
from tunemq_scheduler.results.trial_failures import failure_of
from tunemq_shared.protocol import messages as m

#: How many of those that went with a node are named.
_NAMED: Final = 5


def format_lost_node(node: m.NodeLost, keys: Sequence[str]) -> str:
    """One line about checkpoints that were on the disk of a node, and nowhere else, when it went.

    Args:
        keys: theirs; at least one.
    """
    named = ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
    what = "1 checkpoint was" if len(keys) == 1 else f"{len(keys)} checkpoints were"
    then = "" if node.is_dead else "; it may still bring them, while their trials wait for a slot"
    return f"{what} not in the store yet when their node was lost ({node.reason}): {named}{then}"


def format_superseded(results: int) -> str:
    """One line about results that came too late, because somebody else had taken over."""
    what = "1 result" if results == 1 else f"{results} results"
    return (
        f"{what} of a former attempt, whose trial went on elsewhere meanwhile, came late and "
        "were dropped; nothing that is recorded changed"
    )


def format_failing_node(node: WarnFailingNode) -> str:
    """One line about a node on which trial after trial fails."""
    return (
        f"node {node.node} on {node.hostname} is set aside for {node.pause_s:g} s: {node.trials} "
        f"different trials in a row failed there, with no result in between ({node.reason})"
    )


def format_trial_end(end: WarnTrialEnd, *, saves_at_end: bool) -> str:
    """One line about a trial whose host was gone before it had ended by itself.

    Args:
        saves_at_end: whether it was to make a checkpoint then.
    """
    why = ""
    if end.failure is not None:
        failure = failure_of(
            end.failure, trial=end.trial, hostname=end.hostname, number=1, retried=False
        )
        why = f" ({failure.error})"
    where = f" on {end.hostname}" if end.hostname else ""
    lacks = ""
    if end.saved < end.step and (end.saved or saves_at_end):
        newest = f"its newest one is of step {end.saved}" if end.saved else "it has none"
        lacks = f"; a checkpoint of that step is missing, {newest}"
    return (
        f"trial {end.trial} had reported its last result (step {end.step}) when it was cut short"
        f"{where}{why}: it is over, with all of its results, and is not tried again{lacks}"
    )


def format_checkpoint_event(event: m.CheckpointLost | m.CheckpointDamaged) -> str:
    """One line for the person at the terminal; names every checkpoint that it is about first."""
    about = f"checkpoint {event.key} of trial {event.trial}"
    if isinstance(event, m.CheckpointLost):
        return f"{about} will never be in the store: {event.reason}"
    then = f"goes on from {event.instead} instead" if event.instead else "has none instead"
    return f"{about} is damaged; the trial {then}: {event.reason}"
