"""Ray Tune's ``tune.schedulers``: which trials go on and which are stopped early."""

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
