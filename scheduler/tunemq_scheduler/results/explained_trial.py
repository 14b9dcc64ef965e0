"""Explains in words what became of a trial, and what was decided about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_scheduler.core.trials.trial import TrialSummary


def explain_status(trial: str, summary: TrialSummary) -> str:
    """Return a trial's status, with its reason unless that is the newest decision's."""
    newest = summary.decisions[-1].reason if summary.decisions else ""
    is_shown = bool(summary.reason) and summary.reason != newest
    return f"trial {trial} is {summary.status}" + (f": {summary.reason}" if is_shown else "")


def explain_decisions(decisions: Sequence[TrialDecision], before: int) -> Iterator[str]:
    """Yield a line for each decision about a trial, oldest first.

    Args:
        decisions: those that are kept.
        before: the number of older ones.
    """
    if before:
        yield f"{before} older decisions about it are in its result.json"
    for decision in decisions:
        yield str(decision)
