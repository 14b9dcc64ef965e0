"""A display shows a search while it runs; the base shows nothing."""

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
    """Shows nothing; override what interests you. A display never makes the search fail.

    Attributes:
        wants_results: whether `trial_result` does anything; where it does not, nobody need call it.
    """

    wants_results = False

    def begin(self, view: SearchView) -> None:
        """The search begins."""

    def trial_started(self, trial: TrialView) -> None:
        """A host runs the trial."""

    def trial_result(self, trial: TrialView, result: dict[str, Any]) -> None:
        """The trial reported."""

    def trial_failed(self, trial: TrialView, failure: TrialFailure) -> None:
        """An attempt of the trial failed; ``failure.is_final`` says whether it is over."""

    def trial_ended(self, trial: TrialView, reason: str) -> None:
        """The trial is TERMINATED or in ERROR."""

    def trial_waits(self, trial: TrialView) -> None:
        """The trial begins to wait for the store, as ``trial.waits`` says, or goes on."""

    def notices(self, text: str) -> None:
        """Something happened that is about no trial: a node warned, a service was started again."""

    def update(self, view: SearchView) -> None:
        """A turn of the loop is over; cheap unless it is time to draw."""

    def end(self, view: SearchView, results: Sequence[Result]) -> None:
        """The search is over, with what became of all its trials: show it."""

    def close(self) -> None:
        """Leave the terminal as it was; after it, nothing is shown. May be called twice."""


#: What a full disk says.
_NO_ROOM: Final = frozenset({errno.EDQUOT, errno.ENOSPC})


class TerminalOutput:
    """A stream that may be closed, on a full disk, or unable to hold every character.

    None stands for one that was closed before this process began (``>&-``).
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self._is_broken = False

    def write(self, *lines: str) -> None:
        """Write lines; once that fails (``script | head``), nothing is written any more.

        A disk that is full may have room again: until then lines are lost.
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
