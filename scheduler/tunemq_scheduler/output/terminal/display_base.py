"""`Display`: the base class of displays, which shows nothing."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from tunemq_scheduler.output.terminal.display_view import SearchView
    from tunemq_scheduler.results.result import Result
    from tunemq_scheduler.results.trial_failures import TrialFailure
    from tunemq_scheduler.results.trial_view import TrialView


class Display:
    """Base class of displays: override the methods that you need. A display never fails the search.

    Attributes:
        wants_results: whether `trial_result` does anything; if not, callers may skip it.
    """

    wants_results = False

    def begin(self, view: SearchView) -> None:
        """Called when the search begins."""

    def trial_started(self, trial: TrialView) -> None:
        """Called when a trial process starts to run the trial."""

    def trial_result(self, trial: TrialView, result: dict[str, Any]) -> None:
        """Called when the trial reported."""

    def trial_failed(self, trial: TrialView, failure: TrialFailure) -> None:
        """Called when an attempt failed; ``failure.is_final`` says whether the trial has ended."""

    def trial_ended(self, trial: TrialView, reason: str) -> None:
        """Called when the trial is TERMINATED or in ERROR."""

    def trial_waits(self, trial: TrialView) -> None:
        """Called when the trial begins or ends to wait for the store; see ``trial.waits``."""

    def notices(self, text: str) -> None:
        """Called for an event that concerns no trial: a node's warning, a restarted service."""

    def update(self, view: SearchView) -> None:
        """Called after each turn of the loop; cheap unless a drawing is due."""

    def end(self, view: SearchView, results: Sequence[Result]) -> None:
        """Show the end of the search, with the results of all trials."""

    def close(self) -> None:
        """Restore the terminal; nothing is shown after it. May be called twice."""


#: Error numbers of a full disk.
_NO_ROOM: Final = frozenset({errno.EDQUOT, errno.ENOSPC})


class TerminalOutput:
    """A stream that may be closed, on a full disk, or unable to encode every character.

    None stands for a stream that was closed before this process began (``>&-``).
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self._is_broken = False

    def write(self, *lines: str) -> None:
        """Write lines; after a failure (``script | head``), write nothing more.

        A full disk may have space again later: until then lines are lost.
        """
        if self.stream is None or self._is_broken:
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        text = "".join(f"{line}\n" for line in lines)
        try:
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._is_broken = not (isinstance(error, OSError) and error.errno in _NO_ROOM)
