"""What the experiment's loop needs of those who keep its turns, and of those who keep records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tunemq_scheduler.core import commands as c
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_shared.protocol import messages as m


class TurnLog(Protocol):
    """What a turn is written to: the journal, or in a simulation a list."""

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        """Keep one turn, durably."""

    def close(self) -> None:
        """No turn follows."""


class NotificationSink(Protocol):
    """Loggers, callbacks and the table: they learn what has become a fact."""

    def notify(self, command: c.NotifyCommand, trial: TrialView) -> None:
        """One thing happened to a trial."""

    def trial_waits(self, trial: TrialView) -> None:
        """A trial begins to wait for the store (`TrialView.waits` says why), or goes on."""

    def turn_began(self) -> None:
        """The loop looks for events again."""

    def turn_ended(self) -> None:
        """The turn's records have all been given."""

    def notices(self, text: str) -> None:
        """Something happened, to no trial, that the person at the terminal should know."""
