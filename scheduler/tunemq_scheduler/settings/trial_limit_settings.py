"""`TrialLimits`: what a trial may take at most, as users say it."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import TypeGuard

from tunemq_shared.base.byte_sizes import parse_bytes
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol import trial_limits

_TIMES = ("step_s", "trial_s", "stall_s")
#: What Python and TuneMQ need themselves, and a little.
_LEAST_FILES = 64


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """What each trial may take at most. One that takes more is killed, with all that it started.

    None, the default, is no limit. Times are seconds, or a timedelta; they are looked at about
    twenty times while they run out, so that a trial may have a little more, and never less. Time
    in which a trial waits counts for none of them: for a decision of the trial scheduler, for room
    for its next checkpoint, for a checkpoint to be downloaded. Before a trial is killed for the
    time it took, the Python stacks of all its threads are written to its ``stderr``; then it gets
    SIGTERM, and a second later SIGKILL.

    What a trial asks for as ``"memory"`` among its resources decides where there is room for it,
    as in Ray Tune; it is no limit. How long the whole search may take is
    ``TuneConfig(time_budget_s=...)``. With ``fit(debug=True)`` there are no limits.

    Attributes:
        step_s: from one report to the next; from the start to the first, which includes imports,
            set-up and restoring. A trial that exceeds it is tried again as after any failure.
        trial_s: all steps together: those whose results stand, however often the trial was paused
            or tried again, and what its process does now. A trial that exceeds it ends in ERROR; to
            have it end well, use the stop criterion ``{"time_total_s": ...}``, which is looked at
            after each step.
        stall_s: without a report. The same as ``step_s`` for a trial that hangs, and counted with
            failures of its own kind: for a search whose steps differ in what they take.
        memory: a number of bytes or a text such as ``"2GiB"``: what the processes of a trial hold
            together, swapped out or not; files that they have mapped do not count. Pages that they
            share count once. It is looked at up to 50 times a second, the closer the oftener; one
            that takes memory faster exceeds it for a moment, unless the node may make control
            groups (``docs/inside-a-trial.md``): then the kernel holds the limit.
        processes: how many the trial's process and all that it started may be together. It is
            looked at as memory is: a family that forks as fast as it can may be more for a moment.
        open_files: how many descriptors each of the trial's processes may have. None is as many as
            the worker's own have; more than those could have (``ulimit -Hn``) there never are.
        core_bytes: how large a core file of each of the trial's processes may be, a number of bytes
            or a text such as ``"2GiB"``. None is none at all: where a machine writes core files,
            one trial that crashes again and again would fill its disk.
    """

    step_s: float | dt.timedelta | None = None
    trial_s: float | dt.timedelta | None = None
    stall_s: float | dt.timedelta | None = None
    memory: int | str | None = None
    processes: int | None = None
    open_files: int | None = None
    core_bytes: int | str | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming the field, its value and what it may be.
        """
        for name in _TIMES:
            given = getattr(self, name)
            if given is not None and not 0 < _seconds(given) < math.inf:
                raise _bad(name, given, "give seconds above 0, or None for no limit")
        for name, otherwise in (("memory", "no limit"), ("core_bytes", "none")):
            given = getattr(self, name)
            if given is not None and _bytes(given) < 1:
                fix = f'give bytes above 0 or a text such as "2GiB", or None for {otherwise}'
                raise _bad(name, given, fix)
        for name, least, otherwise in (
            ("processes", 1, "no limit"),
            ("open_files", _LEAST_FILES, "the worker's own"),
        ):
            given = getattr(self, name)
            if given is not None and not (_is_int(given) and given >= least):
                raise _bad(name, given, f"give a number from {least} on, or None for {otherwise}")

    def for_trials(self) -> trial_limits.TrialLimitSpec:
        """The same as nodes are told it."""
        step_s, trial_s, stall_s = (_seconds(getattr(self, name)) for name in _TIMES)
        return trial_limits.TrialLimitSpec(
            step_s,
            trial_s,
            stall_s,
            memory=_bytes(self.memory),
            processes=self.processes or 0,
            open_files=self.open_files or 0,
            core_bytes=_bytes(self.core_bytes),
        )


def _seconds(given: object) -> float:
    """The number of seconds; 0 for none, and for what is no time."""
    if isinstance(given, dt.timedelta):
        return given.total_seconds()
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    return 0.0


def _bytes(given: object) -> int:
    """The number of bytes; 0 for none, and for what is no number of bytes."""
    if isinstance(given, str):
        return parse_bytes(given) or 0
    return given if _is_int(given) else 0


def _is_int(given: object) -> TypeGuard[int]:
    return isinstance(given, int) and not isinstance(given, bool)


def _bad(name: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"TrialLimits({name}={value!r}) is not usable: {fix}.")
