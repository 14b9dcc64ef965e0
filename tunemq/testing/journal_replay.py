"""Checks a journal: passes the same events to fresh algorithms, one result at a time.

`replay` asks no algorithm and returns the state of the live runner. `replay_lock_step` asks the
algorithms about *every* result, in the journal's order, as if no trial had ever run ahead;
decisions, recorded results and kept checkpoints must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.search.search_generator import Suggestion
from tunemq_shared.base.errors import BugError, InvariantBroken
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m


def replay(settings: RunnerSettings, entries: Iterable[m.JournalRecord]) -> TrialRunner:
    """Return the state after these entries; its `TrialRunner.snapshot` equals the live runner's."""
    runner = TrialRunner(settings)
    for entry in entries:
        runner.handle(entry.event, entry.answers)
    return runner


class ReplayOutcome(msgspec.Struct):
    """The outcome of a run; two runs agree if these are equal.

    Attributes:
        decisions: (trial, step, decision) in the journal's order; the step of an action is 0.
        records: (trial, step, metrics) of every recorded result, in order.
        kept: the keys of the checkpoints that each trial kept.
        ends: (trial, status) in order.
        suggestions: the encoded configurations, in order.
    """

    decisions: list[tuple[str, int, str]] = msgspec.field(default_factory=list)
    records: list[tuple[str, int, dict[str, Any]]] = msgspec.field(default_factory=list)
    kept: dict[str, list[str]] = msgspec.field(default_factory=dict)
    ends: list[tuple[str, str]] = msgspec.field(default_factory=list)
    suggestions: list[tuple[str, bytes]] = msgspec.field(default_factory=list)

    def note_turn(self, entries: Iterable[m.JournalRecord], commands: Iterable[c.Command]) -> None:
        """Add a turn of the journal, and its commands."""
        for entry in entries:
            if type(entry.event) is m.ConfigSuggested:
                self.suggestions.append((entry.event.trial, entry.event.config))
            if type(entry.event) is m.ActionTaken:
                self.decisions.append((entry.event.trial, 0, entry.event.action))
            if entry.answers:
                self.note(entry.answers, ())
        self.note((), commands)

    def note(
        self, entry_answers: Iterable[m.AlgorithmAnswer], commands: Iterable[c.Command]
    ) -> None:
        """Add the consequences of one event."""
        for answer in entry_answers:
            if isinstance(answer, m.DecisionMade):
                self.decisions.append((answer.trial, answer.step, answer.decision))
        for command in commands:
            match command:
                case c.NotifyResult():
                    self.records.append(
                        (command.trial, command.result.step, command.result.metrics)
                    )
                case c.NotifyTrialEnd():
                    self.ends.append((command.trial, command.status))
                case c.NotifyCheckpoint():
                    self.kept.setdefault(command.trial, []).append(command.checkpoint.key)
                case c.DeleteCheckpoint():
                    keys = self.kept.setdefault(command.trial, [])
                    if command.key in keys:
                        keys.remove(command.key)
                case _:
                    pass


def outcome(settings: RunnerSettings, entries: Iterable[m.JournalRecord]) -> ReplayOutcome:
    """Return the outcome of the run that wrote these entries."""
    runner, seen = TrialRunner(settings), ReplayOutcome()
    for entry in entries:
        seen.note_turn((entry,), runner.handle(entry.event, entry.answers))
    return seen


def replay_lock_step(
    settings: RunnerSettings,
    plan: ExperimentPlan,
    algorithms: AlgorithmDriver,
    entries: Iterable[m.JournalRecord],
) -> ReplayOutcome:
    """Return the outcome of the same results if the algorithms are asked about each of them.

    Args:
        algorithms: fresh ones, created like those of the run, with ``lock_step=True``.

    Raises:
        InvariantBroken: a run with these decisions cannot have produced the events.
    """
    driver, seen = EventDriver(TrialRunner(settings), algorithms, plan), ReplayOutcome()
    for entry in entries:
        event = entry.event
        if isinstance(event, m.ActionTaken):
            continue  # the algorithms take their actions themselves
        if isinstance(event, m.ConfigSuggested):
            seen.suggestions.append((event.trial, _suggested_again(algorithms, event)))
        try:
            driver.handle(event)
        except BugError as error:
            raise InvariantBroken(
                f"the recorded events do not fit the decisions in lock-step: {error}"
            ) from error
        cause, *actions = driver.journal_records
        seen.note(cause.answers, driver.commands)
        seen.note_turn(actions, ())
        driver.end_turn()
    return seen


def compare(live: ReplayOutcome, again: ReplayOutcome) -> None:
    """Check that two runs have the same outcome.

    Raises:
        InvariantBroken: they differ; the message names the first difference.
    """
    for field in ("suggestions", "decisions", "records", "ends"):
        ours, theirs = getattr(live, field), getattr(again, field)
        for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                raise InvariantBroken(
                    f"{field}[{place}]: the run has {one}, in lock-step it is {other}"
                )
        if len(ours) != len(theirs):
            raise InvariantBroken(
                f"the run has {len(ours)} {field}, in lock-step there are {len(theirs)}"
            )
    kept = {trial: keys for trial, keys in live.kept.items() if keys}
    again_kept = {trial: keys for trial, keys in again.kept.items() if keys}
    if kept != again_kept:
        raise InvariantBroken(f"kept checkpoints differ: {kept} and {again_kept}")


def _suggested_again(algorithms: AlgorithmDriver, event: m.ConfigSuggested) -> bytes:
    suggestion = algorithms.suggest(event.n, event.trial)
    return pack_config(suggestion.config) if isinstance(suggestion, Suggestion) else b""
