"""Explains trials from an experiment's folder or store alone, for ``tunemq why PATH``."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.cli.experiment_checkpoints import opened_journal
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.results.explained_trial import explain_decisions, explain_status
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.objects.store_address import without_settings

#: The end of a trial's name, and the whole of its ID.
_TRIAL_ID: Final = re.compile(r"[0-9a-z]{5}_\d{5,9}")


def is_place(name: str) -> bool:
    """Whether an argument is a path or an address, and no name of an experiment on a farm."""
    return "://" in name or name.startswith(("/", "./", "../", "~")) or name in {".", ".."}


def explain_results(place: str, trial: str) -> a.Explanation:
    """Explain what became of a trial, or of all trials, by the experiment's journal.

    Args:
        place: the experiment's folder, or its address in a store; a trial's name may follow.
        trial: the trial's name or ID; empty for none.

    Raises:
        ConfigError: there is no such experiment, or it has no such trial.
        JournalError: its journal cannot be read.
        StoreError: its store cannot be reached.
    """
    place = place.rstrip("/") or place
    head, _, last = place.rpartition("/")
    if not trial and _TRIAL_ID.fullmatch(_id_of(last)):
        place, trial = head, last
    with opened_journal(place) as (runner, _found):
        if not trial:
            return a.Explanation(lines=tuple(_about_all(runner)))
        name = next((one for one in (trial, _id_of(trial)) if _has(runner, one)), None)
        if name is None:
            raise ConfigError(f"there is no trial {trial} in {without_settings(place)}.")
        summary = runner.summary(name)
    return a.Explanation(
        lines=(
            explain_status(name, summary),
            *explain_decisions(summary.decisions, summary.decisions_before),
        ),
        decisions=tuple(a.DecisionRow(**msgspec.structs.asdict(one)) for one in summary.decisions),
    )


def _about_all(runner: TrialRunner) -> list[str]:
    counts = ", ".join(f"{count} {state}" for state, count in runner.counts.items() if count)
    lines = [f"it has {runner.suggested} trials: {counts or 'none'}"]
    if runner.stopping:
        lines.append(f"it was stopped: {runner.stopping}")
    if runner.interrupted:
        lines.append(f"it was interrupted: {runner.interrupted}")
    if runner.exhausted:
        lines.append("its search algorithm has no more configurations")
    return lines


def _has(runner: TrialRunner, trial: str) -> bool:
    return trial in runner.live or trial in runner.finished


def _id_of(name: str) -> str:
    """Return the ID in a trial's name."""
    return "_".join(name.split("_")[-2:])
