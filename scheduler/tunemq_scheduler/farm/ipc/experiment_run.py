"""`ExperimentRun`: what the supervisor knows about one experiment with a process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.farm.allocation.offer_pace import OfferPace
from tunemq_scheduler.farm.ipc.supervisor_side import ExperimentConnection
from tunemq_shared.system.stopped_process import StoppedProcessDetector

#: The kinds of trouble in words, and how many experiments a sentence names.
_TROUBLES: Final = MappingProxyType(
    {"silent": "does not answer", "failing": "fails", "waiting": "waits for a version or its store"}
)
_NAMED: Final = 16
#: A process that has lived for this long is steady.
_STEADY_S: Final = 60.0


@dataclass(slots=True)
class ExperimentRun:
    """An experiment that has a process, or is about to get one again.

    Attributes:
        name: the experiment.
        connection: to its process; None if there is none.
        ends, deaths: how many of its processes in a row ended soon after their start, and how many
            of these died.
        failure: how the last of these ended, in words; valid as long as ``ends``.
        begun_at: when its newest process had loaded the code and begun; None before.
        restart_at: when to start the next process.
        ends_for: the state to enter after its process has ended, and ``because``, the reason; None
            if it should not end. It ends once its trials have saved and given back their slots.
        is_told_to_end: whether the process was asked to end.
        end_by: when to kill the process, because its code may hang; None if it should not end.
        usage: the last usage report of its process; the allocator gets it as ``pace`` changes it.
        pace: limits offers to an experiment that does not use them quickly.
        stops: detects whether the process is stopped (SIGSTOP); checked again at ``look_at``.
        waits: the version that it waits for, in words; empty if it waits for none.
        is_silent: whether people were informed that its process is silent.
        hangs: how many of its processes were ended for silence.
        is_aborted: whether the current process was ended for silence.
        starts_over_for: why its process is killed and all its trials continue from checkpoints;
            empty if they need not.
        failing_since: since when none of its processes has said what its trials hold.
        has_begun: whether it is known that the search has begun, by this or an earlier process.
    """

    name: str
    connection: ExperimentConnection | None = None
    ends: int = 0
    deaths: int = 0
    failure: str = ""
    begun_at: float | None = None
    restart_at: float = 0.0
    ends_for: State | None = None
    because: str = ""
    is_told_to_end: bool = False
    end_by: float | None = None
    usage: OfferUsage | None = None
    pace: OfferPace = field(default_factory=OfferPace)
    stops: StoppedProcessDetector = field(default_factory=StoppedProcessDetector)
    look_at: float = 0.0
    waits: str = ""
    is_silent: bool = False
    hangs: int = 0
    is_aborted: bool = False
    starts_over_for: str = ""
    failing_since: float | None = None
    has_begun: bool = False

    @property
    def is_steady(self) -> bool:
        """Whether its newest process has run long enough that earlier ends do not count."""
        return self.begun_at is not None and time.monotonic() >= self.begun_at + _STEADY_S

    @property
    def trouble(self) -> str:
        """The kind of trouble that keeps it from making progress; empty if there is none."""
        if self.waits:
            return "waiting"
        if self.is_silent:
            return "silent"
        return "failing" if self.ends else ""

    @property
    def failed(self) -> str:
        """How often its processes ended in a row, why, and what happens next."""
        how_often = "once" if self.ends == 1 else f"{self.ends} times in a row"
        wait_s = max(0.0, self.restart_at - time.monotonic()) if self.connection is None else 0.0
        next_one = (
            f"It is restarted in {wait_s:.0f} s."
            if self.connection is None
            else "It was restarted."
        )
        why = self.failure.rstrip(".")
        return f"The process of {self.name} failed {how_often}: {why}. {next_one}"

    @property
    def holds(self) -> bool:
        """Whether its trials hold resources, according to its last report."""
        return self.usage is not None and bool(self.usage.held)


def in_words(names: Iterable[str], troubles: Mapping[str, str]) -> str:
    """Return the names of experiments, first of those in trouble, with the kind of trouble."""
    names = sorted(names, key=lambda name: name not in troubles)
    shown = [
        f"{name} ({_TROUBLES[troubles[name]]})" if name in troubles else name for name in names
    ]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(shown[:_NAMED]) + more
