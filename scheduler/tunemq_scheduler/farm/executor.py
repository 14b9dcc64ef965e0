"""`FarmExecutor`: the backend of a farm's scheduler: nodes that come and go, a lease to hold."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tunemq_scheduler.executors.celery_executor import CeleryTrialExecutor
from tunemq_scheduler.executors.redis_line import Command
from tunemq_scheduler.farm.lease import SchedulerLease
from tunemq_scheduler.journal import Journal
from tunemq_scheduler.journal.copy import JournalCopy
from tunemq_shared import wire

#: Workers that are there are known within so long; only then is it said that there are none.
_PATIENCE_S: Final = 2.0


class FarmExecutor(CeleryTrialExecutor):
    """Runs trials on whatever workers there are, and says so while there are none.

    What it writes to Redis it writes only as long as there is no newer term.

    Args:
        url: where Redis is.
        lease: held by this process.
        address: where Redis is, without its password, for people.
    """

    def __init__(self, url: str, lease: SchedulerLease, *, address: str) -> None:
        super().__init__(url, term=lease.term)
        self._lease = lease
        self._address = address
        self._began = time.monotonic()
        #: Says which trials wait for a node that is not there; set when the search is known.
        self.waiting: Callable[[], Iterable[str]] = tuple
        self._told: set[str] = set()
        self._journal: Journal | None = None
        self._copy: JournalCopy | None = None
        self._releases_copied = False
        #: What waits until the journal's copy has so many turns.
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        #: How far nodes may be told that their events are kept, once the copy has that turn: the
        #: one that is waited for, and the newest. More than these two would say nothing more.
        self._releases: deque[tuple[int, dict[str, int]]] = deque()
        #: Whether the farm's stream is ours.
        self._has_farm = False
        #: Whether nodes were left to themselves, for another scheduler.
        self.is_left = False

    # --- the journal's copy -----------------------------------------------------------------------

    def follow(self, journal: Journal, copy: JournalCopy, *, releases: bool) -> None:
        """Wait with what cannot be taken back until the copy of the journal has the reason for it.

        Args:
            releases: also with telling nodes what they may forget.
        """
        self._journal, self._copy, self._releases_copied = journal, copy, releases

    def when_copied(self, call: Callable[[], None]) -> None:
        """Do what follows from the last turn as soon as it is in the journal's copy, if any."""
        if self._journal is None:
            call()
        else:
            self._held.append((self._journal.turn, call))
            self._do_copied()

    def release(self, accepted: dict[str, int]) -> None:
        """Tell nodes how far their events are journalled, or copied; and trim the stream."""
        if self._journal is None or not self._releases_copied:
            super().release(accepted)
            return
        if len(self._releases) > 1:
            self._releases.pop()
        self._releases.append((self._journal.turn, dict(accepted)))
        self._do_copied()

    def _do_copied(self) -> None:
        if self._copy is None:
            return
        while self._held and self._held[0][0] <= self._copy.turn:
            self._held.popleft()[1]()
        while self._releases and self._releases[0][0] <= self._copy.turn:
            super().release(self._releases.popleft()[1])

    def _attend(self) -> None:
        self._lease.check_known()  # one that has nothing to journal would not look
        self._do_copied()
        super()._attend()

    # --- whose farm it is -------------------------------------------------------------------------

    def _link(self) -> None:
        super()._link()
        if not self._has_farm:
            self._line.ask([self._lease.taking(self._roster.events_key)])
            self._has_farm = True

    def _begin_generation(self) -> None:
        super()._begin_generation()
        self._roster.commands.append(("SET", wire.STREAM, self._roster.events_key))

    # --- the end ----------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether nobody can be told anything."""
        return self._away_since is not None

    def close(self, *, now: bool = False) -> None:
        """End what still runs, once the journal's copy has all; see `TrialExecutor.close`."""
        if self._copy is not None and not now:
            self._copy.close()
            self._do_copied()
        super().close(now=now)

    def leave(self) -> None:
        """Close the connections and tell nobody: nodes go on, for whoever comes next."""
        self.is_left = True
        self._plan = None  # there is nobody to say goodbye to
        super().close(now=True)

    # --- for the person at the terminal -----------------------------------------------------------

    def notes(self) -> list[str]:
        """What holds now: also that there is no worker, or none that is big enough."""
        return [*super().notes(), *self._waits()]

    def news(self) -> list[str]:
        """What happened: also, once, what trials begin to wait for."""
        waits = self._waits()
        new = [text for text in waits if text not in self._told]
        self._told = set(waits)
        copied = self._copy.news() if self._copy is not None else []
        return [*super().news(), *copied, *new]

    def _waits(self) -> list[str]:
        if time.monotonic() < self._began + _PATIENCE_S:
            return []
        if not any(node.is_joined and node.is_heard for node in self._roster.nodes.values()):
            return [f"There is no worker; start some: tunemq worker --redis {self._address}"]
        return list(self.waiting())

    def _guarded(self, commands: Sequence[Command]) -> Sequence[Command]:
        return [self._lease.guarded(commands)]
