"""What a trial may take at most before its host is killed."""

from __future__ import annotations

import msgspec


class TrialLimitSpec(msgspec.Struct, frozen=True, array_like=True):
    """The limits of each trial of an experiment; 0 is no limit, except where it says otherwise.

    Time in which the trial waits for its node (for a decision, for room for a checkpoint, for one
    to be restored) counts for none of them.

    Attributes:
        step_s: seconds from one report to the next, or from the start to the first.
        trial_s: seconds in all, those of earlier attempts included.
        stall_s: seconds without a report, after which the trial's Python stack is written to its
            log before it is killed.
        memory: bytes that the host's whole family holds in memory.
        processes: how many the host and its family are.
        open_files: descriptors that each of its processes may have; 0: as many as its node's.
        core_bytes: how much of each of its processes is written to a file when that crashes.
    """

    step_s: float = 0.0
    trial_s: float = 0.0
    stall_s: float = 0.0
    memory: int = 0
    processes: int = 0
    open_files: int = 0
    core_bytes: int = 0

    @property
    def has_times(self) -> bool:
        """Whether any of them is a time."""
        return bool(self.step_s or self.trial_s or self.stall_s)
