"""Classification of a reported result before any algorithm sees it."""

from __future__ import annotations

import enum


class ResultReview(enum.Enum):
    """Whether a result counts, and which components it concerns."""

    STALE = "of an older attempt, or behind the trial's end: dropped"
    REPEATED = "a step that is recorded already, or behind the trial's last: dropped"
    BEFORE_HORIZON = "before the horizon: recorded, nobody is asked"
    DUE = "at the horizon: the algorithms decide"
    FINAL = "the trial's last: recorded, the algorithms are told"
