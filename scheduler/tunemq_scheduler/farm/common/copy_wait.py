"""`CopyWaitingExecutor`: delays acknowledgements until the journal's copy has the events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_writer import Journal


class CopyWaitingExecutor(ABC):
    """Delays acknowledgements to nodes if they wait for the journal's copy in a store."""

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._copy: JournalCopy | None = None
        self._releases_copied = False
        #: Acknowledgements that wait until the copy has this turn: the next one, and the newest.
        #: More than these two would add nothing.
        self._acknowledgements: deque[tuple[int, dict[str, int]]] = deque()

    def follow(self, journal: Journal, copy: JournalCopy | None, *, releases: bool) -> None:
        """Let acknowledgements follow the journal, or its copy.

        Args:
            journal: the experiment's journal.
            copy: its copy in the store, if there is one.
            releases: whether acknowledgements wait for the copy.
        """
        self._journal, self._copy, self._releases_copied = journal, copy, releases

    def acknowledge(self, acknowledged: dict[str, int]) -> None:
        """Tell nodes how far their events are journalled, or copied."""
        if self._journal is None or self._copy is None or not self._releases_copied:
            self.acknowledge_now(acknowledged)
            return
        if len(self._acknowledgements) > 1:
            self._acknowledgements.pop()
        self._acknowledgements.append((self._journal.turn, dict(acknowledged)))
        self.do_copied()

    def do_copied(self) -> None:
        """Send the acknowledgements whose turns are in the copy."""
        if self._copy is None:
            return
        while self._acknowledgements and self._acknowledgements[0][0] <= self._copy.turn:
            self.acknowledge_now(self._acknowledgements.popleft()[1])

    def end_copy(self) -> None:
        """Complete the copy, and send all waiting acknowledgements."""
        if self._copy is not None:
            self._copy.close()
            self.do_copied()

    def copy_lag(self) -> tuple[float, int]:
        """Return by how many seconds, and by how many bytes, the journal's copy is behind."""
        return (
            (self._copy.behind_s, self._copy.behind_bytes) if self._copy is not None else (0.0, 0)
        )

    @abstractmethod
    def acknowledge_now(self, acknowledged: dict[str, int]) -> None:
        """Acknowledge events to the nodes at once."""
