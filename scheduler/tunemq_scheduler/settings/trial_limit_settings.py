"""`TrialLimits`: the most time, memory, processes and files that a trial may use."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import TypeGuard

from tunemq_shared.base.byte_sizes import parse_bytes
from tunemq_shared.base.depth_and_integer_limits import MOST_IN_MESSAGES
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.safe_text import repr_of
from tunemq_shared.protocol import trial_limits

_TIMES = ("step_s", "trial_s", "stall_s")
#: Python and TuneMQ need almost this many descriptors themselves.
_LEAST_FILES = 64


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """Limits on each trial's time, memory, processes and files.

    A trial that exceeds its time, memory or processes is killed together with everything that it
    started. The default of every field, None, means no limit (see ``open_files`` and
    ``core_bytes`` for the exceptions). With ``fit(debug=True)`` there are no limits.

    Times are seconds or a timedelta. The node checks a limit about twenty times while it runs out,
    so a trial may take a little longer than the limit, and never less. Time that a trial spends
    waiting does not count: for a decision of the trial scheduler, for space in the upload queue, or
    for the download of a checkpoint. Before the node kills a trial for its time, it writes the
    Python stacks of all its threads to the trial's ``stderr``, sends SIGTERM, and one second later
    SIGKILL.

    ``"memory"`` among a trial's resources decides where the trial is placed, as in Ray Tune; it is
    not a limit. For a limit on the whole search use ``TuneConfig(time_budget_s=...)``.

    Attributes:
        step_s (float or timedelta): seconds from one report to the next, or from the start to the
            first report (with imports, set-up and restoring). A trial that exceeds it is retried
            like after any other failure.
        trial_s (float or timedelta): seconds of all steps together: those of recorded results,
            however often the trial was paused or retried, and the current one. A trial that exceeds
            it ends in ERROR. To end it as TERMINATED, use the stop criterion
            ``{"time_total_s": ...}``, which is checked after each step.
        stall_s (float or timedelta): seconds without a report. Like ``step_s``, but counted as a
            separate kind of failure: for hangs in searches whose steps differ in length.
        memory (int or str): bytes, or a text such as ``"2GiB"``, that the processes of a trial hold
            together, in memory or swapped out. Shared pages count once, mapped files do not count.
            The node checks up to 50 times a second, more often near the limit; a trial that
            allocates faster exceeds it briefly, unless the node may create control groups
            (``docs/inside-a-trial.md``): then the kernel enforces it.
        processes (int): the most processes of a trial, its own included. Checked like memory; a
            trial that forks quickly may exceed it briefly.
        open_files (int): the most file descriptors of each process of a trial. None: the worker's
            own limit. The worker's hard limit (``ulimit -Hn``) always applies.
        core_bytes (int or str): the largest core file of each process of a trial, as bytes or a
            text such as ``"2GiB"``. None means no core files: a trial that crashes repeatedly would
            fill the disk of a machine that writes them.

    Raises:
        ConfigError: a field is invalid; the message names the field, its value and valid values.

    Example:
        >>> from tunemq import TrialLimits
        >>> TrialLimits(step_s=60, memory="2GiB", processes=16).memory
        '2GiB'
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
            if given is not None and not 1 <= _bytes(given) <= MOST_IN_MESSAGES:
                fix = f'give bytes above 0 or a text such as "2GiB", or None for {otherwise}'
                raise _bad(name, given, fix)
        for name, least, otherwise in (
            ("processes", 1, "no limit"),
            ("open_files", _LEAST_FILES, "the worker's own"),
        ):
            given = getattr(self, name)
            if given is not None and not (is_int(given) and least <= given <= MOST_IN_MESSAGES):
                raise _bad(name, given, f"give a number from {least} on, or None for {otherwise}")

    def for_trials(self) -> trial_limits.TrialLimitSpec:
        """Return the limits in the form that nodes receive: seconds, bytes, and 0 for no limit."""
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
    """Return the seconds in a setting; 0 for None and for a value that is not a time."""
    if isinstance(given, dt.timedelta):
        return given.total_seconds()
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given) if given <= MOST_IN_MESSAGES else math.inf
    return 0.0


def _bytes(given: object) -> int:
    """Return the bytes in a setting; 0 for None and for a value that is not a size."""
    if isinstance(given, str):
        return parse_bytes(given) or 0
    return given if is_int(given) else 0


def is_int(given: object) -> TypeGuard[int]:
    """Whether a value is an integer other than a boolean."""
    return isinstance(given, int) and not isinstance(given, bool)


def _bad(name: str, value: object, fix: str) -> ConfigError:
    if _bytes(value) > MOST_IN_MESSAGES:
        fix = f"the greatest number is {MOST_IN_MESSAGES}"
    return ConfigError(f"TrialLimits({name}={repr_of(value)}) is invalid: {fix}.")
