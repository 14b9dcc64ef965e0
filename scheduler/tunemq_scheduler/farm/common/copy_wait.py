"""`CopyWaitingExecutor`: delays irreversible actions until the journal's copy has their cause."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from tunemq_scheduler.journal import Journal
from tunemq_scheduler.journal.journal_copy import JournalCopy


class CopyWaitingExecutor(ABC):
    """Delays irreversible actions if the experiment's journal has a copy in a store."""

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._copy: JournalCopy | None = None
        self._releases_copied = False
        #: Actions that wait until the journal's copy has this many turns.
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        #: Acknowledgements that wait until the copy has this turn: the next one, and the newest.
        #: More than these two would add nothing.
        self._acknowledgements: deque[tuple[int, dict[str, int]]] = deque()

    def follow(self, journal: Journal, copy: JournalCopy, *, releases: bool) -> None:
        """Delay irreversible actions until the journal's copy contains their cause.

        Args:
            journal: the experiment's journal.
            copy: its copy in the store.
            releases: whether acknowledgements to nodes wait, too.
        """
        self._journal, self._copy, self._releases_copied = journal, copy, releases

    def when_copied(self, call: Callable[[], None]) -> None:
        """Run a call as soon as the last turn is in the journal's copy; at once without a copy."""
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
        """Run the actions whose turns are in the copy."""
        if self._copy is None:
            return
        while self._held and self._held[0][0] <= self._copy.turn:
            self._held.popleft()[1]()
        while self._acknowledgements and self._acknowledgements[0][0] <= self._copy.turn:
            self.acknowledge_now(self._acknowledgements.popleft()[1])

    def end_copy(self) -> None:
        """Complete the copy, and run all waiting actions."""
        if self._copy is not None:
            self._copy.close()
            self.do_copied()

    def copy_notices(self) -> list[str]:
        """Return what happened to the copy, for people."""
        return self._copy.notices() if self._copy is not None else []

    def copy_lag(self) -> tuple[float, int]:
        """Return by how many seconds, and by how many bytes, the journal's copy is behind."""
        return (
            (self._copy.behind_s, self._copy.behind_bytes) if self._copy is not None else (0.0, 0)
        )

    @abstractmethod
    def acknowledge_now(self, acknowledged: dict[str, int]) -> None:
        """Acknowledge events to the nodes at once."""
