"""Formats notices about damaged or lost checkpoints, failing nodes and ended trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tunemq_scheduler.core.commands import WarnFailingNode, WarnStateLost, WarnTrialEnd
from tunemq_scheduler.results.trial_failures import failure_of
from tunemq_shared.protocol import messages as m

#: The most lost checkpoints that a notice names.
_NAMED: Final = 5
#: The most keys of a result that a notice names.
_NAMED_KEYS: Final = 20


def format_lost_node(node: m.NodeLost, keys: Sequence[str]) -> str:
    """Return a line about checkpoints that existed only on the disk of a lost node.

    Args:
        keys: the checkpoints' keys; at least one.
    """
    named = ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
    what = "1 checkpoint was" if len(keys) == 1 else f"{len(keys)} checkpoints were"
    then = "" if node.is_dead else "; it may still bring them, while their trials wait for a slot"
    return f"{what} not in the store yet when their node was lost ({node.reason}): {named}{then}"


def format_superseded(results: int) -> str:
    """Return a line about results that came too late, after another scheduler had taken over."""
    what = "1 result" if results == 1 else f"{results} results"
    return (
        f"{what} of a former attempt, whose trial continued elsewhere meanwhile, came late and "
        "were dropped; no recorded result changed"
    )


def format_unreported(keys: Sequence[str], trial: str, reported: Iterable[str]) -> str:
    """Return a line about keys of stop criteria that the search's first result does not have."""
    what = " and ".join(repr(key) for key in keys)
    names = [*reported]
    has = ", ".join(map(repr, names[:_NAMED_KEYS])) + (", ..." if len(names) > _NAMED_KEYS else "")
    return (
        f"RunConfig(stop=...) compares {what}, which the first result (trial {trial}) does not "
        f"have; it has {has}. A criterion ends no trial until a result has its key."
    )


def format_failing_node(node: WarnFailingNode) -> str:
    """Return a line about a node on which many trials fail in a row."""
    return (
        f"node {node.node} on {node.hostname} is set aside for {node.pause_s:g} s: {node.trials} "
        f"different trials in a row failed there, with no result in between ({node.reason})"
    )


def format_state_lost(command: WarnStateLost) -> str:
    """Return a line about a trial that cannot continue from the state of another one."""
    if command.source == command.trial and not command.step:
        return f"trial {command.trial} begins again from nothing: its own checkpoints are lost, too"
    what = f"continues from step {command.step}" if command.step else "keeps its own state"
    return (
        f"trial {command.trial} {what}: the newer checkpoint of trial {command.source}, from which "
        "it was to continue, is lost"
    )


def format_trial_end(end: WarnTrialEnd, *, saves_at_end: bool) -> str:
    """Return a line about a trial whose process was gone before the trial had ended.

    Args:
        saves_at_end: whether the trial should have saved a checkpoint at its end.
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
        f"{where}{why}: it has ended, with all of its results, and is not tried again{lacks}"
    )


def format_checkpoint_event(event: m.CheckpointLost | m.CheckpointDamaged) -> str:
    """Return a line about a checkpoint event; it names every checkpoint concerned first."""
    about = f"checkpoint {event.key} of trial {event.trial}"
    if isinstance(event, m.CheckpointLost):
        return f"{about} will never be in the store: {event.reason}"
    then = f"continues from {event.instead} instead" if event.instead else "has none instead"
    return f"{about} is damaged; the trial {then}: {event.reason}"
