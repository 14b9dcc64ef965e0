"""The limits at which a node kills a trial process."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tunemq_shared.protocol.message_limits import Finite


class TrialLimitSpec(msgspec.Struct, frozen=True, array_like=True):
    """The limits of each trial of an experiment; 0 means no limit, except where noted.

    Time in which the trial waits for its node (for a decision, for space for a checkpoint, for a
    restore) does not count.

    Attributes:
        step_s: Seconds from one report to the next, or from the start to the first.
        trial_s: Seconds in total, including earlier attempts.
        stall_s: Seconds without a report, after which the node writes the trial's Python stack to
            its log and kills it.
        memory: Bytes of memory of the whole process tree.
        processes: Number of processes in the process tree.
        open_files: Descriptors per process; 0: as many as its node may open.
        core_bytes: Most bytes of a core file; 0 writes none.
    """

    step_s: Finite = 0.0
    trial_s: Finite = 0.0
    stall_s: Finite = 0.0
    memory: Annotated[int, msgspec.Meta(ge=0)] = 0
    processes: Annotated[int, msgspec.Meta(ge=0)] = 0
    open_files: Annotated[int, msgspec.Meta(ge=0)] = 0
    core_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def has_times(self) -> bool:
        """Whether any limit on time is set."""
        return bool(self.step_s or self.trial_s or self.stall_s)
