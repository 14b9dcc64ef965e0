"""What a farm's executor holds back until the journal's copy has the reason."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from tunemq_scheduler.journal import Journal
from tunemq_scheduler.journal.journal_copy import JournalCopy


class CopyWaitingExecutor(ABC):
    """Waits with what cannot be taken back, where the experiment's journal has a copy."""

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._copy: JournalCopy | None = None
        self._releases_copied = False
        #: What waits until the journal's copy has so many turns.
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        #: How far nodes may be told that their events are kept, once the copy has that turn: the
        #: one that is waited for, and the newest. More than these two would say nothing more.
        self._acknowledgements: deque[tuple[int, dict[str, int]]] = deque()

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
            self.do_copied()

    def acknowledge(self, acknowledged: dict[str, int]) -> None:
        """Tell nodes how far their events are journalled, or copied."""
        if self._journal is None or not self._releases_copied:
            self.acknowledge_now(acknowledged)
            return
        if len(self._acknowledgements) > 1:
            self._acknowledgements.pop()
        self._acknowledgements.append((self._journal.turn, dict(acknowledged)))
        self.do_copied()

    def do_copied(self) -> None:
        """Do what waited for the copy, as far as that has come."""
        if self._copy is None:
            return
        while self._held and self._held[0][0] <= self._copy.turn:
            self._held.popleft()[1]()
        while self._acknowledgements and self._acknowledgements[0][0] <= self._copy.turn:
            self.acknowledge_now(self._acknowledgements.popleft()[1])

    def end_copy(self) -> None:
        """Have the copy be complete, and do all that waited for it."""
        if self._copy is not None:
            self._copy.close()
            self.do_copied()

    def copy_notices(self) -> list[str]:
        """What happened to the copy, for people."""
        return self._copy.notices() if self._copy is not None else []

    def copy_lag(self) -> tuple[float, int]:
        """For how many seconds, and by how many bytes, the journal's copy is behind."""
        return (
            (self._copy.behind_s, self._copy.behind_bytes) if self._copy is not None else (0.0, 0)
        )

    @abstractmethod
    def acknowledge_now(self, acknowledged: dict[str, int]) -> None:
        """Tell nodes how far their events are kept."""
