"""Exceptions that end a trial's code early, and that ``except Exception`` does not catch.

They derive from `BaseException`, as `KeyboardInterrupt` does. So training code that survives a
failing batch by catching every `Exception` still ends when it must, and its ``finally`` blocks run.
"""

from __future__ import annotations


class TrialExit(BaseException):
    """The trial has ended while its code was still running; do not catch this."""


class TrialStopExit(TrialExit):
    """The scheduler ordered the trial to stop."""


class TrialDoneExit(TrialExit):
    """The last result reached a stop criterion, or said ``done``."""


class TrialPauseExit(TrialExit):
    """The scheduler ordered the trial to pause; it continues later, perhaps on another node."""
