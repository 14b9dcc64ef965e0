"""How a trial's code is left before its own end: an exception that ``except Exception`` lets pass.

It derives from `BaseException`, as `KeyboardInterrupt` does, so that training code which survives a
failing batch by catching everything still ends when it is told to, and its ``finally`` blocks run.
"""

from __future__ import annotations


class TrialExit(BaseException):
    """The trial has ended while its code was still running; let this pass."""


class TrialStopExit(TrialExit):
    """The scheduler ordered the trial to stop."""


class TrialDoneExit(TrialExit):
    """The last result reached a stop criterion, or said ``done``."""


class TrialPauseExit(TrialExit):
    """The scheduler ordered the trial to pause; it goes on later, perhaps on another node."""
