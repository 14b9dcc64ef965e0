"""Interfaces between the experiment's loop, its journal and its notification receivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_shared.protocol import messages as m


class TurnLog(Protocol):
    """The log of turns: the journal, or a list in a simulation."""

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        """Store one turn durably."""

    def close(self) -> None:
        """Close the log; no turn follows."""


class NotificationSink(Protocol):
    """Receives notifications for loggers, callbacks and the table, after they are journalled."""

    def notify(self, command: c.NotifyCommand, trial: TrialView) -> None:
        """Pass on one notification about a trial."""

    def trial_waits(self, trial: TrialView) -> None:
        """A trial begins or ceases to wait for the store; `TrialView.waits` says why."""

    def turn_began(self) -> None:
        """The loop begins to look for events."""

    def turn_ended(self) -> None:
        """The loop has passed all notifications of the turn."""

    def notices(self, text: str) -> None:
        """Show the user a notice that concerns no single trial."""
