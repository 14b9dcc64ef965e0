"""Ray Tune's ``tune.schedulers``: which trials continue and which stop early."""

from __future__ import annotations

from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    FIFOScheduler,
    TrialScheduler,
    create_scheduler,
)

__all__ = [
    "ASHAScheduler",
    "AsyncHyperBandScheduler",
    "FIFOScheduler",
    "TrialScheduler",
    "create_scheduler",
]
