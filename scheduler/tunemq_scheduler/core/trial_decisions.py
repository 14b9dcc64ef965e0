"""`TrialDecision`: one decision about a trial, with its reason; a trial keeps its newest ones."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import Name

#: The most decisions that a trial keeps, which bounds the memory of a search with many trials.
MOST_DECISIONS: Final = 32
#: The longest reason that is kept.
REASON_CHARACTERS: Final = 500

_WORDS: Final = {
    m.STOP: "stopped",
    m.PAUSE: "paused",
    m.RESUME: "resumed",
    m.SET_CONFIG: "given another configuration",
    m.SET_RESOURCES: "given other resources",
}


class TrialDecision(msgspec.Struct, frozen=True, array_like=True):
    """A decision about a trial, other than that it continues.

    Attributes:
        step (int): the trial's newest step at that time; 0 before its first result.
        action (str): ``STOP``, ``PAUSE``, ``RESUME``, ``EXPLOIT``, ``SET_CONFIG`` or
            ``SET_RESOURCES``.
        reason (str): why, with the numbers that were compared; at most 500 characters.
        source (str): the ID of the trial whose state an ``EXPLOIT`` takes over; else empty.
        lineage (int): the trial's lineage before the decision.
        elapsed_s (float): seconds for which the search had run, over all runs.

    Example:
        >>> from tunemq.result_grid import TrialDecision
        >>> print(TrialDecision(9, "STOP", "loss 0.33 is not among the best 1/3 of 12 trials"))
        stopped at step 9: loss 0.33 is not among the best 1/3 of 12 trials
    """

    step: int
    action: Name
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS)] = ""
    source: Name = ""
    lineage: int = 0
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        """Return the decision as one line."""
        word = _WORDS.get(self.action, self.action)
        if self.action == m.EXPLOIT:
            word = f"exploited trial {self.source}"
        where = f" of lineage {self.lineage}" if self.lineage else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{word} at step {self.step}{where}{why}"
